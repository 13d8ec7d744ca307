/* A step's scratch: task lists, rotary tables, attention's partial results and the workers' own memory. */
#ifndef PAGETIER_PLAN_H
#define PAGETIER_PLAN_H

#include "attention.h"

typedef struct {
    pt_attention_task *tasks;
    pt_attention_merge *merges;
    int64_t num_tasks, num_merges;
} pt_attention_lists;

size_t pt_attention_worker_bytes(const pt_model *model);
/* Tasks of up to `max_query_rows` query rows. `lists` has room for the most tasks and merges that a batch can have;
 * forward.c lays it out. */
void pt_attention_list(const pt_model *model, const pt_batch *batch, int32_t num_workers, int64_t max_query_rows,
                       pt_attention_lists *lists);

#endif
