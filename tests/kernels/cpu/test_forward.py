"""The compiled core against its oracle, models/llama.py, at every dispatch level of the machine: any architecture,
shape, chunking, mixture of rows and order of blocks, over a pool full of NaN."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from pagetier.engine.models.config import ModelConfig, RopeConfig
from pagetier.kernels.cpu.library import Isa
from tests.engine.model_cases import CASES, BuiltCase, build
from tests.kernels.cpu.tiny_models import SHAPES, Setting, every_level, prompts, random_tensors, rig, tiny_config

LENGTHS = (1, 70, 33, 16, 45, 2)

every_shape = pytest.mark.parametrize("shape", SHAPES)


def prompts_of(config: ModelConfig, seed: int) -> list[list[int]]:
    return prompts(np.random.default_rng(seed), LENGTHS, config.vocab_size)


@functools.cache
def expected(shape: str, dtype: torch.dtype) -> list[Tensor]:
    """Per row (num_tokens, vocab_size): the float32 oracle with weights rounded to `dtype`, each row whole."""
    config = tiny_config(**SHAPES[shape][0])
    return oracle(config, random_tensors(config, dtype), torch.float32)


def oracle(config: ModelConfig, tensors: dict[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
    with rig(config, {name: tensor.to(dtype) for name, tensor in tensors.items()}, Setting()) as run:
        for ids in prompts_of(config, 0):
            run.add(ids)
        run.step([(row, len(row.token_ids)) for row in run.rows])
        return run.logits()


def compiled(shape: str, isa: Isa, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """As `expected`, by the core: two threads, random mixed batches over shuffled blocks."""
    changes, block_size = SHAPES[shape]
    config, rng = tiny_config(**changes), np.random.default_rng(seed)
    setting = Setting(isa, block_size, num_blocks=sum(-(-n // block_size) for n in LENGTHS) + 3, num_threads=2, rng=rng)
    with rig(config, random_tensors(config, dtype), setting) as run:
        for ids in prompts_of(config, 0):
            run.add(ids)
        run.run_randomly(rng)
        return run.logits()


@every_level
@every_shape
def test_float32_logits_equal_the_oracle(shape: str, isa: Isa) -> None:
    """The order of sums differs, nothing else: measured at most 4e-5 on logits with a spread of 1 to 2."""
    for ours, theirs in zip(compiled(shape, isa, torch.float32, 1), expected(shape, torch.float32), strict=True):
        assert ours.dtype == torch.float32
        assert theirs.std() > 0.7  # wide enough for the tolerance to mean something
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def spread_error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    difference = torch.cat(ours) - torch.cat(theirs)
    return float(difference.square().mean().sqrt() / torch.cat(theirs).std())


@every_level
@every_shape
def test_bf16_logits_are_no_further_off_than_torchs(shape: str, isa: Isa) -> None:
    """Weights, K, V and what enters a GEMM are bf16 as in torch, but the residual stream and qkv stay float32, so that
    the error against float32 must be the smaller one: measured 0.6 to 0.8 of torch's. A wrong head, position or mask is
    off by the logits' own spread, 1."""
    config = tiny_config(**SHAPES[shape][0])
    theirs = expected(shape, torch.bfloat16)
    error = spread_error(compiled(shape, isa, torch.bfloat16, 2), theirs)
    torchs = spread_error(oracle(config, random_tensors(config, torch.bfloat16), torch.bfloat16), theirs)
    assert error < torchs < 0.02
    assert error > 1e-4, "bf16 that rounds nothing"


@functools.cache
def built(index: int) -> BuiltCase:
    return build(CASES[index])


@every_level
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: CASES[index].name)
def test_logits_equal_transformers(index: int, isa: Isa) -> None:
    """Every architecture against transformers itself."""
    case, rng = built(index), np.random.default_rng(index)
    with rig(case.config, case.tensors, Setting(isa, 8, 40, num_threads=2, rng=rng)) as run:
        for ids in prompts(rng, LENGTHS):
            run.add(ids)
        run.run_randomly(rng)
        for row, ours in zip(run.rows, run.logits(), strict=True):
            torch.testing.assert_close(ours, case.logits(row.token_ids), atol=5e-4, rtol=0)


@every_level
def test_logits_come_only_where_wanted(isa: Isa) -> None:
    config = tiny_config()
    first, second = prompts(np.random.default_rng(1), [20, 9])
    with rig(config, random_tensors(config), Setting(isa)) as run:
        rows = run.add(first), run.add(second)
        run.step([(rows[1], 9)])
        rows[1].num_computed = 0
        assert run.forward(run.static.batch([(rows[0], 11), (rows[1], 8)])).shape == (0, config.vocab_size)
        logits = run.forward(run.static.batch([(rows[0], 4), (rows[1], 1)]))  # row 0 is not at its end
        assert torch.equal(logits, run.parts[1][0][-1:])


@every_level
def test_several_samples_may_be_taken_of_one_token(isa: Isa) -> None:
    """More samples than tokens, and out of order, as long as the buffers hold them."""
    config = tiny_config()
    with rig(config, random_tensors(config), Setting(isa, max_tokens=8)) as run:
        row = run.add([5, 6])
        run.step([(row, 2)])
        row.num_computed = 0
        batch = run.static.batch([(row, 2)])
        batch = replace(batch, logits_indices=np.array([1, 0, 1, 1], np.int32))
        assert torch.equal(run.forward(batch), run.parts[0][0][[1, 0, 1, 1]])


@every_level
@pytest.mark.parametrize("position", [100, 8_000, 100_000])
def test_rotation_at_far_positions(position: int, isa: Isa) -> None:
    """Angles of many turns: one query over one far block, through a table that names a single block again and again."""
    config = tiny_config(num_layers=1, rope=RopeConfig(100_000.0), sliding_window=16)
    results = []
    for level in (Isa.NONE, isa):
        with rig(config, random_tensors(config), Setting(level, 16, 2)) as run:
            row = run.add([*[7] * position, 8, 9, 10])
            row.num_computed, row.blocks = position, [0] * (position // 16) + [1]
            run.pool.tensor[:] = 0
            run.step([(row, 3)])
            results.append(run.logits()[0])
    torch.testing.assert_close(results[1], results[0], atol=2e-3, rtol=0)  # an angle of 1e5 rad has 0.004 rad steps
