/* pt_step: checks a batch, then runs the model's ops over it, each op spread over the workers. */
#include "internal.h"
#include "plan.h"

#include <math.h>
#include <string.h>
#include <time.h>

const char *pt_error_text(int32_t error) {
    static const char *const texts[] = {"fine",
                                        "this machine does not run that instruction-set level",
                                        "more tokens, rows or samples than the buffers hold",
                                        "a token id outside the vocabulary",
                                        "row starts, positions and sequence lengths do not agree",
                                        "a block id outside the pool, or a table that is too short",
                                        "a slot that is not the one its block table says",
                                        "a logits index outside the batch",
                                        "a copy outside the pool",
                                        "an op that is unknown or does not fit its buffers",
                                        "a negative number of rows, or a vocabulary that is empty or above 2^20 - 1",
                                        "a row to sample without logits or places for its answers, or with a number, "
                                        "temperature, min_p, top_p or count outside its range"};
    return error <= 0 && error >= PT_ERR_SAMPLING ? texts[-error] : "unknown error";
}

typedef struct {
    const pt_kernels *kernels;
    const pt_model *model;
    const pt_batch *batch;
    pt_threads *threads;
    const pt_op *op;
    pt_attention_lists lists;
    pt_attention attention;
    float *cosines, *sines; /* (num_tokens, head_dim / 2) */
    char *workers;
    size_t worker_bytes;
    void *partials, *carried;
    int64_t rows_per_task, panels_per_task, rows;
    pt_gemm gemm;
} run;

static int64_t max_tokens(const pt_model *m) { return m->num_buffers > 0 ? m->buffers[0].max_rows : 0; }

static int64_t max_tasks(const pt_model *m) {
    return max_tokens(m) * m->num_kv_heads + PT_PARTIAL_BYTES / (int64_t)pt_partial_bytes(m);
}

/* What a worker widens rows of GEMMs into: no op reads more values of a row than the widest buffer has. */
static size_t widened_bytes(const pt_model *m) {
    int64_t values = PT_WIDENED_VALUES;
    for (int32_t i = 0; i < m->num_buffers; i++) values = pt_max(values, PT_KERNEL_ROWS * pt_widened_width(m->buffers[i].width));
    return (size_t)pt_ceil(values * 4, 64) * 64;
}

/* Lays the scratch out; its end. */
static size_t lay_out(const pt_model *m, int32_t num_workers, char *base, run *r) {
    size_t at = 0, half = (size_t)m->head_dim / 2;
    size_t groups = pt_take(&at, (size_t)max_tokens(m) * sizeof(pt_row_group));
    size_t prefixes = pt_take(&at, (size_t)max_tasks(m) * sizeof(pt_attention_task));
    size_t tasks = pt_take(&at, (size_t)max_tasks(m) * sizeof(pt_attention_task));
    size_t merges = pt_take(&at, (size_t)max_tokens(m) * sizeof(pt_attention_merge));
    size_t cosines = pt_take(&at, (size_t)max_tokens(m) * half * 4);
    size_t sines = pt_take(&at, (size_t)max_tokens(m) * half * 4);
    size_t partials = pt_take(&at, PT_PARTIAL_BYTES);
    size_t carried = pt_take(&at, (size_t)(max_tokens(m) * m->num_heads) * pt_partial_bytes(m));
    size_t worker_bytes = pt_attention_worker_bytes(m), widened = widened_bytes(m);
    if (worker_bytes < widened) worker_bytes = widened;
    size_t workers = pt_take(&at, worker_bytes * (size_t)num_workers);
    if (r != NULL) {
        r->lists.groups = (pt_row_group *)(base + groups);
        r->lists.prefixes = (pt_attention_task *)(base + prefixes);
        r->lists.tasks = (pt_attention_task *)(base + tasks);
        r->lists.merges = (pt_attention_merge *)(base + merges);
        r->cosines = (float *)(base + cosines);
        r->sines = (float *)(base + sines);
        r->partials = base + partials;
        r->carried = base + carried;
        r->workers = base + workers;
        r->worker_bytes = worker_bytes;
    }
    return at;
}

