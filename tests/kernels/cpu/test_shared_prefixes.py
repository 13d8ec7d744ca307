"""Rows that share blocks attend to them together; each answer is, to the bit, what the row gets alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from pagetier.kernels.cpu.library import Isa, OpKind
from tests.kernels.cpu.op_calls import Case, run_op
from tests.kernels.cpu.tiny_models import every_level

SHAPES = {  # query heads, kv heads, head_dim, block size
    "smollm2": (9, 3, 64, 16),
    "one query head each": (4, 4, 32, 8),
    "more query heads than a tile": (40, 1, 48, 16),
    "large blocks": (8, 2, 128, 64),
    "an odd width": (6, 3, 50, 24),
    "more query heads than a task takes": (400, 1, 16, 8),
}


def case_of(shape: str, dtype: torch.dtype, isa: Isa, rows: list[tuple[int, int]], shared: list[int]) -> Case:
    """rows: (known tokens, new tokens) each. shared: how many blocks each row has in common with the one before."""
    heads, kv_heads, dim, block_size = SHAPES[shape]
    fresh = itertools.count()
    tables: list[list[int]] = []
    for (known, new), common in zip(rows, shared, strict=True):
        table = list(tables[-1][: min(common, known // block_size)]) if tables else []
        table += [next(fresh) for _ in range(-(-(known + new) // block_size) - len(table))]
        tables.append(table)
    draw = torch.Generator().manual_seed(0)
    pool = torch.randn(next(fresh), 1, 2, kv_heads, block_size, dim, generator=draw).to(dtype)
    return Case(isa, dtype, pool, tables, rows, num_heads=heads, softmax_scale=dim**-0.5, num_threads=2)


def attend(case: Case, qkv: Tensor) -> Tensor:
    dim = case.pool.shape[-1]
    out = torch.full((case.num_tokens, case.num_heads * dim), torch.nan, dtype=case.dtype)
    return run_op(case, OpKind.ATTENTION, qkv, out)


def assert_each_as_alone(case: Case, every: int = 1) -> None:
    """every: of how many rows one is looked at."""
    dim, kv_heads = case.pool.shape[-1], case.pool.shape[3]
    draw = torch.Generator().manual_seed(1)
    qkv = torch.randn(case.num_tokens, (case.num_heads + 2 * kv_heads) * dim, generator=draw).to(case.dtype).float()
    together, start = attend(case, qkv), 0
    for index, (row, table) in enumerate(zip(case.rows, case.tables, strict=True)):
        own = slice(start, start := start + row[1])
        if index % every:
            continue
        alone = attend(replace(case, tables=[table], rows=[row]), qkv[own])
        assert torch.equal(together[own], alone), f"row {index} of {case.rows}"


@every_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_rows_with_common_blocks(seed: int, shape: str, dtype: torch.dtype, isa: Isa) -> None:
    draw = np.random.default_rng(seed)
    num_rows = int(draw.integers(2, 8))
    news = draw.choice([1, 1, 1, 5, 24, 70] if seed % 2 else [1, 24, 24, 41], num_rows)
    rows = [(int(known), int(new)) for known, new in zip(draw.integers(300, 1_700, num_rows), news, strict=True)]
    most = 1_700 // SHAPES[shape][3]
    shared = [int(draw.integers(0, most)) if draw.random() < 0.4 else most for _ in rows]
    assert_each_as_alone(case_of(shape, dtype, isa, rows, shared))


CROWDS = {
    "tails of one document": [(1_076, 24)] * 5,
    "choices of one prompt": [(1_030 + 7 * index, 1) for index in range(20)],
    "both kinds": [(1_100, 1)] * 3 + [(1_100, 9)] * 2 + [(1_100, 1)] * 2,
    "a prefix of exactly two splits": [(1_024, 2)] * 3 + [(1_023, 2)] * 2,
    "a prefix of exactly one": [(512, 1)] * 3 + [(511, 1)] * 2,
    "more rows than a task takes": [(600, 1)] * 130,
}


@every_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("crowd", CROWDS)
def test_crowds_over_one_prefix(crowd: str, dtype: torch.dtype, isa: Isa) -> None:
    rows = CROWDS[crowd]
    assert_each_as_alone(case_of("smollm2", dtype, isa, rows, [10_000] * len(rows)))


@every_level
def test_with_softcap(isa: Isa) -> None:
    case = case_of("smollm2", torch.bfloat16, isa, [(1_100, 1)] * 3 + [(1_100, 20)] * 3, [10_000] * 6)
    assert_each_as_alone(replace(case, softcap=2.0))


@every_level
@pytest.mark.parametrize("window", [1, 700])
def test_with_a_window(window: int, isa: Isa) -> None:
    case = case_of("smollm2", torch.bfloat16, isa, [(1_200, 1)] * 3 + [(1_300, 20)] * 2, [10_000] * 5)
    assert_each_as_alone(replace(case, window=window))


@every_level
def test_more_partial_results_than_have_room(isa: Isa) -> None:
    """48 rows of 18 splits and 40 heads are 34,560 results of 256 bytes, and 8 MiB hold 32,768. What they share is
    carried then, whatever is beside them; so is what they share when nothing is left for them."""
    crowd = [(9_000, 1)] * 48
    assert_each_as_alone(case_of("more query heads than a tile", torch.bfloat16, isa, crowd, [10_000] * 48), every=7)


@every_level
def test_a_prefix_keeps_to_itself_what_it_cannot_see(isa: Isa) -> None:
    """Not a number in V of a later split than a row's own is no part of the row, whichever rows are beside it."""
    case = case_of("smollm2", torch.bfloat16, isa, [(490, 40)], [0])
    block = case.tables[0][512 // 16]
    case.pool[block, 0, 1, :, 0] = torch.nan
    qkv = torch.randn(40, (9 + 6) * 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).float()
    found = attend(case, qkv).isnan().any(1)
    assert found.tolist() == [490 + index >= 512 for index in range(40)]
