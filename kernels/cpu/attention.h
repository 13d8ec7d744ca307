/* Attention's decomposition, shared by its task list (attention.c) and its kernels (attention.inc).
 *
 * Keys are taken in tiles of PT_TILE tokens at absolute positions, tiles in splits of PT_SPLIT tokens. Within a split the
 * softmax is online over tiles; splits are merged in order. Nothing else enters a query's result, so it is the same
 * whatever queries, rows or threads are beside it. Splits may run as tasks of their own; the merge is the same.
 */
#ifndef PAGETIER_ATTENTION_H
#define PAGETIER_ATTENTION_H

#include "internal.h"

#define PT_TILE 64
#define PT_SPLIT 512
#define PT_QUERY_ROWS 96                 /* query tokens x grouped heads of one task, unless the group alone is larger */
#define PT_MAX_QUERY_ROWS 384            /* the same where a level gains by more: K and V are read once for all of them */
#define PT_PARTIAL_BYTES (8 << 20)       /* for splits that run as tasks of their own */

/* What a task does with its splits. Where a prefix that rows share is not merged later, what its splits have come to is
 * carried to the tasks of each row's own part, which go on from there. */
enum pt_carry { PT_CARRY_NONE = 0, PT_CARRY_OUT = 1, PT_CARRY_IN = 2 };

/* Query tokens [first_token, first_token + num_tokens), of batch row `row` or of it and the next ones, where all attend to
 * the same blocks; kv heads [kv_head, kv_head + num_heads), more than one for one token only; splits [split, split +
 * num_splits), num_splits 0: those from `split` to the end of the context. */
typedef struct pt_attention_task_s {
    int32_t row, first_token, num_tokens, kv_head, num_heads, split, num_splits;
    int32_t carry;
    int32_t merge; /* of splits that are merged later: the merge of the first token; each further token has the next one */
} pt_attention_task;

/* The splits [split, split + num_splits) of a decode row, which ran as tasks of their own. */
typedef struct pt_attention_merge_s {
    int32_t first_token, split, num_splits;
    int32_t partial; /* index of the first partial result of `split`: a split has one for every query head of the model */
} pt_attention_merge;

/* One query row's softmax so far: maximum of the scores times log2(e), sum, and head_dim weighted values behind it. */
typedef struct {
    float max, sum;
} pt_softmax;

static inline int64_t pt_group(const pt_model *m) { return m->num_heads / m->num_kv_heads; }
static inline int64_t pt_query_tokens(const pt_model *m, int64_t rows) { return pt_max(1, rows / pt_group(m)); }
static inline int64_t pt_max_query_rows(const pt_model *m) { return pt_query_tokens(m, PT_MAX_QUERY_ROWS) * pt_group(m); }

/* Where a worker's scratch has what; sizes in bytes, each 64-aligned. */
typedef struct {
    size_t q, scores, probs, packed, tile, acc, total, stats, totals;
    size_t q_panels, blocks, pairs, sums, parts, lanes, keys, values, copies; /* attention_amx.inc */
    size_t end;
} pt_attention_layout;

static inline pt_attention_layout pt_layout(const pt_model *m) {
    pt_attention_layout l;
    size_t at = 0, rows = (size_t)pt_max(pt_max_query_rows(m), m->num_heads), dim = (size_t)pt_ceil(m->head_dim, 64) * 64;
    l.q = pt_take(&at, rows * dim * 4);
    l.scores = pt_take(&at, rows * PT_TILE * 4);
    l.probs = pt_take(&at, rows * PT_TILE * 4);
    l.packed = pt_take(&at, PT_TILE * dim * 4); /* K, then V: small, so that what is asked for ahead stays in cache */
    l.tile = pt_take(&at, PT_TILE * dim * 4); /* copies, and what they are padded from */
    l.acc = pt_take(&at, rows * dim * 4);
    l.total = pt_take(&at, rows * dim * 4);
    l.stats = pt_take(&at, rows * sizeof(pt_softmax));
    l.totals = pt_take(&at, rows * sizeof(pt_softmax));
    const int64_t head_panels = pt_ceil(pt_group(m), 32); /* of a task of one token and all heads */
    const size_t panels = (size_t)pt_max(pt_ceil(pt_max_query_rows(m), 32), m->num_kv_heads * head_panels), padded = dim;
    l.q_panels = pt_take(&at, panels * 32 * padded * 2);
    l.blocks = pt_take(&at, 2 * PT_TILE * 32 * 4);
    l.pairs = pt_take(&at, 2 * PT_TILE * 32 * 2);
    l.sums = pt_take(&at, panels * 32 * padded * 4);
    l.parts = pt_take(&at, 2 * 32 * padded * 4);
    l.lanes = pt_take(&at, panels * 32 * 2 * 4);
    l.keys = pt_take(&at, PT_SPLIT * dim * 2);
    l.values = pt_take(&at, PT_SPLIT * dim * 2); /* transposed */
    l.copies = pt_take(&at, PT_TILE * dim * 2);
    l.end = at;
    return l;
}

/* The partial results of one query row of a split: pt_softmax, then head_dim floats. */
static inline size_t pt_partial_bytes(const pt_model *m) {
    return (sizeof(pt_softmax) + (size_t)m->head_dim * 4 + 63) / 64 * 64;
}

#endif
