/* pt_uniforms: random numbers by name, as engine/random_stream.py makes them. */
#include "internal.h"

/* The first two words of Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). */
static uint64_t philox(uint32_t c0, uint32_t c1, uint32_t k0, uint32_t k1) {
    uint32_t c2 = 0, c3 = 0;
    for (int32_t round = 0; round < 10; round++) {
        const uint64_t first = (uint64_t)c0 * 0xD2511F53, second = (uint64_t)c2 * 0xCD9E8D57;
        c0 = (uint32_t)(second >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)second;
        c2 = (uint32_t)(first >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)first;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return (uint64_t)c0 << 32 | c1;
}

void pt_uniforms(const uint64_t *seeds, const uint32_t *choices, const uint32_t *positions, int64_t count, double *out) {
    for (int64_t i = 0; i < count; i++) {
        const uint64_t bits = philox(positions[i], choices[i], (uint32_t)seeds[i], (uint32_t)(seeds[i] >> 32));
        out[i] = (double)(bits >> 12) * 0x1p-52;
    }
}
