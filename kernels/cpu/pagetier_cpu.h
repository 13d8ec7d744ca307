/* The CPU core: a model's forward pass over the paged KV pool in one call.
 *
 * A model is data: buffers, and a list of ops over them. `pt_step` runs the ops of one batch on the library's own
 * threads. Everything a caller passes is checked by `pt_step` before it is used; nothing here allocates during a step.
 *
 * Same answer in every batch: each output row of a GEMM is one chain of fused multiply-adds over K, whatever rows are
 * computed beside it; attention reduces over tiles at absolute positions; K and V are always read back from the pool.
 */
#ifndef PAGETIER_CPU_H
#define PAGETIER_CPU_H

#include <stddef.h>
#include <stdint.h>

#define PT_API __attribute__((visibility("default")))
#define PT_ABI_VERSION 7

#define PT_SAMPLE_BLOCK 64 /* logits whose peak, the greatest of them or NaN where one is, is told apart */

enum pt_dtype { PT_F32 = 0, PT_BF16 = 1 };

/* Instruction-set levels, in rising order; the library runs the highest one the machine has, or a lower one if told. */
enum pt_isa { PT_ISA_NONE = 0, PT_ISA_AVX2 = 1, PT_ISA_AVX512 = 2, PT_ISA_AVX512_BF16 = 3, PT_ISA_AMX = 4 };

enum pt_op_kind {
    PT_OP_EMBED = 0,     /* x[t] = table[token[t]]                          weight: (vocab, width) */
    PT_OP_NORM = 1,      /* out = rms_norm(in) * weight                     rows: tokens or samples */
    PT_OP_GEMM = 2,      /* out = in W^T (+ bias) (+ out, if accumulate)    weight: packed by pt_pack; gated: silu(in W^T
                            + bias) * (in V^T + bias behind the first one)  weight: packed by pt_pack_gated */
    PT_OP_HEAD_NORM = 3, /* rms_norm of each q and k head of qkv, in place  weight: q norm, bias: k norm */
    PT_OP_ROPE_KV = 4,   /* rotate q and k of qkv in place; write k, v to the pool's layer */
    PT_OP_ATTENTION = 5, /* out = softmax(q K^T) V over each row's context in the pool's layer */
    PT_OP_SILU_MUL = 6,  /* out = silu(gate) * up, in = gate | up */
    PT_OP_GATHER = 7     /* out[s] = in[logits_indices[s]] */
};

/* One op. Buffers are indices into the plan's buffer table, -1: none. */
typedef struct {
    int32_t kind;
    int32_t in, out;
    int32_t layer;      /* of the pool: rope_kv, attention */
    int32_t n, k;       /* gemm: out and in width; others: n is the width of a row */
    int32_t accumulate; /* gemm: add to out instead of overwriting it */
    int32_t per_sample; /* rows are the batch's samples, not its tokens */
    int32_t gated;      /* gemm: see above */
    int32_t reserved;
    const void *weight;
    const void *bias;
    float *peaks;       /* gemm: (rows of out, n / PT_SAMPLE_BLOCK, rounded up) for pt_sample; NULL: not wanted */
} pt_op;

/* A row buffer: max_rows rows of `width` values, `stride` values apart. Activations that feed a GEMM have the compute
 * dtype; the residual stream, qkv and logits are fp32. */
typedef struct {
    void *data;
    int64_t width;
    int64_t max_rows;
    int32_t dtype;
    int32_t reserved;
} pt_buffer;

typedef struct {
    int32_t dtype; /* of weights, KV and GEMM inputs: pt_dtype */
    int32_t num_layers, num_heads, num_kv_heads, head_dim;
    int32_t vocab_size, block_size, window; /* window 0: full attention */
    int64_t num_blocks;
    float rms_norm_eps, softmax_scale, softcap; /* softcap 0: none */
    int32_t num_ops, num_buffers;
    const pt_op *ops;
    const pt_buffer *buffers;
    const float *inv_freq; /* (head_dim / 2) */
    void *pool;            /* (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim) */
} pt_model;

/* One step; see engine/batch.py. token_ids are resolved: no placeholders. table: (num_rows, table_stride). */
typedef struct {
    int32_t num_tokens, num_rows, num_samples, num_copies;
    int64_t table_stride;
    const int32_t *token_ids, *positions, *query_start_loc, *seq_lens, *block_table, *logits_indices;
    const int64_t *slot_mapping;
    const int32_t *copies; /* (num_copies, 3): source block, destination block, tokens */
} pt_batch;

typedef struct pt_threads pt_threads;