size_t pt_scratch_bytes(const pt_model *model, const pt_threads *threads) {
    return lay_out(model, pt_num_workers(threads), NULL, NULL);
}

static int32_t check_row(const pt_model *m, const pt_batch *b, int32_t row) {
    const int64_t first = b->query_start_loc[row], end = b->query_start_loc[row + 1], seq_len = b->seq_lens[row];
    if (first < 0 || end <= first || end > b->num_tokens || seq_len < end - first) return PT_ERR_ROW;
    const int64_t num_blocks = pt_ceil(seq_len, m->block_size);
    if (num_blocks > b->table_stride) return PT_ERR_BLOCK;
    const int32_t *table = b->block_table + row * b->table_stride;
    for (int64_t i = 0; i < num_blocks; i++)
        if (table[i] < 0 || table[i] >= m->num_blocks) return PT_ERR_BLOCK;
    for (int64_t t = first; t < end; t++) {
        const int64_t position = seq_len - (end - t);
        if (b->positions[t] != position) return PT_ERR_ROW;
        if (b->slot_mapping[t] != table[position / m->block_size] * (int64_t)m->block_size + position % m->block_size)
            return PT_ERR_SLOT;
        if (b->token_ids[t] < 0 || b->token_ids[t] >= m->vocab_size) return PT_ERR_TOKEN;
    }
    return 0;
}

static int32_t check_batch(const pt_model *m, const pt_batch *b) {
    if (b->num_tokens < 1 || b->num_rows < 1 || b->num_samples < 0 || b->num_tokens > max_tokens(m) ||
        b->num_rows > b->num_tokens || b->num_samples > max_tokens(m))
        return PT_ERR_SHAPE;
    if (b->query_start_loc[0] != 0 || b->query_start_loc[b->num_rows] != b->num_tokens) return PT_ERR_ROW;
    for (int32_t row = 0; row < b->num_rows; row++) {
        int32_t error = check_row(m, b, row);
        if (error) return error;
    }
    for (int32_t i = 0; i < b->num_samples; i++)
        if (b->logits_indices[i] < 0 || b->logits_indices[i] >= b->num_tokens) return PT_ERR_SAMPLE;
    for (int32_t i = 0; i < b->num_copies; i++) {
        const int32_t *copy = b->copies + 3 * i;
        if (copy[0] < 0 || copy[0] >= m->num_blocks || copy[1] < 0 || copy[1] >= m->num_blocks || copy[2] < 0 ||
            copy[2] > m->block_size)
            return PT_ERR_COPY;
    }
    return 0;
}

/* Buffer `index` has rows of `width` values of `dtype` (-1: either). */
static int32_t holds(const pt_model *m, int32_t index, int64_t width, int32_t dtype) {
    return m->buffers[index].width >= width && (dtype < 0 || m->buffers[index].dtype == dtype);
}

/* Whether the level gates GEMMs of the dtype. */
static int32_t gates(const pt_kernels *kernels, int32_t dtype) {
    return (dtype == PT_BF16 ? kernels->pack_gated_bf16 : kernels->pack_gated_f32) != NULL;
}

static int32_t op_fits(const pt_kernels *kernels, const pt_model *m, const pt_op *op) {
    const int64_t q = (int64_t)m->num_heads * m->head_dim, qkv = q + 2 * (int64_t)m->num_kv_heads * m->head_dim;
    switch (op->kind) {
    case PT_OP_EMBED: return holds(m, op->out, op->n, PT_F32);
    case PT_OP_NORM: return holds(m, op->in, op->n, PT_F32) && holds(m, op->out, op->n, -1);
    case PT_OP_GEMM: /* rows are read in pairs of values */
        return holds(m, op->in, op->k + (m->dtype == PT_BF16 ? op->k % 2 : 0), m->dtype) &&
               holds(m, op->out, op->n, op->accumulate ? PT_F32 : -1) &&
               (!op->gated || (gates(kernels, m->dtype) && !op->accumulate)) &&
               (op->peaks == NULL || (!op->gated && holds(m, op->out, op->n, PT_F32)));
    case PT_OP_HEAD_NORM:
    case PT_OP_ROPE_KV: return holds(m, op->out, qkv, PT_F32);
    case PT_OP_ATTENTION: return holds(m, op->in, qkv, PT_F32) && holds(m, op->out, q, m->dtype);
    case PT_OP_SILU_MUL: return holds(m, op->in, 2 * (int64_t)op->n, PT_F32) && holds(m, op->out, op->n, -1);
    case PT_OP_GATHER: return holds(m, op->in, op->n, -1) && holds(m, op->out, op->n, m->buffers[op->in].dtype);
    default: return 0;
    }
}

