/* The kernels for avx512. */
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma")
#include "internal.h"

#include <immintrin.h>
#include <string.h>

#define NAME(x) avx512_##x
#define LEVEL_NAME "avx512"
#define VL 16
#define PANEL 32
#include "vector.inc"

#include "rows.inc"

#include "sample.inc"

#include "gemm_avx512.inc"

#include "pack.inc"

#include "softmax.inc"

#include "attention.inc"

#define ATTENTION_PAIRS
#include "attention.inc"
#define LEVEL_ATTENTION_BF16(x) NAME(pairs_##x)

#include "level.inc"
#endif
