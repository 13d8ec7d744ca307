/* Which attention tasks a batch has. */
#include "attention.h"
#include "plan.h"

#define MAX_TASK_SPLITS 8

size_t pt_attention_worker_bytes(const pt_model *model) { return pt_layout(model).end; }

/* The splits [*first, *first + result) that a row's last token attends to. */
static int64_t splits_of(const pt_model *model, const pt_batch *batch, int32_t row, int64_t *first) {
    const int64_t context = batch->seq_lens[row];
    *first = model->window > 0 ? pt_max(0, context - model->window) / PT_SPLIT : 0;
    return pt_ceil(context, PT_SPLIT) - *first;
}

/* How tasks are cut for a batch: query tokens, splits and kv heads of each at most. None of it changes a result. */
typedef struct {
    const pt_model *model;
    const pt_batch *batch;
    int64_t query_tokens, splits;
    int32_t heads;
    int64_t partial, max_partials; /* partial results: given out, and those that have room */
    pt_attention_lists *lists;
} cutting;

static int32_t first_token_of(const cutting *c, int32_t row) { return c->batch->query_start_loc[row]; }

/* A piece of work with its kv heads apart, or together: a block holds a layer's heads side by side, so that together
 * they are read as one stretch of memory. */
static void add_by_heads(cutting *c, pt_attention_task task, int32_t heads) {
    task.num_heads = heads;
    for (task.kv_head = 0; task.kv_head < c->model->num_kv_heads; task.kv_head += heads)
        c->lists->tasks[c->lists->num_tasks++] = task;
}

/* `task` for its query tokens, some at a time: a head's K and V stay in the second cache from task to task. */
static void add_by_tokens(const cutting *c, pt_attention_task task, pt_attention_task *tasks, int64_t *num_tasks) {
    const int32_t first = task.first_token, end = first + task.num_tokens, first_merge = task.merge;
    task.num_heads = 1;
    for (task.kv_head = 0; task.kv_head < c->model->num_kv_heads; task.kv_head++)
        for (task.first_token = first; task.first_token < end; task.first_token += task.num_tokens) {
            task.num_tokens = (int32_t)pt_min(c->query_tokens, end - task.first_token);
            task.merge = first_merge + task.first_token - first;
            tasks[(*num_tasks)++] = task;
        }
}

/* Rows whose prefix, if they share one, is carried from tasks of its own to theirs: rows of several new tokens each. */
static void add_carried(cutting *c, const pt_row_group *group) {
    const int32_t end = group->row + group->num_rows;
    if (group->num_splits > 0) {
        pt_attention_task prefix = {.row = group->row, .first_token = first_token_of(c, group->row), .carry = PT_CARRY_OUT,
                                    .num_splits = group->num_splits};
        prefix.num_tokens = first_token_of(c, end) - prefix.first_token;
        add_by_tokens(c, prefix, c->lists->prefixes, &c->lists->num_prefixes);
    }
    for (int32_t row = group->row; row < end; row++) {
        pt_attention_task task = {.row = row, .first_token = first_token_of(c, row), .split = group->num_splits,
                                  .carry = group->num_splits > 0 ? PT_CARRY_IN : PT_CARRY_NONE};
        task.num_tokens = first_token_of(c, row + 1) - task.first_token;
        add_by_tokens(c, task, c->lists->tasks, &c->lists->num_tasks);
    }
}

/* Splits [split, end) as tasks of their own. */
static void add_splits(cutting *c, pt_attention_task task, int64_t split, int64_t end) {
    for (; split < end; split += c->splits) {
        task.split = (int32_t)split;
        task.num_splits = (int32_t)pt_min(c->splits, end - split);
        if (task.num_tokens == 1)
            add_by_heads(c, task, c->heads);
        else
            add_by_tokens(c, task, c->lists->tasks, &c->lists->num_tasks);
    }
}