PT_API int32_t pt_abi_version(void);
/* The best level of this machine, or `limit` if that is lower. */
PT_API int32_t pt_isa_best(int32_t limit);
PT_API const char *pt_isa_name(int32_t isa);
/* A level that the CPU has and this process cannot use, and why; NULL: none. */
PT_API const char *pt_isa_lacks(void);

/* num_threads workers including the caller's thread, each bound to its CPU of `cpus` (num_threads), NULL: to none. */
PT_API pt_threads *pt_threads_create(int32_t num_threads, const int32_t *cpus);
/* From the next step on only the first `num_active` workers (1 to all of them) compute; the others leave their cores to
 * whoever needs them. Results do not depend on it. To be called by the thread that calls pt_step, between steps. */
PT_API void pt_threads_use(pt_threads *threads, int32_t num_active);
PT_API void pt_threads_destroy(pt_threads *threads);

/* Bytes of a packed (n, k) weight, and the packing itself. src: (n, k) row-major of `dtype`. */
PT_API size_t pt_packed_bytes(int32_t isa, int32_t dtype, int64_t n, int64_t k);
PT_API void pt_pack(int32_t isa, int32_t dtype, const void *src, int64_t n, int64_t k, void *dst);

/* The same of two (n, k) weights for a gated GEMM; 0 bytes where the level has none for that dtype. */
PT_API size_t pt_packed_gated_bytes(int32_t isa, int32_t dtype, int64_t n, int64_t k);
PT_API void pt_pack_gated(int32_t isa, int32_t dtype, const void *gate, const void *up, int64_t n, int64_t k, void *dst);

/* Bytes of scratch that pt_step needs beside the buffers. */
PT_API size_t pt_scratch_bytes(const pt_model *model, const pt_threads *threads);

/* Run one step. Returns 0, or a negative pt_error; nothing was run then. counters: (PT_NUM_COUNTERS) nanoseconds by op
 * kind, may be NULL. */
PT_API int32_t pt_step(int32_t isa, const pt_model *model, const pt_batch *batch, pt_threads *threads, void *scratch,
                       int64_t *counters);
/* One copy: `nbytes` from one place to another that it does not overlap. */
typedef struct {
    const void *from;
    void *to;
    int64_t nbytes;
} pt_copied;

/* Copy them all, by the calling thread. digests: (num_copies, 16), xxh3-128 of each in canonical order, or NULL; with it
 * each is longer than 240 bytes. Returns 0, or a negative pt_error; nothing was copied then. */
PT_API int32_t pt_copy(int32_t isa, int64_t num_copies, const pt_copied *copies, uint8_t *digests);
/* out: (count) numbers in [0, 1), multiples of 2^-52, each named by seed, choice and position. */
PT_API void pt_uniforms(const uint64_t *seeds, const uint32_t *choices, const uint32_t *positions, int64_t count,
                        double *out);

/* How one token is chosen, and the answer. */
typedef struct {
    const float *logits; /* (vocab_size) to choose from */
    const float *raw;    /* (vocab_size) that log-probabilities are told of; NULL: none are */
    const float *peaks;  /* (vocab_size / PT_SAMPLE_BLOCK, rounded up) of logits, as a GEMM told them; NULL: found here */
    double number;       /* in [0, 1): where in the distribution to draw; counts to 52 bits */
    double temperature;  /* 0: the best token, of equal ones the lowest id */
    double min_p, top_p; /* 0 and 1: all tokens */
    int32_t top_k;       /* below 1: all tokens */
    int32_t num_top;     /* alternatives to tell of */
    int32_t token;
    int32_t rank;            /* by raw, 1: the best */
    float logprob, reserved; /* of the token by raw */
    int32_t *top_ids;        /* (num_top) best first, of equal ones the lowest id */
    float *top_logprobs;     /* (num_top) */
} pt_sample_row;

/* Bytes of scratch that pt_sample needs; 0 for a vocabulary that it refuses. */
PT_API size_t pt_sample_scratch_bytes(int64_t vocab_size, const pt_threads *threads);

/* Choose a token for every row, in the order and meaning of engine/sampler.py: min_p, top_k, top_p, draw. A row with NaN,
 * or without a finite best logit, gets the lowest id that has NaN, or the best. Returns as pt_step does. */
PT_API int32_t pt_sample(int32_t isa, pt_sample_row *rows, int32_t num_rows, int64_t vocab_size, pt_threads *threads,
                         void *scratch);
PT_API const char *pt_error_text(int32_t error);

#define PT_NUM_COUNTERS 10

#endif
