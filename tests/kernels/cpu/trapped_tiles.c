/* The amx level's own machine code on a machine without tiles: each tile instruction is an illegal one there, and the
 * handler of that signal decodes it, does what it says by tiles_emulated.inc, and goes on behind it.
 *
 * usage: trapped_tiles M N K LDA < a, w > out    a: (M, LDA) bf16, w: (N, K) bf16, out: (M, N) float32
 */
#define PT_EMULATE_TILES
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma")
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include "internal.h"
#include "tiles.h"

const pt_kernels *amx_table(void);

static int num_trapped;

/* Of a VEX instruction: registers by number, and the memory operand's parts. */
typedef struct {
    int opcode, prefix, reg, rm, other, length, in_memory;
    char *base;
    int64_t index;
} instruction;

static int64_t value_of(const ucontext_t *context, int number) {
    static const int places[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                 REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return context->uc_mcontext.gregs[places[number]];
}

static int64_t displacement(const uint8_t *at, int bytes) {
    int32_t far = 0;
    memcpy(&far, at, sizeof far);
    return bytes == 1 ? (int8_t)*at : bytes == 4 ? far : 0;
}

/* Intel's Software Developer's Manual, volume 2, chapter 2: three-byte VEX, ModRM, SIB. */
static instruction decode(const uint8_t *code, const ucontext_t *context) {
    if (code[0] != 0xC4 || (code[1] & 0x1F) != 2) abort();
    const int r = !(code[1] & 0x80) * 8, x = !(code[1] & 0x40) * 8, b = !(code[1] & 0x20) * 8, mod = code[4] >> 6;
    instruction i = {.opcode = code[3], .prefix = code[2] & 3, .reg = (code[4] >> 3 & 7) + r, .rm = code[4] & 7,
                     .other = ~code[2] >> 3 & 15, .length = 5, .in_memory = mod != 3};
    if (mod == 3) return i;
    int base = i.rm + b;
    if (i.rm == 4) {
        const uint8_t sib = code[i.length++];
        const int index = (sib >> 3 & 7) + x;
        base = (sib & 7) + b;
        if (index != 4) i.index = value_of(context, index) << (sib >> 6);
    }
    if (mod == 0 && (base & 7) == 5) abort(); /* no base: not compiled to so far */
    const int bytes = mod == 1 ? 1 : mod == 2 ? 4 : 0;
    i.base = (char *)value_of(context, base) + displacement(code + i.length, bytes);
    i.length += bytes;
    return i;
}

static void run(const instruction *i) {
    const int kind = i->opcode << 4 | i->prefix << 1 | i->in_memory;
    switch (kind) {
    case 0x491: tile_configure((const pt_tile_config *)(i->base + i->index)); return;
    case 0x490: tile_release(); return;
    case 0x496: tile_zero(i->reg); return;
    case 0x4B3: /* a hint apart, the same */
    case 0x4B7: tile_load(i->reg, i->base, i->index); return;
    case 0x4B5: tile_store(i->reg, i->base, i->index); return;
    case 0x5C4: tile_multiply(i->reg, i->rm, i->other); return;
    default: abort();
    }
}

static void trap(int number, siginfo_t *info, void *at) {
    (void)number, (void)info;
    ucontext_t *context = at;
    const instruction i = decode((const uint8_t *)context->uc_mcontext.gregs[REG_RIP], context);
    run(&i);
    context->uc_mcontext.gregs[REG_RIP] += i.length;
    num_trapped++;
}

static void *take(size_t bytes) {
    void *at = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (at == NULL) abort();
    return at;
}

static void *read_values(size_t count) {
    void *at = take(count * 2);
    if (fread(at, 2, count, stdin) != count) abort();
    return at;
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    const int64_t m = atol(argv[1]), n = atol(argv[2]), k = atol(argv[3]), lda = atol(argv[4]);
    const pt_kernels *kernels = amx_table();
    struct sigaction action = {.sa_sigaction = trap, .sa_flags = SA_SIGINFO};
    sigaction(SIGILL, &action, NULL);
    void *a = read_values((size_t)(m * lda)), *w = read_values((size_t)(n * k));
    const int64_t panels = pt_ceil(n, kernels->panel);
    void *packed = take((size_t)(panels * kernels->panel * pt_ceil(k, kernels->k_multiple) * kernels->k_multiple * 2));
    float *out = take((size_t)(m * n * 4));
    kernels->pack_bf16(w, n, k, packed);
    const pt_gemm g = {.a = a, .lda = lda, .w = packed, .out = out, .ldo = n, .m = m, .n = n, .k = k};
    kernels->gemm_bf16(&g, 0, panels, 0, m);
    fwrite(out, 4, (size_t)(m * n), stdout);
    fprintf(stderr, "%d\n", num_trapped);
    return 0;
}
