/* Which rows of a batch share a prefix: neighbours whose block tables begin with the same blocks. */
#include "plan.h"

/* Whole splits before the first new token of both rows that lie in the same blocks. */
static int64_t shared_splits(const pt_model *model, const pt_batch *batch, int32_t a, int32_t b) {
    const int32_t *table_a = batch->block_table + a * batch->table_stride;
    const int32_t *table_b = batch->block_table + b * batch->table_stride;
    const int64_t known_a = batch->positions[batch->query_start_loc[a]], known_b = batch->positions[batch->query_start_loc[b]];
    const int64_t splits = pt_min(known_a, known_b) / PT_SPLIT, blocks = pt_ceil(splits * PT_SPLIT, model->block_size);
    int64_t same = 0;
    while (same < blocks && table_a[same] == table_b[same]) same++;
    return pt_min(splits, same * model->block_size / PT_SPLIT);
}

/* Splits from which on a prefix is worth a task of its own: of prefills what it comes to is carried to other tasks, which
 * costs what one split saves. */
static int64_t min_splits(const pt_batch *batch, int32_t row) { return pt_is_decode(batch, row) ? 1 : 2; }

/* A group shares what its first two rows do: a row that shares less begins the next one. */
int64_t pt_group_rows(const pt_model *model, const pt_batch *batch, pt_row_group *groups) {
    int64_t num_groups = 0;
    for (int32_t row = 0; row < batch->num_rows;) {
        pt_row_group *group = &groups[num_groups++];
        *group = (pt_row_group){.row = row++, .num_rows = 1};
        if (model->window > 0) continue;
        for (; row < batch->num_rows && pt_is_decode(batch, row) == pt_is_decode(batch, group->row); row++, group->num_rows++) {
            const int64_t splits = shared_splits(model, batch, group->row, row);
            if (splits < pt_max(group->num_splits, min_splits(batch, row))) break;
            if (group->num_rows == 1) group->num_splits = (int32_t)splits;
        }
    }
    return num_groups;
}
