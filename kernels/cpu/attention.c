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

static int is_decode(const pt_batch *batch, int32_t row) {
    return batch->query_start_loc[row + 1] - batch->query_start_loc[row] == 1;
}

/* A piece of work with its kv heads apart, or together: a block holds a layer's heads side by side, so that together
 * they are read as one stretch of memory. */
static void add_tasks(const pt_model *model, pt_attention_task task, int32_t heads, pt_attention_lists *lists) {
    task.num_heads = heads;
    for (task.kv_head = 0; task.kv_head < model->num_kv_heads; task.kv_head += heads)
        lists->tasks[lists->num_tasks++] = task;
}

/* Rows of one new token over a long context are cut into splits, as long as their partial results have room. Tasks are
 * large where there are enough of them for every worker. Neither changes a result. */
void pt_attention_list(const pt_model *model, const pt_batch *batch, int32_t num_workers, int64_t max_query_rows,
                       pt_attention_lists *lists) {
    const int64_t share_of_rows = (int64_t)batch->num_tokens * model->num_heads / (4 * (int64_t)num_workers);
    const int64_t query_rows = pt_max(PT_QUERY_ROWS, pt_min(max_query_rows, share_of_rows));
    const int32_t query_tokens = (int32_t)pt_query_tokens(model, query_rows);
    const int64_t max_partials = PT_PARTIAL_BYTES / (int64_t)pt_partial_bytes(model);
    int64_t num_decode_splits = 0, first_split, partial = 0;
    for (int32_t row = 0; row < batch->num_rows; row++)
        if (is_decode(batch, row)) num_decode_splits += splits_of(model, batch, row, &first_split);
    const int64_t share = num_decode_splits / (8 * (int64_t)num_workers);
    const int64_t task_splits = pt_max(1, pt_min(MAX_TASK_SPLITS, share));
    const int32_t heads = share > 0 ? model->num_kv_heads : 1;
    lists->num_tasks = lists->num_merges = 0;
    for (int32_t row = 0; row < batch->num_rows; row++) {
        const int32_t first = batch->query_start_loc[row], end = batch->query_start_loc[row + 1];
        const int64_t num_splits = splits_of(model, batch, row, &first_split);
        const int64_t partials = num_splits * model->num_heads;
        pt_attention_task task = {.row = row, .first_token = first, .num_tokens = 1};
        if (!is_decode(batch, row)) {
            task.num_heads = 1; /* a head's K and V stay in the second cache from task to task */
            for (task.kv_head = 0; task.kv_head < model->num_kv_heads; task.kv_head++)
                for (task.first_token = first; task.first_token < end; task.first_token += query_tokens) {
                    task.num_tokens = (int32_t)pt_min(query_tokens, end - task.first_token);
                    lists->tasks[lists->num_tasks++] = task;
                }
        } else if (num_splits == 1 || partial + partials > max_partials) {
            add_tasks(model, task, heads, lists);
        } else {
            task.split = (int32_t)first_split, task.num_splits = (int32_t)num_splits, task.partial = (int32_t)partial;
            lists->merges[lists->num_merges++] = task;
            for (int64_t done = 0; done < num_splits; done += task_splits) {
                task.split = (int32_t)(first_split + done);
                task.num_splits = (int32_t)pt_min(task_splits, num_splits - done);
                task.partial = (int32_t)(partial + done * model->num_heads);
                add_tasks(model, task, heads, lists);
            }
            partial += partials;
        }
    }
}