static int32_t check_ops(const pt_kernels *kernels, const pt_model *m, const pt_batch *b) {
    for (int32_t i = 0; i < m->num_ops; i++) {
        const pt_op *op = &m->ops[i];
        const int64_t rows = op->per_sample ? b->num_samples : b->num_tokens;
        if (op->layer < 0 || op->layer >= m->num_layers || op->n < 0 || op->k < 0) return PT_ERR_OP;
        if (op->in < -1 || op->in >= m->num_buffers || op->out < 0 || op->out >= m->num_buffers) return PT_ERR_OP;
        if (op->in < 0 && op->kind != PT_OP_EMBED) return PT_ERR_OP;
        if (m->buffers[op->out].max_rows < rows) return PT_ERR_SHAPE;
        if (op->in >= 0 && m->buffers[op->in].max_rows < (op->kind == PT_OP_GATHER ? b->num_tokens : rows)) return PT_ERR_SHAPE;
        if (!op_fits(kernels, m, op)) return PT_ERR_OP;
    }
    return 0;
}

static size_t value_bytes(int32_t dtype) { return dtype == PT_BF16 ? 2 : 4; }

static char *row_at(const run *r, int32_t buffer, int64_t row) {
    const pt_buffer *b = &r->model->buffers[buffer];
    return (char *)b->data + (size_t)(row * b->width) * value_bytes(b->dtype);
}

static int32_t is_bf16(const run *r, int32_t buffer) { return r->model->buffers[buffer].dtype == PT_BF16; }

/* ---- ops by row */

static void embed_row(const run *r, int64_t row) {
    const pt_op *op = r->op;
    const int64_t token = r->batch->token_ids[row];
    float *out = (float *)row_at(r, op->out, row);
    if (r->model->dtype == PT_BF16)
        r->kernels->to_f32((const uint16_t *)op->weight + token * op->n, op->n, out);
    else
        memcpy(out, (const float *)op->weight + token * op->n, (size_t)op->n * 4);
}

static void norm_row(const run *r, int64_t row) {
    const pt_op *op = r->op;
    r->kernels->rms_norm((const float *)row_at(r, op->in, row), op->weight, r->model->rms_norm_eps, op->n,
                         row_at(r, op->out, row), is_bf16(r, op->out));
}

static void head_norm_row(const run *r, int64_t row) {
    const pt_model *m = r->model;
    float *qkv = (float *)row_at(r, r->op->out, row);
    for (int32_t head = 0; head < m->num_heads + m->num_kv_heads; head++, qkv += m->head_dim) {
        const float *weight = head < m->num_heads ? r->op->weight : r->op->bias;
        r->kernels->rms_norm(qkv, weight, m->rms_norm_eps, m->head_dim, qkv, 0);
    }
}

static void rotary_row(const run *r, int64_t row) {
    const int64_t half = r->model->head_dim / 2;
    const float position = (float)r->batch->positions[row];
    for (int64_t d = 0; d < half; d++) {
        const float angle = position * r->model->inv_freq[d];
        r->cosines[row * half + d] = cosf(angle);
        r->sines[row * half + d] = sinf(angle);
    }
}

static void store(const run *r, const float *values, int64_t at) {
    const pt_model *m = r->model;
    if (m->dtype == PT_BF16)
        r->kernels->to_bf16(values, m->head_dim, (uint16_t *)m->pool + at);
    else
        memcpy((float *)m->pool + at, values, (size_t)m->head_dim * 4);
}

