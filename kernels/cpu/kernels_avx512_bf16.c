/* The kernels for avx512 and bf16. */
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
#include "internal.h"

#include <immintrin.h>
#include <string.h>

#define NAME(x) avx512_bf16_##x
#define LEVEL_NAME "avx512_bf16"
#define VL 16
#define PANEL 32
#define LEVEL_BF16
#include "vector.inc"

#include "rows.inc"

#include "sample.inc"

#include "gemm_avx512_bf16.inc"

#include "pack.inc"

#include "softmax.inc"

#include "attention.inc"

#define ATTENTION_BF16
#include "attention.inc"
#define LEVEL_ATTENTION_BF16(x) NAME(bf16_##x)

#include "level.inc"
#endif
