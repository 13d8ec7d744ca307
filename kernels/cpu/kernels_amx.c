/* The kernels for amx: bf16 GEMMs and attention over bf16 in tiles, all else as at avx512_bf16. */
#include "internal.h"

const pt_kernels *amx_table(void);

/* PT_WITHOUT_TILES: the compiler or its assembler does not know the instructions. */
#if defined(__x86_64__) && !defined(PT_WITHOUT_TILES)
#ifdef PT_EMULATE_TILES
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,amx-tile,amx-bf16")
#endif
#include <pthread.h>

#include "tiles.h"

#define NAME(x) amx_##x
#define VL 16
#define PANEL 32
#define LEVEL_BF16
#include "vector.inc"

#include "gemm.inc"

#include "gemm_amx.inc"

#include "softmax.inc"

#define ATTENTION_BF16
#define ATTENTION_TILES
#include "attention.inc"

const pt_kernels *avx512_bf16_table(void);

static pt_kernels table;

static void make_table(void) {
    table = *avx512_bf16_table();
    table.name = "amx";
    table.k_multiple = K_TILE;
    table.gemm_bf16 = NAME(gemm_bf16);
    table.pack_bf16 = NAME(pack_bf16);
    table.pack_gated_bf16 = NAME(pack_gated_bf16);
    table.query_rows_bf16 = PT_MAX_QUERY_ROWS;
    table.attention_bf16 = NAME(bf16_attention);
    table.merge_bf16 = NAME(bf16_attention_merge);
}

const pt_kernels *amx_table(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_table);
    return &table;
}
#else
const pt_kernels *amx_table(void) { return NULL; }
#endif