static void rope_kv_row(const run *r, int64_t row) {
    const pt_model *m = r->model;
    const int64_t half = m->head_dim / 2, block = r->batch->slot_mapping[row] / m->block_size;
    const int64_t offset = r->batch->slot_mapping[row] % m->block_size;
    const float *cosines = r->cosines + row * half, *sines = r->sines + row * half;
    float *qkv = (float *)row_at(r, r->op->out, row);
    for (int32_t head = 0; head < m->num_heads + m->num_kv_heads; head++) {
        float *low = qkv + (int64_t)head * m->head_dim, *high = low + half;
        for (int64_t d = 0; d < half; d++) {
            const float a = low[d], b = high[d];
            low[d] = a * cosines[d] - b * sines[d];
            high[d] = b * cosines[d] + a * sines[d];
        }
    }
    const float *keys = qkv + (int64_t)m->num_heads * m->head_dim;
    const float *values = keys + (int64_t)m->num_kv_heads * m->head_dim;
    int64_t plane = (block * m->num_layers + r->op->layer) * 2 * m->num_kv_heads;
    for (int32_t head = 0; head < m->num_kv_heads; head++) {
        store(r, keys + (int64_t)head * m->head_dim, ((plane + head) * m->block_size + offset) * m->head_dim);
        store(r, values + (int64_t)head * m->head_dim,
              ((plane + m->num_kv_heads + head) * m->block_size + offset) * m->head_dim);
    }
}

static void silu_row(const run *r, int64_t row) {
    r->kernels->silu_mul((const float *)row_at(r, r->op->in, row), r->op->n, row_at(r, r->op->out, row),
                         is_bf16(r, r->op->out));
}

static void gather_row(const run *r, int64_t row) {
    memcpy(row_at(r, r->op->out, row), row_at(r, r->op->in, r->batch->logits_indices[row]),
           (size_t)r->op->n * value_bytes(r->model->buffers[r->op->in].dtype));
}

static void run_rows(void *arg, int64_t task, int32_t worker) {
    (void)worker;
    const run *r = arg;
    static void (*const ops[])(const run *, int64_t) = {embed_row,   norm_row, NULL,     head_norm_row,
                                                        rope_kv_row, NULL,     silu_row, gather_row};
    const int64_t end = pt_min(r->rows, (task + 1) * r->rows_per_task);
    for (int64_t row = task * r->rows_per_task; row < end; row++) ops[r->op->kind](r, row);
}

static void run_rotary(void *arg, int64_t task, int32_t worker) {
    (void)worker;
    const run *r = arg;
    const int64_t end = pt_min(r->rows, (task + 1) * r->rows_per_task);
    for (int64_t row = task * r->rows_per_task; row < end; row++) rotary_row(r, row);
}

static void by_rows(run *r, pt_task_fn fn, int64_t rows) {
    r->rows = rows;
    r->rows_per_task = pt_max(4, pt_ceil(rows, (int64_t)pt_num_workers(r->threads) * 4));
    pt_parallel(r->threads, fn, r, pt_ceil(rows, r->rows_per_task));
}

/* ---- GEMM: tasks are panels x rows, panels outermost so that a panel stays in cache over its rows */

#define GEMM_TASK_ROWS 96

/* Of a gated GEMM half of a panel's columns are gates, one for each value of a row of `out`. */
static int64_t num_panels(const run *r) {
    return pt_ceil(r->gemm.n, r->gemm.gated ? r->kernels->panel / 2 : r->kernels->panel);
}

/* Of what a task has just written, while it is in a cache. */
static void find_peaks(const run *r, int64_t first, int64_t end, int64_t row, int64_t num_rows) {
    const int64_t blocks = pt_ceil(r->gemm.n, PT_SAMPLE_BLOCK);
    for (int64_t i = row; i < row + num_rows; i++)
        r->kernels->peaks((const float *)r->gemm.out + i * r->gemm.ldo + first, end - first,
                          r->op->peaks + i * blocks + first / PT_SAMPLE_BLOCK);
}