/* Partial results of a row of one new token: of each split one for every query head. */
static int64_t partials_of(const cutting *c, int32_t row) {
    int64_t first_split;
    return splits_of(c->model, c->batch, row, &first_split) * c->model->num_heads;
}

/* A row of one new token, but for its first `shared` splits. It is cut into splits where there are several and their
 * partial results have room. */
static void add_decode(cutting *c, int32_t row, int64_t shared) {
    pt_attention_task task = {.row = row, .first_token = first_token_of(c, row), .num_tokens = 1};
    int64_t split;
    const int64_t num_splits = splits_of(c->model, c->batch, row, &split), partials = partials_of(c, row);
    if (num_splits == 1 || c->partial + partials > c->max_partials) {
        add_by_heads(c, task, c->heads);
        return;
    }
    task.merge = (int32_t)c->lists->num_merges++;
    c->lists->merges[task.merge] = (pt_attention_merge){.first_token = task.first_token, .split = (int32_t)split,
                                                        .num_splits = (int32_t)num_splits, .partial = (int32_t)c->partial};
    c->partial += partials;
    add_splits(c, task, split + shared, split + num_splits);
}

/* Rows of one new token each. What they share is a task of all of them, and is merged with their own splits; if that has
 * no room, it is carried. */
static void add_decodes(cutting *c, const pt_row_group *group) {
    const int32_t end = group->row + group->num_rows;
    const int64_t shared = group->num_splits;
    int64_t partials = 0;
    for (int32_t row = group->row; row < end; row++) partials += partials_of(c, row);
    if (shared > 0 && c->partial + partials > c->max_partials) {
        add_carried(c, group);
        return;
    }
    if (shared > 0) {
        const pt_attention_task prefix = {.row = group->row, .first_token = first_token_of(c, group->row),
                                          .num_tokens = group->num_rows, .merge = (int32_t)c->lists->num_merges};
        add_splits(c, prefix, 0, shared);
    }
    for (int32_t row = group->row; row < end; row++) add_decode(c, row, shared);
}

/* Splits of decode rows, each that rows share counted once. */
static int64_t num_decode_splits(const pt_model *model, const pt_batch *batch, const pt_attention_lists *lists) {
    int64_t splits = 0, first_split;
    for (const pt_row_group *group = lists->groups; group < lists->groups + lists->num_groups; group++) {
        if (!pt_is_decode(batch, group->row)) continue;
        splits += group->num_splits;
        for (int32_t row = group->row; row < group->row + group->num_rows; row++)
            splits += splits_of(model, batch, row, &first_split) - group->num_splits;
    }
    return splits;
}

/* Tasks are large where there are enough of them for every worker. */
void pt_attention_list(const pt_model *model, const pt_batch *batch, int32_t num_workers, int64_t max_query_rows,
                       pt_attention_lists *lists) {
    lists->num_prefixes = lists->num_tasks = lists->num_merges = 0;
    lists->num_groups = pt_group_rows(model, batch, lists->groups);
    const int64_t query_share = (int64_t)batch->num_tokens * model->num_heads / (4 * (int64_t)num_workers);
    const int64_t query_rows = pt_max(PT_QUERY_ROWS, pt_min(max_query_rows, query_share));
    const int64_t split_share = num_decode_splits(model, batch, lists) / (8 * (int64_t)num_workers);
    cutting c = {.model = model, .batch = batch, .lists = lists, .query_tokens = pt_query_tokens(model, query_rows),
                 .splits = pt_max(1, pt_min(MAX_TASK_SPLITS, split_share)),
                 .heads = split_share > 0 ? model->num_kv_heads : 1,
                 .max_partials = PT_PARTIAL_BYTES / (int64_t)pt_partial_bytes(model)};
    for (const pt_row_group *group = lists->groups; group < lists->groups + lists->num_groups; group++)
        if (pt_is_decode(batch, group->row))
            add_decodes(&c, group);
        else
            add_carried(&c, group);
}
