"""What test_sanitizers.py runs in a process of its own: every kernel and level of a library built with sanitizers.

usage: python -m tests.kernels.cpu.sanitized_run LIBRARY run|overrun
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagetier.engine.batch import Batch
from pagetier.kernels.cpu.copying import StreamingCopier
from pagetier.kernels.cpu.library import SAMPLE_BLOCK, Isa, Library, OpKind
from tests.kernels.cpu.op_calls import Case, bits, packed, packed_gated, run_op, simple_case
from tests.kernels.cpu.sample_calls import choose, peaks_of, random_logits, random_params, rows_of, tell
from tests.kernels.cpu.tiny_models import SHAPES, Rig, Setting, prompts, random_tensors, rig, tiny_config

LENGTHS = (1, 40, 70)
ARRAYS = ("token_ids", "positions", "query_start_loc", "seq_lens", "logits_indices", "slot_mapping", "block_tables")


def run_models(core: Library, isa: Isa, dtype: torch.dtype) -> None:
    """Random mixed batches of every shape, on one thread and on two."""
    for index, (changes, block_size) in enumerate(SHAPES.values()):
        config, rng = tiny_config(**changes), np.random.default_rng(index)
        num_blocks = sum(-(-n // block_size) for n in LENGTHS)
        setting = Setting(isa, block_size, num_blocks, num_threads=1 + index % 2, max_tokens=128, rng=rng, core=core)
        with rig(config, random_tensors(config, dtype), setting) as run:
            for ids in prompts(rng, LENGTHS, config.vocab_size):
                run.add(ids)
            run.run_randomly(rng, sizes=(1, 30, 70))


def run_ops(core: Library, isa: Isa, dtype: torch.dtype) -> None:
    """Odd widths and row counts; buffers, scratch and pool lie on the heap, without a byte to spare."""
    for width in (1, 7, 16, 33, 100):
        case = simple_case(isa, dtype, 5, core=core)
        out = torch.zeros(5, width, dtype=dtype)
        run_op(case, OpKind.NORM, torch.ones(5, width), out, weight=np.ones(width, np.float32))
        run_op(case, OpKind.SILU_MUL, torch.ones(5, 2 * width), out, n=width)
        run_op(case, OpKind.EMBED, None, torch.zeros(5, width), weight=bits(torch.ones(1, width, dtype=dtype)))
        for rows in (1, 2, 5, 13):
            case = simple_case(isa, dtype, rows, core=core)
            weight = packed(case, torch.ones(width, width, dtype=dtype))
            a = torch.ones(rows, width + width % 2, dtype=dtype)
            run_op(case, OpKind.GEMM, a, torch.zeros(rows, width), k=width, weight=weight, accumulate=1)
            peaks = np.zeros((rows, -(-width // SAMPLE_BLOCK)), np.float32)
            run_op(case, OpKind.GEMM, a, torch.zeros(rows, width), k=width, weight=weight, peaks=peaks.ctypes.data)
            gated = packed_gated(case, *torch.ones(2, width, width, dtype=dtype))
            if gated is not None:
                run_op(case, OpKind.GEMM, a, torch.zeros(rows, width, dtype=dtype), k=width, weight=gated, gated=1)
    case = simple_case(isa, dtype, 13, core=core)  # wide rows, which a level may widen a few at a time
    weight, a = packed(case, torch.ones(7, 6001, dtype=dtype)), torch.ones(13, 6002, dtype=dtype)
    run_op(case, OpKind.GEMM, a, torch.zeros(13, 7), k=6001, weight=weight)
    for heads, kv_heads, dim, block_size in ((3, 1, 64, 16), (2, 2, 80, 8), (50, 1, 12, 16), (1, 1, 256, 64)):
        contexts = [(1100, 1), (0, 9), (513, 2), (1130, 1), (1130, 1), (1100, 40), (1090, 3)]
        counts = [-(-(first + n) // block_size) for first, n in contexts]
        blocks = iter(range(sum(counts)))
        tables = [[next(blocks) for _ in range(count)] for count in counts]
        for row in (4, 6):  # shares a prefix with the one before
            tables[row][: 1088 // block_size] = tables[row - 1][: 1088 // block_size]
        pool = torch.zeros(sum(counts), 1, 2, kv_heads, block_size, dim, dtype=dtype)
        case = Case(isa, dtype, pool, tables, contexts, num_heads=heads, num_threads=2, core=core)
        qkv = torch.ones(case.num_tokens, (heads + 2 * kv_heads) * dim)
        run_op(case, OpKind.ROPE_KV, qkv[:0], qkv, n=heads * dim)
        run_op(case, OpKind.ATTENTION, qkv, torch.zeros(case.num_tokens, heads * dim, dtype=dtype))


def run_samples(core: Library, isa: Isa) -> None:
    """Every filter over odd vocabularies; logits and scratch without a byte to spare."""
    rng = np.random.default_rng(5)
    for vocab_size in (1, 63, 64, 65, 1000, 50_000):
        for _ in range(30 if vocab_size <= 1000 else 4):
            logits = random_logits(rng, 4, vocab_size)
            logits[0, rng.integers(vocab_size)] = rng.choice([0.0, np.nan, np.inf, -np.inf])
            params = [random_params(rng, vocab_size) for _ in range(4)]
            rows, peaks = rows_of(logits, params, rng.choice([0.0, 0.5, 1 - 2**-52], 4).tolist()), peaks_of(logits)
            rows["peaks"] = [row.ctypes.data for row in peaks] if rng.integers(2) else 0
            kept = tell(rows, logits, int(rng.integers(min(vocab_size, 20) + 1)))
            choose(core, isa, rows, vocab_size, num_threads=2)
            del kept  # alive until here
    core.uniforms([(2**64 - 1, 127, 2**32 - 1)] * 3)


def run_copies(core: Library, isa: Isa) -> None:
    """Odd lengths and places, without a byte to spare; some go past the caches."""
    copier = StreamingCopier(core, isa)
    for nbytes in (1, 240, 241, 255, 1025, 4096, 65_535, 65_600, 131_072):
        source, destination = memoryview(bytearray(range(256)) * (nbytes // 256 + 1))[:nbytes], bytearray(nbytes)
        copier.copy([(memoryview(bytearray(source)), memoryview(destination))])


def changed(batch: Batch, rng: np.random.Generator) -> Batch:
    """One entry of one array, or several, set to something near or far."""
    for _ in range(int(rng.integers(1, 3))):
        name = str(rng.choice(ARRAYS))
        value = getattr(batch, name)
        array = (value[0] if isinstance(value, tuple) else value).copy()
        at = rng.integers(array.size)
        near = int(array.flat[at]) + int(rng.integers(-2, 3))
        array.flat[at] = rng.choice([near, int(rng.integers(-(2**31), 2**31)), -1, 2**31 - 1, -(2**31)])
        fields: dict[str, Any] = {name: (array,) if isinstance(value, tuple) else array}
        batch = replace(batch, **fields)
    return batch


def run_wrong_batches(core: Library, isa: Isa) -> int:
    """Batches with wrong ids and lengths: refused or, where they still make sense, run. How many were refused."""
    config, rng = tiny_config(head_dim=16), np.random.default_rng(4)
    num_refused = 0
    with rig(config, random_tensors(config), Setting(isa, 8, 12, max_tokens=64, core=core)) as run:
        batch = starting_batch(run)
        for _ in range(400):
            try:
                run.forward(changed(batch, rng))
            except ValueError:
                num_refused += 1
    return num_refused


def starting_batch(run: Rig) -> Batch:
    rows = [run.add(ids) for ids in prompts(np.random.default_rng(0), [13, 20, 30])]
    run.step([(rows[1], 19), (rows[2], 9)])
    return run.static.batch([(rows[0], 11), (rows[1], 1), (rows[2], 21)], all_logits=True)


def overrun(core: Library) -> None:
    """A buffer that is shorter than it is said to be: the sanitizer must see it."""
    case = simple_case(Isa.AVX2, torch.float32, 5, core=core)
    run_op(case, OpKind.NORM, torch.ones(4, 64), torch.zeros(5, 64), weight=np.ones(64, np.float32))


def main() -> None:
    core = Library(Path(sys.argv[1]))
    if sys.argv[2] == "overrun":
        overrun(core)
        return
    levels = [level for level in Isa if level != Isa.NONE and core.best_isa(level) == level]
    for isa in levels:
        for dtype in (torch.float32, torch.bfloat16):
            run_models(core, isa, dtype)
            run_ops(core, isa, dtype)
        run_samples(core, isa)
        run_copies(core, isa)
    refused = run_wrong_batches(core, levels[-1])
    sys.stdout.write(f"levels {' '.join(level.name for level in levels)}; {refused} batches refused\n")


if __name__ == "__main__":
    main()