static void run_gemm_task(void *arg, int64_t task, int32_t worker) {
    const run *r = arg;
    pt_gemm g = r->gemm;
    g.widened = (float *)(r->workers + (size_t)worker * r->worker_bytes);
    const int64_t row_tasks = pt_ceil(r->gemm.m, r->rows_per_task);
    const int64_t panels = num_panels(r);
    const int64_t first_panel = task / row_tasks * r->panels_per_task, row = task % row_tasks * r->rows_per_task;
    void (*gemm)(const pt_gemm *, int64_t, int64_t, int64_t, int64_t) =
        r->model->dtype == PT_BF16 ? r->kernels->gemm_bf16 : r->kernels->gemm_f32;
    const int64_t num_rows = pt_min(r->rows_per_task, r->gemm.m - row);
    gemm(&g, first_panel, pt_min(r->panels_per_task, panels - first_panel), row, num_rows);
    if (r->op->peaks != NULL) {
        const int64_t first = first_panel * r->kernels->panel;
        find_peaks(r, first, pt_min(r->gemm.n, first + r->panels_per_task * r->kernels->panel), row, num_rows);
    }
}

static void run_gemm(run *r, int64_t rows) {
    const pt_op *op = r->op;
    const pt_model *m = r->model;
    r->gemm = (pt_gemm){.a = row_at(r, op->in, 0), .lda = m->buffers[op->in].width, .w = op->weight, .bias = op->bias,
                        .out = row_at(r, op->out, 0), .ldo = m->buffers[op->out].width, .m = rows, .n = op->n,
                        .k = op->k, .accumulate = op->accumulate, .out_bf16 = is_bf16(r, op->out), .gated = op->gated};
    const int64_t panels = num_panels(r), workers = pt_num_workers(r->threads);
    r->rows_per_task = pt_min(rows, GEMM_TASK_ROWS);
    const int64_t row_tasks = pt_ceil(rows, r->rows_per_task);
    /* Even counts, for the kernels that take two or four panels; some eight tasks a worker, to even out the ends. */
    int64_t share = panels * row_tasks / (workers * 8);
    r->panels_per_task = pt_max(2, pt_min(16, share / 4 * 4));
    if (op->peaks != NULL) {
        const int64_t per_block = PT_SAMPLE_BLOCK / r->kernels->panel;
        r->panels_per_task = pt_ceil(r->panels_per_task, per_block) * per_block;
    }
    pt_parallel(r->threads, run_gemm_task, r, pt_ceil(panels, r->panels_per_task) * row_tasks);
}

/* ---- attention */

static void run_attention_task(void *arg, int64_t task, int32_t worker) {
    const run *r = arg;
    (r->model->dtype == PT_BF16 ? r->kernels->attention_bf16 : r->kernels->attention_f32)(&r->attention, task, worker);
}

static void run_attention_merge(void *arg, int64_t task, int32_t worker) {
    const run *r = arg;
    (r->model->dtype == PT_BF16 ? r->kernels->merge_bf16 : r->kernels->merge_f32)(&r->attention, task, worker);
}

static void run_attention_tasks(run *r, const pt_attention_task *tasks, int64_t num_tasks) {
    r->attention.tasks = tasks, r->attention.num_tasks = num_tasks;
    pt_parallel(r->threads, run_attention_task, r, num_tasks);
}

static void run_attention(run *r) {
    const pt_op *op = r->op;
    r->attention = (pt_attention){.model = r->model,
                                  .batch = r->batch,
                                  .merges = r->lists.merges,
                                  .qkv = (const float *)row_at(r, op->in, 0),
                                  .ld_qkv = r->model->buffers[op->in].width,
                                  .out = row_at(r, op->out, 0),
                                  .ld_out = r->model->buffers[op->out].width,
                                  .layer = op->layer,
                                  .scratch = r->workers,
                                  .worker_bytes = r->worker_bytes,
                                  .partials = r->partials,
                                  .carried = r->carried};
    run_attention_tasks(r, r->lists.prefixes, r->lists.num_prefixes);
    run_attention_tasks(r, r->lists.tasks, r->lists.num_tasks);
    pt_parallel(r->threads, run_attention_merge, r, r->lists.num_merges);
}

