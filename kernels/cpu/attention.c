/* Which attention tasks a batch has. */
#include "attention.h"
#include "plan.h"

size_t pt_attention_worker_bytes(const pt_model *model) { return pt_layout(model).end; }

/* Rows of one new token over a long context are cut into splits, as long as their partial results have room. */
void pt_attention_list(const pt_model *model, const pt_batch *batch, pt_attention_lists *lists) {
    const int64_t group = pt_group(model), query_tokens = pt_query_tokens(model);
    const int64_t max_partials = PT_PARTIAL_BYTES / (int64_t)pt_partial_bytes(model);
    int64_t partial = 0;
    lists->num_tasks = lists->num_merges = 0;
    for (int32_t row = 0; row < batch->num_rows; row++) {
        const int32_t first = batch->query_start_loc[row], end = batch->query_start_loc[row + 1];
        const int64_t context = batch->seq_lens[row];
        const int64_t first_split = model->window > 0 ? pt_max(0, context - model->window) / PT_SPLIT : 0;
        const int64_t num_splits = pt_ceil(context, PT_SPLIT) - first_split;
        const int64_t partials = num_splits * group * model->num_kv_heads;
        const int cut = end - first == 1 && num_splits > 1 && partial + partials <= max_partials;
        for (int32_t head = 0; head < model->num_kv_heads; head++) {
            if (!cut) {
                for (int32_t token = first; token < end; token += (int32_t)query_tokens)
                    lists->tasks[lists->num_tasks++] = (pt_attention_task){
                        row, token, (int32_t)pt_min(query_tokens, end - token), head, -1, 0};
                continue;
            }
            pt_attention_task task = {row, first, 1, head, (int32_t)first_split, (int32_t)partial};
            lists->merges[lists->num_merges++] = (pt_attention_merge){task, (int32_t)num_splits};
            for (int64_t i = 0; i < num_splits; i++, task.split++, task.partial += (int32_t)group)
                lists->tasks[lists->num_tasks++] = task;
            partial += num_splits * group;
        }
    }
}
