/* Copies of blocks with their checksum, in one pass: each cache line is read once, hashed while it is in a register,
 * and stored past the caches when the copy is large.
 *
 * The checksum is XXH3's 128-bit one with seed 0 (xxHash 0.8, doc/xxhash_spec.md), for payloads longer than 240 bytes:
 * shorter ones are hashed in another way, which nobody needs here. */
#include "internal.h"

#include <string.h>

#define STRIPE 64        /* bytes that the accumulators take at once */
#define STRIPES 16       /* of a block, after which they are scrambled */
#define MIN_HASHED 241   /* bytes */
#define MIN_STREAMED (64 << 10) /* bytes of a copy that goes past the caches: 16 of them fill a second cache of 1 MiB */
#define AHEAD 1024       /* bytes: the hardware's own prefetch stops at pages of 4 KiB */

#define P32_1 0x9E3779B1u
#define P32_2 0x85EBCA77u
#define P32_3 0xC2B2AE3Du
#define P64_1 0x9E3779B185EBCA87u
#define P64_2 0xC2B2AE3D27D4EB4Fu
#define P64_3 0x165667B19E3779F9u
#define P64_4 0x85EBCA77C2B2AE63u
#define P64_5 0x27D4EB2F165667C5u

static const uint8_t secret[192] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

typedef uint64_t accumulators[8] __attribute__((aligned(64)));

/* Copies whole stripes and accumulates them; the last stripe of a payload is apart, since it may overlap the one before.
 * streams: `to` is 64-aligned and its lines are not wanted in a cache. hashes: 0, copy only. */
typedef void (*copy_fn)(accumulators acc, uint8_t *to, const uint8_t *from, int64_t num_stripes, int streams, int hashes);

static uint64_t read64(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

static void accumulate(accumulators acc, const uint8_t *from, const uint8_t *key) {
    for (int i = 0; i < 8; i++) {
        uint64_t word = read64(from + 8 * i), mixed = word ^ read64(key + 8 * i);
        acc[i ^ 1] += word;
        acc[i] += (mixed & 0xFFFFFFFFu) * (mixed >> 32);
    }
}

static void scramble(accumulators acc) {
    for (int i = 0; i < 8; i++)
        acc[i] = (acc[i] ^ acc[i] >> 47 ^ read64(secret + sizeof secret - STRIPE + 8 * i)) * P32_1;
}

static void copy_plain(accumulators acc, uint8_t *to, const uint8_t *from, int64_t num_stripes, int streams, int hashes) {
    (void)streams;
    if (!hashes) {
        memcpy(to, from, (size_t)num_stripes * STRIPE);
        return;
    }
    for (int64_t at = 0; at < num_stripes; at += STRIPES) {
        int64_t n = pt_min(STRIPES, num_stripes - at);
        memcpy(to + at * STRIPE, from + at * STRIPE, (size_t)n * STRIPE);
        for (int64_t i = 0; i < n; i++) accumulate(acc, from + (at + i) * STRIPE, secret + 8 * i);
        if (n == STRIPES) scramble(acc);
    }
}

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f,avx512dq")))

AVX512 static inline __m512i accumulated_512(__m512i acc, __m512i data, const uint8_t *key) {
    __m512i mixed = _mm512_xor_si512(data, _mm512_loadu_si512(key));
    __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
    return _mm512_add_epi64(_mm512_add_epi64(acc, _mm512_shuffle_epi32(data, _MM_PERM_BADC)), product);
}

AVX512 static inline __m512i scrambled_512(__m512i acc) {
    const __m512i key = _mm512_load_si512(secret + sizeof secret - STRIPE);
    acc = _mm512_ternarylogic_epi64(acc, _mm512_srli_epi64(acc, 47), key, 0x96);
    return _mm512_mullo_epi64(acc, _mm512_set1_epi64(P32_1));
}

AVX512 static void copy_512(accumulators sums, uint8_t *to, const uint8_t *from, int64_t num_stripes, int streams, int hashes) {
    __m512i acc = _mm512_load_si512(sums);
    for (int64_t at = 0; at < num_stripes; at += STRIPES) {
        int64_t n = pt_min(STRIPES, num_stripes - at);
        for (int64_t i = 0; i < n; i++) {
            const uint8_t *source = from + (at + i) * STRIPE;
            uint8_t *target = to + (at + i) * STRIPE;
            _mm_prefetch((const char *)source + AHEAD, _MM_HINT_T0);
            __m512i data = _mm512_loadu_si512(source);
            if (streams)
                _mm512_stream_si512((__m512i *)target, data);
            else
                _mm512_storeu_si512(target, data);
            if (hashes) acc = accumulated_512(acc, data, secret + 8 * i);
        }
        if (hashes && n == STRIPES) acc = scrambled_512(acc);
    }
    _mm512_store_si512(sums, acc);
    if (streams) _mm_sfence();
}

#define AVX2 __attribute__((target("avx2")))

AVX2 static inline __m256i accumulated_256(__m256i acc, __m256i data, const uint8_t *key) {
    __m256i mixed = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)key));
    __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    return _mm256_add_epi64(_mm256_add_epi64(acc, _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2))), product);
}