/* Copy-on-write: the first tokens of every layer, plane and head. */
static void run_copies(const pt_model *m, const pt_batch *b) {
    const size_t token_bytes = (size_t)m->head_dim * value_bytes(m->dtype);
    const size_t head_bytes = token_bytes * (size_t)m->block_size;
    const size_t heads = (size_t)m->num_layers * 2 * (size_t)m->num_kv_heads;
    for (int32_t i = 0; i < b->num_copies; i++) {
        const char *from = (const char *)m->pool + (size_t)b->copies[3 * i] * heads * head_bytes;
        char *to = (char *)m->pool + (size_t)b->copies[3 * i + 1] * heads * head_bytes;
        if (from == to) continue;
        for (size_t head = 0; head < heads; head++)
            memcpy(to + head * head_bytes, from + head * head_bytes, token_bytes * (size_t)b->copies[3 * i + 2]);
    }
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int32_t pt_step(int32_t isa, const pt_model *model, const pt_batch *batch, pt_threads *threads, void *scratch,
                int64_t *counters) {
    run r = {.kernels = pt_kernels_of(isa), .model = model, .batch = batch, .threads = threads};
    if (r.kernels == NULL) return PT_ERR_ISA;
    int32_t error = check_batch(model, batch);
    if (!error) error = check_ops(r.kernels, model, batch);
    if (error) return error;
    pt_bind_caller(threads);
    lay_out(model, pt_num_workers(threads), scratch, &r);
    int64_t start = now_ns();
    run_copies(model, batch);
    const int64_t query_rows = model->dtype == PT_BF16 ? r.kernels->query_rows_bf16 : PT_QUERY_ROWS;
    pt_attention_list(model, batch, pt_num_workers(threads), query_rows, &r.lists);
    by_rows(&r, run_rotary, batch->num_tokens);
    for (int32_t i = 0; i < model->num_ops; i++) {
        r.op = &model->ops[i];
        const int64_t rows = r.op->per_sample ? batch->num_samples : batch->num_tokens;
        if (rows == 0) continue;
        if (r.op->kind == PT_OP_GEMM)
            run_gemm(&r, rows);
        else if (r.op->kind == PT_OP_ATTENTION)
            run_attention(&r);
        else
            by_rows(&r, run_rows, rows);
        if (counters != NULL) {
            int64_t now = now_ns();
            counters[r.op->kind] += now - start;
            start = now;
        }
    }
    return 0;
}

size_t pt_packed_bytes(int32_t isa, int32_t dtype, int64_t n, int64_t k) {
    const pt_kernels *kernels = pt_kernels_of(isa);
    if (kernels == NULL || n < 1 || k < 1) return 0;
    const int64_t padded_n = pt_ceil(n, kernels->panel) * kernels->panel;
    return (size_t)(padded_n * pt_ceil(k, kernels->k_multiple) * kernels->k_multiple) * value_bytes(dtype);
}

void pt_pack(int32_t isa, int32_t dtype, const void *src, int64_t n, int64_t k, void *dst) {
    const pt_kernels *kernels = pt_kernels_of(isa);
    if (kernels == NULL) return;
    (dtype == PT_BF16 ? kernels->pack_bf16 : kernels->pack_f32)(src, n, k, dst);
}

size_t pt_packed_gated_bytes(int32_t isa, int32_t dtype, int64_t n, int64_t k) {
    const pt_kernels *kernels = pt_kernels_of(isa);
    if (kernels == NULL || n < 1 || !gates(kernels, dtype)) return 0;
    return pt_packed_bytes(isa, dtype, pt_ceil(n, kernels->panel / 2) * kernels->panel, k);
}

void pt_pack_gated(int32_t isa, int32_t dtype, const void *gate, const void *up, int64_t n, int64_t k, void *dst) {
    const pt_kernels *kernels = pt_kernels_of(isa);
    if (kernels == NULL || !gates(kernels, dtype)) return;
    (dtype == PT_BF16 ? kernels->pack_gated_bf16 : kernels->pack_gated_f32)(gate, up, n, k, dst);
}
