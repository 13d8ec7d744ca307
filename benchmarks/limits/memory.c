/* Streaming read and copy. Each thread has buffers of its own, far larger than the caches, and goes through them piece
 * by piece. Copy counts each byte once, though it is read and written; its stores go past the caches where they can. */
#include "limits.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PIECE ((size_t)1 << 16)

typedef struct {
    size_t bytes, at;
    char *from, *to; /* to: copy only */
    _Atomic uint64_t sink;
} stream;

static uint64_t read_plain(const char *data, size_t bytes) {
    const uint64_t *words = (const uint64_t *)data;
    uint64_t sums[8] = {0};
    for (size_t i = 0; i < bytes / 8; i += 8)
        for (int j = 0; j < 8; j++) sums[j] += words[i + (size_t)j];
    uint64_t sum = 0;
    for (int j = 0; j < 8; j++) sum += sums[j];
    return sum;
}

static void copy_plain(char *to, const char *from, size_t bytes) { memcpy(to, from, bytes); }

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("avx2"))) static uint64_t read_avx2(const char *data, size_t bytes) {
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (size_t i = 0; i < bytes; i += 128) {
        a = _mm256_xor_si256(a, _mm256_load_si256((const __m256i *)(data + i)));
        b = _mm256_xor_si256(b, _mm256_load_si256((const __m256i *)(data + i + 32)));
        c = _mm256_xor_si256(c, _mm256_load_si256((const __m256i *)(data + i + 64)));
        d = _mm256_xor_si256(d, _mm256_load_si256((const __m256i *)(data + i + 96)));
    }
    a = _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d));
    return (uint64_t)_mm256_extract_epi64(a, 0) ^ (uint64_t)_mm256_extract_epi64(a, 3);
}

__attribute__((target("avx512f"))) static uint64_t read_avx512(const char *data, size_t bytes) {
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (size_t i = 0; i < bytes; i += 256) {
        a = _mm512_xor_si512(a, _mm512_load_si512(data + i));
        b = _mm512_xor_si512(b, _mm512_load_si512(data + i + 64));
        c = _mm512_xor_si512(c, _mm512_load_si512(data + i + 128));
        d = _mm512_xor_si512(d, _mm512_load_si512(data + i + 192));
    }
    a = _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d));
    return (uint64_t)_mm512_reduce_add_epi64(a);
}

__attribute__((target("avx2"))) static void copy_avx2(char *to, const char *from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) {
        __m256i a = _mm256_load_si256((const __m256i *)(from + i));
        __m256i b = _mm256_load_si256((const __m256i *)(from + i + 32));
        _mm256_stream_si256((__m256i *)(to + i), a);
        _mm256_stream_si256((__m256i *)(to + i + 32), b);
    }
    _mm_sfence();
}
#endif

static uint64_t (*best_read(void))(const char *, size_t) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return read_avx512;
    if (__builtin_cpu_supports("avx2")) return read_avx2;
#endif
    return read_plain;
}

static void (*best_copy(void))(char *, const char *, size_t) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) return copy_avx2;
#endif
    return copy_plain;
}

static void touch_from(member *m) {
    stream *s = m->data;
    s->at = 0;
    if (s->from != NULL) return;
    s->from = new_buffer(s->bytes);
    memset(s->from, 1, s->bytes); /* untouched pages would all be the kernel's one page of zeros */
}

static void touch_both(member *m) {
    stream *s = m->data;
    touch_from(m);
    if (s->to != NULL) return;
    s->to = new_buffer(s->bytes);
    memset(s->to, 2, s->bytes);
}

static void advance(member *m, stream *s) {
    m->amount += PIECE;
    s->at += PIECE;
    if (s->at >= s->bytes) s->at = 0;
}

static void read_piece(member *m) {
    stream *s = m->data;
    atomic_fetch_xor_explicit(&s->sink, best_read()(s->from + s->at, PIECE), memory_order_relaxed);
    advance(m, s);
}

static void copy_piece(member *m) {
    stream *s = m->data;
    best_copy()(s->to + s->at, s->from + s->at, PIECE);
    advance(m, s);
}

void measure_memory(int copies, int num_threads, int pinned, double seconds, int runs, size_t bytes) {
    static team t;
    static stream streams[MAX_THREADS];
    double rates[100];
    t.num_threads = num_threads;
    t.pinned = pinned;
    t.seconds = seconds;
    t.work = copies ? copy_piece : read_piece;
    for (int i = 0; i < num_threads; i++) {
        streams[i].bytes = bytes / PIECE * PIECE;
        t.members[i].data = &streams[i];
    }
    for (int run = 0; run < runs; run++) rates[run] = team_rate(&t, copies ? touch_both : touch_from);
    print_list("bytes_per_s", rates, runs);
}
