/* Which instruction-set level this machine runs. */
#include "internal.h"

#if defined(__x86_64__)
const pt_kernels *avx2_table(void);
const pt_kernels *avx512_table(void);
const pt_kernels *avx512_bf16_table(void);
#endif

int32_t pt_abi_version(void) { return PT_ABI_VERSION; }

int32_t pt_isa_best(int32_t limit) {
    int32_t best = PT_ISA_NONE;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = PT_ISA_AVX2;
    if (best && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        best = PT_ISA_AVX512;
    if (best == PT_ISA_AVX512 && __builtin_cpu_supports("avx512bf16")) best = PT_ISA_AVX512_BF16;
#endif
    return best < limit ? best : limit;
}

const char *pt_isa_name(int32_t isa) {
    static const char *const names[] = {"none", "avx2", "avx512", "avx512_bf16", "amx"};
    return isa >= 0 && isa < (int32_t)(sizeof names / sizeof *names) ? names[isa] : "unknown";
}

const pt_kernels *pt_kernels_of(int32_t isa) {
#if defined(__x86_64__)
    if (isa > pt_isa_best(PT_ISA_AMX)) return NULL;
    switch (isa) {
    case PT_ISA_AVX2: return avx2_table();
    case PT_ISA_AVX512: return avx512_table();
    case PT_ISA_AVX512_BF16: return avx512_bf16_table();
    default: break;
    }
#endif
    return NULL;
}
