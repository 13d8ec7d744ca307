/* A step's scratch: task lists, rotary tables, attention's partial results and the workers' own memory. */
#ifndef PAGETIER_PLAN_H
#define PAGETIER_PLAN_H

#include "attention.h"

/* Rows [row, row + num_rows): one, or several whose first `num_splits` splits are the same blocks. */
typedef struct {
    int32_t row, num_rows, num_splits;
} pt_row_group;

/* What a batch's attention consists of: prefixes that are carried, then tasks, then merges. */
typedef struct {
    pt_row_group *groups;
    pt_attention_task *prefixes, *tasks;
    pt_attention_merge *merges;
    int64_t num_groups, num_prefixes, num_tasks, num_merges;
} pt_attention_lists;

/* Whether a row has one new token. */
static inline int pt_is_decode(const pt_batch *batch, int32_t row) {
    return batch->query_start_loc[row + 1] - batch->query_start_loc[row] == 1;
}

/* The rows of a batch in groups, in order; returns how many. `groups` has room for one of each row. */
int64_t pt_group_rows(const pt_model *model, const pt_batch *batch, pt_row_group *groups);

size_t pt_attention_worker_bytes(const pt_model *model);
/* Tasks of up to `max_query_rows` query rows. `lists` has room for the most tasks and merges that a batch can have;
 * forward.c lays it out. */
void pt_attention_list(const pt_model *model, const pt_batch *batch, int32_t num_workers, int64_t max_query_rows,
                       pt_attention_lists *lists);

#endif