AVX2 static inline __m256i scrambled_256(__m256i acc, const uint8_t *key) {
    const __m256i prime = _mm256_set1_epi64x(P32_1);
    acc = _mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47));
    acc = _mm256_xor_si256(acc, _mm256_loadu_si256((const __m256i *)key));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(acc, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(acc, prime), _mm256_slli_epi64(high, 32));
}

AVX2 static void copy_256(accumulators sums, uint8_t *to, const uint8_t *from, int64_t num_stripes, int streams, int hashes) {
    const uint8_t *last = secret + sizeof secret - STRIPE;
    __m256i low = _mm256_load_si256((__m256i *)sums), high = _mm256_load_si256((__m256i *)sums + 1);
    for (int64_t at = 0; at < num_stripes; at += STRIPES) {
        int64_t n = pt_min(STRIPES, num_stripes - at);
        for (int64_t i = 0; i < n; i++) {
            const __m256i *source = (const __m256i *)(from + (at + i) * STRIPE);
            __m256i *target = (__m256i *)(to + (at + i) * STRIPE);
            _mm_prefetch((const char *)source + AHEAD, _MM_HINT_T0);
            __m256i first = _mm256_loadu_si256(source), second = _mm256_loadu_si256(source + 1);
            if (streams) {
                _mm256_stream_si256(target, first);
                _mm256_stream_si256(target + 1, second);
            } else {
                _mm256_storeu_si256(target, first);
                _mm256_storeu_si256(target + 1, second);
            }
            if (hashes) {
                low = accumulated_256(low, first, secret + 8 * i);
                high = accumulated_256(high, second, secret + 8 * i + 32);
            }
        }
        if (hashes && n == STRIPES) low = scrambled_256(low, last), high = scrambled_256(high, last + 32);
    }
    _mm256_store_si256((__m256i *)sums, low);
    _mm256_store_si256((__m256i *)sums + 1, high);
    if (streams) _mm_sfence();
}
#endif

static copy_fn copy_of(int32_t isa) {
#if defined(__x86_64__)
    if (isa >= PT_ISA_AVX512) return copy_512;
    if (isa >= PT_ISA_AVX2) return copy_256;
#endif
    (void)isa;
    return copy_plain;
}

static uint64_t merged(const accumulators acc, const uint8_t *key, uint64_t start) {
    for (int i = 0; i < 4; i++) {
        uint64_t left = acc[2 * i] ^ read64(key + 16 * i), right = acc[2 * i + 1] ^ read64(key + 16 * i + 8);
        unsigned __int128 product = (unsigned __int128)left * right;
        start += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    start = (start ^ start >> 37) * 0x165667919E3779F9u;
    return start ^ start >> 32;
}

/* The digest's bytes in their canonical order: high half first, each half's most significant byte first. */
static void write_digest(uint8_t *digest, const accumulators acc, uint64_t nbytes) {
    uint64_t low = merged(acc, secret + 11, nbytes * P64_1);
    uint64_t high = merged(acc, secret + sizeof secret - STRIPE - 11, ~(nbytes * P64_2));
    for (int i = 0; i < 8; i++) digest[i] = (uint8_t)(high >> (56 - 8 * i)), digest[8 + i] = (uint8_t)(low >> (56 - 8 * i));
}

int32_t pt_copy(int32_t isa, int64_t num_copies, const pt_copied *copies, uint8_t *digests) {
    if (isa > pt_isa_best(PT_ISA_AMX)) return PT_ERR_ISA;
    for (int64_t i = 0; i < num_copies; i++)
        if (copies[i].nbytes < (digests ? MIN_HASHED : 0)) return PT_ERR_SHAPE;
    copy_fn copy = copy_of(isa);
    for (int64_t i = 0; i < num_copies; i++) {
        const uint8_t *from = copies[i].from;
        uint8_t *to = copies[i].to;
        int64_t nbytes = copies[i].nbytes, num_stripes = nbytes ? (nbytes - 1) / STRIPE : 0;
        accumulators acc = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
        int streams = nbytes >= MIN_STREAMED && (uintptr_t)to % STRIPE == 0;
        copy(acc, to, from, num_stripes, streams, digests != NULL);
        memcpy(to + num_stripes * STRIPE, from + num_stripes * STRIPE, (size_t)(nbytes - num_stripes * STRIPE));
        if (digests) {
            accumulate(acc, from + nbytes - STRIPE, secret + sizeof secret - STRIPE - 7);
            write_digest(digests + 16 * i, acc, (uint64_t)nbytes);
        }
    }
    return 0;
}
