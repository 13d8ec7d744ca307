/* Which instruction-set level this machine runs. */
#include "internal.h"

#include <pthread.h>

int32_t pt_abi_version(void) { return PT_ABI_VERSION; }

const char *pt_isa_name(int32_t isa) {
    static const char *const names[] = {"none", "avx2", "avx512", "avx512_bf16", "amx"};
    return isa >= 0 && isa < (int32_t)(sizeof names / sizeof *names) ? names[isa] : "unknown";
}

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

const pt_kernels *avx2_table(void);
const pt_kernels *avx512_table(void);
const pt_kernels *avx512_bf16_table(void);
const pt_kernels *amx_table(void); /* NULL: not built */

#define ARCH_REQ_XCOMP_PERM 0x1023 /* Linux, Documentation/arch/x86/xstate.rst */
#define XFEATURE_XTILEDATA 18
#define XCR0_TILES (3u << 17) /* configuration and data */

/* Of the tiles of this process, which asks for them once: Linux gives their state to processes that do. */
static enum { TILES_NONE, TILES_NOT_BUILT, TILES_REFUSED, TILES_USABLE } tiles;

#ifdef PT_EMULATE_TILES
static void ask_for_tiles(void) { tiles = TILES_USABLE; }
#else
/* AMX-TILE and AMX-BF16, and an operating system that saves tiles. */
static int has_tiles(void) {
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 24 & 1) || !(d >> 22 & 1)) return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & XCR0_TILES) == XCR0_TILES;
}

static void ask_for_tiles(void) {
    if (!has_tiles()) return;
    if (amx_table() == NULL)
        tiles = TILES_NOT_BUILT;
    else
        tiles = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 ? TILES_USABLE : TILES_REFUSED;
}
#endif

static int tiles_usable(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, ask_for_tiles);
    return tiles == TILES_USABLE;
}

int32_t pt_isa_best(int32_t limit) {
    int32_t best = PT_ISA_NONE;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = PT_ISA_AVX2;
    if (best && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        best = PT_ISA_AVX512;
    if (best == PT_ISA_AVX512 && __builtin_cpu_supports("avx512bf16")) best = PT_ISA_AVX512_BF16;
    if (best == PT_ISA_AVX512_BF16 && limit >= PT_ISA_AMX && tiles_usable()) best = PT_ISA_AMX;
    return best < limit ? best : limit;
}

const char *pt_isa_lacks(void) {
    tiles_usable();
    switch (tiles) {
    case TILES_NOT_BUILT: return "amx: it was built by a compiler that does not know the instructions";
    case TILES_REFUSED: return "amx: the kernel does not let this process use the CPU's tiles";
    default: return NULL;
    }
}

const pt_kernels *pt_kernels_of(int32_t isa) {
    if (isa > pt_isa_best(isa)) return NULL;
    switch (isa) {
    case PT_ISA_AVX2: return avx2_table();
    case PT_ISA_AVX512: return avx512_table();
    case PT_ISA_AVX512_BF16: return avx512_bf16_table();
    case PT_ISA_AMX: return amx_table();
    default: return NULL;
    }
}
#else
int32_t pt_isa_best(int32_t limit) { return limit < PT_ISA_NONE ? limit : PT_ISA_NONE; }

const char *pt_isa_lacks(void) { return NULL; }

const pt_kernels *pt_kernels_of(int32_t isa) {
    (void)isa;
    return NULL;
}
#endif
