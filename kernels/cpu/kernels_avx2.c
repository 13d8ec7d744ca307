/* The kernels for avx2. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include "internal.h"

#include <immintrin.h>
#include <string.h>

#define NAME(x) avx2_##x
#define LEVEL_NAME "avx2"
#define VL 8
#define PANEL 8
#include "vector.inc"

#include "rows.inc"

#include "sample.inc"

#include "gemm_avx2.inc"

#include "pack.inc"

#include "softmax.inc"

#include "attention.inc"

#define ATTENTION_PAIRS
#include "attention.inc"
#define LEVEL_ATTENTION_BF16(x) NAME(pairs_##x)

#include "level.inc"
#endif
