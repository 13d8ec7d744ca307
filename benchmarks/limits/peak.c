/* Peak rate of multiply-adds as a matrix product sees it: one side in L1 or registers, the other streamed from L2. One
 * multiply-add is two floating-point operations. */
#include "limits.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define L2_BYTES ((size_t)384 << 10) /* a thread's panel: past L1, within any L2 of the last ten years */
#define L1_BYTES ((size_t)8 << 10)

typedef struct {
    char *panel; /* L2_BYTES */
    char *rows;  /* L1_BYTES */
    _Atomic uint32_t sink;
} operands;

/* Goes through the panel once; floating-point operations. */
typedef uint64_t (*pass_fn)(operands *);

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>

#define REPEAT14(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)
#define REPEAT6(X) X(0) X(1) X(2) X(3) X(4) X(5)

/* 14 rows by two vectors: 28 accumulators, as the GEMMs of libraries have. */
#define ZERO512(i) __m512 a##i = _mm512_setzero_ps(), b##i = a##i;
#define ADD512(i) total = _mm512_add_ps(total, _mm512_add_ps(a##i, b##i));

__attribute__((target("avx512f,avx512bf16"))) static uint64_t pass_avx512_bf16(operands *o) {
    REPEAT14(ZERO512)
    const int32_t *rows = (const int32_t *)o->rows;
    for (size_t at = 0; at < L2_BYTES; at += 128) {
        const __m512bh left = (__m512bh)_mm512_load_si512(o->panel + at);
        const __m512bh right = (__m512bh)_mm512_load_si512(o->panel + at + 64);
        const int32_t *row = rows + (at / 128 % 64) * 16;
#define STEP(i)                                                      \
    {                                                                \
        const __m512bh x = (__m512bh)_mm512_set1_epi32(row[i]);      \
        a##i = _mm512_dpbf16_ps(a##i, x, left);                      \
        b##i = _mm512_dpbf16_ps(b##i, x, right);                     \
    }
        REPEAT14(STEP)
#undef STEP
    }
    __m512 total = _mm512_setzero_ps();
    REPEAT14(ADD512)
    o->sink = (uint32_t)_mm512_cvtsi512_si32(_mm512_castps_si512(total));
    return L2_BYTES / 128 * 14 * 2 * 64;
}

__attribute__((target("avx512f"))) static uint64_t pass_avx512_f32(operands *o) {
    REPEAT14(ZERO512)
    const float *rows = (const float *)o->rows;
    for (size_t at = 0; at < L2_BYTES; at += 128) {
        const __m512 left = _mm512_load_ps(o->panel + at), right = _mm512_load_ps(o->panel + at + 64);
        const float *row = rows + (at / 128 % 64) * 16;
#define STEP(i)                                           \
    {                                                     \
        const __m512 x = _mm512_set1_ps(row[i]);          \
        a##i = _mm512_fmadd_ps(x, left, a##i);            \
        b##i = _mm512_fmadd_ps(x, right, b##i);           \
    }
        REPEAT14(STEP)
#undef STEP
    }
    __m512 total = _mm512_setzero_ps();
    REPEAT14(ADD512)
    o->sink = (uint32_t)_mm512_cvtsi512_si32(_mm512_castps_si512(total));
    return L2_BYTES / 128 * 14 * 2 * 32;
}

__attribute__((target("avx2,fma"))) static uint64_t pass_avx2_f32(operands *o) {
#define ZERO256(i) __m256 a##i = _mm256_setzero_ps(), b##i = a##i;
    REPEAT6(ZERO256)
    const float *rows = (const float *)o->rows;
    for (size_t at = 0; at < L2_BYTES; at += 64) {
        const __m256 left = _mm256_load_ps((const float *)(o->panel + at));
        const __m256 right = _mm256_load_ps((const float *)(o->panel + at + 32));
        const float *row = rows + (at / 64 % 64) * 16;
#define STEP(i)                                           \
    {                                                     \
        const __m256 x = _mm256_broadcast_ss(row + i);    \
        a##i = _mm256_fmadd_ps(x, left, a##i);            \
        b##i = _mm256_fmadd_ps(x, right, b##i);           \
    }
        REPEAT6(STEP)
#undef STEP
    }
    __m256 total = _mm256_setzero_ps();
#define ADD256(i) total = _mm256_add_ps(total, _mm256_add_ps(a##i, b##i));
    REPEAT6(ADD256)
    o->sink = (uint32_t)_mm256_cvtss_f32(total);
    return L2_BYTES / 64 * 6 * 2 * 16;
}

