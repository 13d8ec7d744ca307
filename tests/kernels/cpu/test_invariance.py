"""A row's logits are the same bits whatever is beside it: batch, chunks, block size, threads, cached or computed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagetier.engine.weights.loader import load_checkpoint
from pagetier.kernels.cpu.library import Isa
from tests.engine.server.real_server import model_path
from tests.kernels.cpu.tiny_models import (
    Rig,
    Setting,
    every_dtype,
    every_level,
    prompts,
    random_tensors,
    rig,
    tiny_config,
)

PARTIAL_BYTES = 8 << 20  # PT_PARTIAL_BYTES of kernels/cpu/attention.h

MODELS: dict[str, dict[str, Any]] = {
    "smollm2_like": {"hidden_size": 192, "intermediate_size": 512, "num_heads": 3, "num_kv_heads": 1, "head_dim": 64},
    "odd_widths": {
        "vocab_size": 257,
        "hidden_size": 54,
        "intermediate_size": 77,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 50,
        "qkv_bias": True,
    },
    "qwen3_window": {"num_heads": 7, "num_kv_heads": 1, "head_dim": 96, "qk_norm": True, "sliding_window": 70},
}
every_model = pytest.mark.parametrize("name", MODELS)
NUM_ROWS = 64
LENGTHS = np.random.default_rng(7).integers(1, 60, NUM_ROWS - 1).tolist() + [1100]  # the last spans three splits


@functools.cache
def model(name: str, dtype: torch.dtype) -> tuple[Any, dict[str, Tensor]]:
    config = tiny_config(**MODELS[name])
    return config, random_tensors(config, dtype)


def sequences(name: str) -> list[list[int]]:
    return prompts(np.random.default_rng(11), LENGTHS, model(name, torch.float32)[0].vocab_size)


def run(name: str, dtype: torch.dtype, setting: Setting) -> AbstractContextManager[Rig]:
    config, tensors = model(name, dtype)
    return rig(config, tensors, setting)


@functools.cache
def alone(name: str, isa: Isa, dtype: torch.dtype) -> list[Tensor]:
    """Per row (num_tokens, vocab_size): each row by itself, one token at a time but for the longest, one thread."""
    with run(name, dtype, setting_of(isa, 16, max_tokens=1100)) as at:
        for ids in sequences(name):
            row = at.add(ids)
            size = 1 if len(ids) < 60 else len(ids)
            while row.num_computed < len(ids):
                at.step([(row, size)])
        return at.logits()


def setting_of(isa: Isa, block_size: int, **more: Any) -> Setting:
    return Setting(isa, block_size, sum(-(-n // block_size) for n in LENGTHS) + 2, **more)


def assert_same_bits(at: Rig, expected: Sequence[Tensor]) -> None:
    for index, (ours, theirs) in enumerate(zip(at.logits(), expected, strict=True)):
        differing = (ours != theirs).any(dim=1).nonzero().flatten().tolist()
        assert torch.equal(ours, theirs), f"row {index} differs at tokens {differing[:10]}"


@every_level
@every_dtype
@every_model
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_batch_chunks_blocks_and_threads_do_not_matter(name: str, dtype: torch.dtype, isa: Isa, seed: int) -> None:
    """Random mixed batches of up to 64 rows; block sizes 8 to 64, one to four threads."""
    rng = np.random.default_rng(seed)
    block_size, num_threads = (8, 64, 32, 16)[seed % 4], (4, 3, 2, 1)[seed % 4]
    setting = setting_of(isa, block_size, num_threads=num_threads, max_tokens=4096, rng=rng)
    with run(name, dtype, setting) as at:
        for ids in sequences(name):
            at.add(ids)
        at.run_randomly(rng, sizes=(1, 5, 48, 200, 1 << 30))
        assert_same_bits(at, alone(name, isa, dtype))


@every_level
@every_dtype
@every_model
def test_every_batch_size_decodes_alike(name: str, dtype: torch.dtype, isa: Isa) -> None:
    """The last token of 1 to 64 rows at once, over KV that a prefill in larger chunks wrote."""
    expected = torch.stack([logits[-1] for logits in alone(name, isa, dtype)])  # (num_rows, vocab_size)
    with run(name, dtype, setting_of(isa, 16, num_threads=2, max_tokens=4096)) as at:
        rows = [at.add(ids) for ids in sequences(name)]
        at.step([(row, len(row.token_ids)) for row in rows])
        for batch_size in (*range(1, 20), *range(20, NUM_ROWS, 11), NUM_ROWS):
            chosen = list(range(NUM_ROWS - batch_size, NUM_ROWS))  # the longest row is in all of them
            for i in chosen:
                rows[i].num_computed -= 1
            logits = at.forward(at.static.batch([(rows[i], 1) for i in chosen]))
            assert torch.equal(logits, expected[chosen]), f"batch size {batch_size}"


@every_level
@every_dtype
def test_long_contexts_are_cut_into_splits_without_a_trace(dtype: torch.dtype, isa: Isa) -> None:
    """Rows of one new token run as splits while there is room for their partial results, else whole; chunks always run
    whole. 64 heads of 256 values and 5 splits: the room is for 24 rows."""
    config = tiny_config(num_layers=1, hidden_size=32, num_heads=64, num_kv_heads=2, head_dim=256, vocab_size=33)
    num_splits, partial_bytes = 5, 2 * 4 + 256 * 4
    assert 30 * num_splits * 64 * partial_bytes > PARTIAL_BYTES > 3 * num_splits * 64 * partial_bytes
    with rig(config, random_tensors(config, dtype), Setting(isa, 64, 42, num_threads=2)) as at:
        at.pool.tensor[:] = torch.randn(at.pool.tensor.shape, generator=torch.Generator().manual_seed(5)).to(dtype)

        def logits(first: int, num_new: int, num_rows: int) -> Tensor:
            """(num_rows, vocab_size) of token first + num_new - 1, in rows that all read and write the same blocks."""
            rows = [at.static.add([7] * (first + num_new)) for _ in range(num_rows)]
            for row in rows:
                row.blocks, row.num_computed = list(range(41))[::-1], first
            return at.forward(at.static.batch([(row, num_new) for row in rows]))

        expected = logits(2498, 2, 1)
        for num_rows in (1, 3, 30):
            assert torch.equal(logits(2499, 1, num_rows), expected.expand(num_rows, -1)), f"{num_rows} rows"


@pytest.mark.slow
@every_level
@every_dtype
def test_the_default_model_is_invariant_too(dtype: torch.dtype, isa: Isa) -> None:
    """SmolLM2's own widths: 64 rows together, in random mixed batches on two threads, against each alone on one."""
    checkpoint = load_checkpoint(model_path(), str(dtype).removeprefix("torch."))
    rng = np.random.default_rng(1)
    ids = prompts(rng, [*rng.integers(1, 12, 63).tolist(), 90], checkpoint.config.vocab_size)
    expected: list[Tensor] = []
    for num_threads, shuffled in ((1, None), (2, rng)):
        setting = Setting(isa, 16, 80, num_threads=num_threads, max_tokens=512, rng=shuffled)
        with rig(checkpoint.config, checkpoint.tensors, setting) as at:
            for row_ids in ids:
                row = at.add(row_ids)
                if shuffled is None:
                    at.step([(row, len(row_ids))])
            if shuffled is None:
                expected = at.logits()
            else:
                at.run_randomly(rng, sizes=(1, 3, 40))
                assert_same_bits(at, expected)
