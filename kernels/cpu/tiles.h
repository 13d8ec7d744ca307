/* The tile operations that the amx level uses: eight registers of up to 16 rows of 64 bytes, and products of them.
 *
 * Two implementations of the same semantics: the machine's own instructions, and with PT_EMULATE_TILES a program that
 * does what Intel's manual says they do, so that all code above this layer runs and is tested on machines without tiles.
 * Tile numbers are literals. A thread configures its tiles before it uses them and releases them afterwards.
 */
#ifndef PAGETIER_TILES_H
#define PAGETIER_TILES_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define PT_TILE_ROWS 16
#define PT_TILE_ROW_BYTES 64

/* Palette 1 of LDTILECFG. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} pt_tile_config;
_Static_assert(sizeof(pt_tile_config) == 64, "what LDTILECFG reads");

#ifdef PT_EMULATE_TILES
#include "tiles_emulated.inc"
#else
/* GCC's tile instructions are asm statements that do not name the memory they read. */
#define pt_memory_is_read() __asm__ volatile("" ::: "memory")

static inline void tile_configure(const pt_tile_config *config) {
    __asm__ volatile("" ::"r"(config) : "memory");
    _tile_loadconfig(config);
}

#define tile_release() _tile_release()
#define tile_zero(tile) _tile_zero(tile)

/* Rows `stride` bytes apart. */
#define tile_load(tile, from, stride)                                                                                  \
    do {                                                                                                               \
        pt_memory_is_read();                                                                                           \
        _tile_loadd(tile, from, stride);                                                                               \
    } while (0)
/* As tile_load, of what is read once: it does not drive other lines out of the first cache. */
#define tile_stream(tile, from, stride)                                                                                \
    do {                                                                                                               \
        pt_memory_is_read();                                                                                           \
        _tile_stream_loadd(tile, from, stride);                                                                        \
    } while (0)
#define tile_store(tile, to, stride) _tile_stored(tile, to, stride)

/* c += a b: fp32 sums over pairs of bf16; a has a row of pairs for each row of c, b a row of pairs for each pair of a. */
#define tile_multiply(c, a, b) _tile_dpbf16ps(c, a, b)
#endif

#endif