#if defined(__has_include)
#if __has_include(<amxtileintrin.h>)
#define HAVE_AMX 1
#endif
#endif

#ifdef HAVE_AMX
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
} tile_config;

/* Two by two tiles of 16 x 16: each pass of K loads four tiles and multiplies four times. */
__attribute__((target("amx-tile,amx-bf16"))) static uint64_t pass_amx_bf16(operands *o) {
    tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.column_bytes[i] = 64, config.rows[i] = 16;
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t at = 0; at < L2_BYTES; at += 2048) {
        const char *rows = o->rows + at % L1_BYTES;
        _tile_loadd(4, rows, 64);
        _tile_loadd(5, rows + 1024, 64);
        _tile_loadd(6, o->panel + at, 64);
        _tile_loadd(7, o->panel + at + 1024, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    float out[256];
    _tile_stored(0, out, 64);
    _tile_release();
    o->sink = (uint32_t)out[0];
    return L2_BYTES / 2048 * 4 * 16384;
}

/* The CPU has the tiles and the kernel lets this process use them (Linux: arch/x86/xstate documentation). */
static int amx_permitted(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return 0;
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
}
#endif

static pass_fn best_bf16(const char **path) {
    __builtin_cpu_init();
#ifdef HAVE_AMX
    if (amx_permitted()) return *path = "amx_bf16", pass_amx_bf16;
#endif
    if (__builtin_cpu_supports("avx512bf16")) return *path = "avx512_bf16", pass_avx512_bf16;
    return NULL;
}

static pass_fn best_f32(const char **path) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return *path = "avx512_fma", pass_avx512_f32;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return *path = "avx2_fma", pass_avx2_f32;
    return NULL;
}
#else
static pass_fn best_bf16(const char **path) { return *path = "none", (pass_fn)NULL; }
static pass_fn best_f32(const char **path) { return *path = "none", (pass_fn)NULL; }
#endif

static void prepare(member *m) {
    operands *o = m->data;
    if (o->panel != NULL) return;
    o->panel = new_buffer(L2_BYTES + L1_BYTES);
    o->rows = o->panel + L2_BYTES;
    /* Small normal numbers in bf16 and in fp32; denormals or infinities could be slower. */
    for (size_t i = 0; i < (L2_BYTES + L1_BYTES) / 2; i++) ((uint16_t *)o->panel)[i] = (uint16_t)(0x3c00 + i % 97);
}

static void one_pass(member *m) { m->amount += (*(pass_fn *)m->team->shared)(m->data); }

static void print_path(team *t, const char *prefix, const char *path, pass_fn pass, int runs) {
    double rates[100];
    if (pass == NULL) {
        printf("\"%s_path\": null, \"%s_flop_per_s\": []", prefix, prefix);
        return;
    }
    t->shared = &pass;
    for (int run = 0; run < runs; run++) rates[run] = team_rate(t, prepare);
    char name[64];
    snprintf(name, sizeof name, "%s_flop_per_s", prefix);
    printf("\"%s_path\": \"%s\", ", prefix, path);
    print_list(name, rates, runs);
}

void measure_peak(int num_threads, int pinned, double seconds, int runs) {
    static team t;
    static operands all[MAX_THREADS];
    const char *bf16_path = "", *f32_path = "";
    const pass_fn f32 = best_f32(&f32_path);
    pass_fn bf16 = best_bf16(&bf16_path);
    if (bf16 == NULL) bf16 = f32, bf16_path = f32_path; /* bf16 is then widened and multiplied as fp32 */
    t.num_threads = num_threads;
    t.pinned = pinned;
    t.seconds = seconds;
    t.work = one_pass;
    for (int i = 0; i < num_threads; i++) t.members[i].data = &all[i];
    print_path(&t, "bf16", bf16_path, bf16, runs);
    printf(", ");
    print_path(&t, "f32", f32_path, f32, runs);
}
