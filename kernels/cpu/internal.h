/* Shared by the library's own files: the thread pool's task interface and the kernels of one instruction-set level. */
#ifndef PAGETIER_INTERNAL_H
#define PAGETIER_INTERNAL_H

#include "pagetier_cpu.h"

#define PT_ROW_ALIGN 64 /* bytes: rows of buffers start on a cache line */

static inline int64_t pt_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t pt_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t pt_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Cuts scratch into 64-aligned pieces: where the next one starts. */
static inline size_t pt_take(size_t *at, size_t bytes) {
    size_t here = *at;
    *at += (bytes + 63) / 64 * 64;
    return here;
}

enum pt_error {
    PT_ERR_ISA = -1,
    PT_ERR_SHAPE = -2,
    PT_ERR_TOKEN = -3,
    PT_ERR_ROW = -4,
    PT_ERR_BLOCK = -5,
    PT_ERR_SLOT = -6,
    PT_ERR_SAMPLE = -7,
    PT_ERR_COPY = -8,
    PT_ERR_OP = -9,
    PT_ERR_VOCAB = -10,
    PT_ERR_SAMPLING = -11
};

/* Runs fn(arg, task, worker) for every task in [0, num_tasks), on all workers; returns when all are done. Each
 * worker takes a range of them in order, then helps with the others', so results may not depend on who runs what. */
typedef void (*pt_task_fn)(void *arg, int64_t task, int32_t worker);
void pt_parallel(pt_threads *threads, pt_task_fn fn, void *arg, int64_t num_tasks);
int32_t pt_num_workers(const pt_threads *threads);
/* Binds the calling thread to the first CPU of the list that the threads were made with, if there was one. */
void pt_bind_caller(const pt_threads *threads);

/* A GEMM: out (m, n) fp32 or bf16 = a (m, k) x packed w (n, k)^T, then + bias, then + old out if accumulate. Gated: w and
 * bias are two of those, and out is silu of the first product times the second. */
typedef struct {
    const void *a;
    int64_t lda; /* in values */
    const void *w;
    const float *bias;
    void *out;
    int64_t ldo;
    int64_t m, n, k;
    int32_t accumulate, out_bf16, gated;
    float *widened; /* room for pt_widened_rows(k) rows in fp32, at levels without bf16 products */
    const char *ahead; /* memory to ask for meanwhile, a cache line for each k or pair of k; NULL: the next panel */
} pt_gemm;

/* Rows of bf16 that are widened at a time: what a second cache holds beside weights; a kernel's worth at least. */
#define PT_WIDENED_VALUES (1 << 16)
#define PT_KERNEL_ROWS 12
/* A row in whole cache lines and one more: at widths of 1,024 and so on, rows would all lie in the same few sets. */
static inline int64_t pt_widened_width(int64_t k) { return k / 16 * 16 + 32; }
static inline int64_t pt_widened_rows(int64_t k) {
    return pt_max(1, PT_WIDENED_VALUES / PT_KERNEL_ROWS / pt_widened_width(k)) * PT_KERNEL_ROWS;
}

/* Attention over one layer of the pool; see attention.h. */
typedef struct {
    const pt_model *model;
    const pt_batch *batch;
    const struct pt_attention_task_s *tasks;
    const struct pt_attention_merge_s *merges;
    int64_t num_tasks;
    const float *qkv; /* (num_tokens, ld_qkv): q heads | k heads | v heads */
    int64_t ld_qkv;
    void *out; /* (num_tokens, ld_out) of the compute dtype */
    int64_t ld_out;
    int32_t layer;
    void *scratch; /* worker_bytes for each worker */
    size_t worker_bytes;
    void *partials;
    void *carried; /* as partial results, (num_tokens, num_heads) */
} pt_attention;

typedef struct {
    const char *name;
    int64_t panel; /* columns of one packed weight panel */
    int64_t k_multiple; /* to which packed weights are padded */
    /* Columns [first, first + count) panels of the GEMM for rows [row, row + rows). */
    void (*gemm_f32)(const pt_gemm *g, int64_t first_panel, int64_t num_panels, int64_t row, int64_t rows);
    void (*gemm_bf16)(const pt_gemm *g, int64_t first_panel, int64_t num_panels, int64_t row, int64_t rows);
    void (*pack_f32)(const void *src, int64_t n, int64_t k, void *dst);
    void (*pack_bf16)(const void *src, int64_t n, int64_t k, void *dst);
    /* NULL where the GEMM is never gated. */
    void (*pack_gated_f32)(const void *gate, const void *up, int64_t n, int64_t k, void *dst);
    void (*pack_gated_bf16)(const void *gate, const void *up, int64_t n, int64_t k, void *dst);
    void (*rms_norm)(const float *in, const float *weight, float eps, int64_t n, void *out, int32_t out_bf16);
    void (*silu_mul)(const float *gate_up, int64_t n, void *out, int32_t out_bf16);
    void (*to_f32)(const void *in, int64_t n, float *out);     /* from bf16 */
    void (*to_bf16)(const float *in, int64_t n, uint16_t *out); /* round to nearest even */
    /* Sampling; see sample.inc. */
    void (*peaks)(const float *in, int64_t n, float *out);
    void (*scale)(const float *in, int64_t n, float peak, float temperature, float *out); /* (in - peak) / temperature */
    void (*weigh)(const float *scaled, int64_t n, int64_t *out);
    void (*masses)(const float *in, int64_t n, float peak, float temperature, int64_t *out);
    int64_t query_rows_bf16; /* that a task of attention over a bf16 pool has at most; see attention.h */
    /* By the pool's dtype; a level without bf16 products widens tiles to fp32. */
    void (*attention_f32)(const pt_attention *args, int64_t task, int32_t worker);
    void (*attention_bf16)(const pt_attention *args, int64_t task, int32_t worker);
    void (*merge_f32)(const pt_attention *args, int64_t merge, int32_t worker);
    void (*merge_bf16)(const pt_attention *args, int64_t merge, int32_t worker);
} pt_kernels;

/* NULL where the machine does not run the level. */
const pt_kernels *pt_kernels_of(int32_t isa);

#endif
