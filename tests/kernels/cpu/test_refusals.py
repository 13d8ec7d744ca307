"""What pt_step refuses: ids, lengths and indices that do not fit are named and nothing is computed or written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetier.engine.batch import Batch
from pagetier.kernels.cpu.library import Isa, OpKind
from tests.kernels.cpu.op_calls import Case, packed_gated, run_op, simple_case
from tests.kernels.cpu.tiny_models import (
    Rig,
    Setting,
    every_dtype,
    every_level,
    level_name,
    levels,
    prompts,
    random_tensors,
    rig,
    tiny_config,
)

INT32 = (-(2**31), 2**31 - 1)
NUM_BLOCKS, BLOCK_SIZE = 12, 8
Change = Callable[[Batch, int, int], tuple[str, Any, str]]


def changed(array: np.ndarray, index: int, value: int) -> np.ndarray:
    array = array.copy()
    array.reshape(-1)[index % array.size] = value
    return array


def used_entries(batch: Batch) -> list[int]:
    """Indices into the flat block table that a row's context needs."""
    width = batch.block_tables[0].shape[1]
    return [
        row * width + i for row, seq_len in enumerate(batch.seq_lens.tolist()) for i in range(-(-seq_len // BLOCK_SIZE))
    ]


def outside(end: int) -> st.SearchStrategy[int]:
    edges = st.sampled_from([-1, end, *INT32])
    return st.one_of(edges, st.integers(INT32[0], -1), st.integers(end, INT32[1]))


def starting_batch(run: Rig) -> Batch:
    """A chunk that ends inside a block, a decode row, and a row of several blocks; the context is computed."""
    rows = [run.add(ids) for ids in prompts(np.random.default_rng(0), [13, 20, 30])]
    run.step([(rows[1], 19), (rows[2], 9)])
    return run.static.batch([(rows[0], 11), (rows[1], 1), (rows[2], 21)], all_logits=True)


@st.composite
def wrong(draw: st.DrawFn, batch: Batch) -> tuple[Batch, str]:
    """The batch with one value that cannot be right, and the words it is refused with."""
    name = draw(st.sampled_from(["block", "slot", "position", "length", "start", "token", "sample"]))
    at = draw(st.integers(0, 10_000))
    if name == "block":
        entries = used_entries(batch)
        table = changed(batch.block_tables[0], entries[at % len(entries)], draw(outside(NUM_BLOCKS)))
        return replace(batch, block_tables=(table,)), "a block id outside the pool|a slot that is not"
    if name == "slot":
        slots = batch.slot_mapping[0]
        value = draw(st.integers(-(2**63), 2**63 - 1).filter(lambda value: value != slots[at % len(slots)]))
        return replace(batch, slot_mapping=(changed(slots, at, value),)), "a slot that is not the one its block table"
    if name == "position":
        value = draw(st.integers(*INT32).filter(lambda value: value != batch.positions[at % batch.num_tokens]))
        return replace(batch, positions=changed(batch.positions, at, value)), "positions and sequence lengths do not"
    if name == "length":
        value = draw(st.integers(*INT32).filter(lambda value: value != batch.seq_lens[at % batch.num_rows]))
        words = "do not agree|a table that is too short|a block id|a slot"
        return replace(batch, seq_lens=changed(batch.seq_lens, at, value)), words
    if name == "start":
        starts = batch.query_start_loc
        value = draw(st.integers(*INT32).filter(lambda value: value != starts[at % len(starts)]))
        return replace(batch, query_start_loc=changed(starts, at, value)), "row starts, positions"
    if name == "token":
        return replace(batch, token_ids=changed(batch.token_ids, at, draw(outside(131)))), "outside the vocabulary"
    return replace(
        batch, logits_indices=changed(batch.logits_indices, at, draw(outside(batch.num_tokens)))
    ), "logits index"


@pytest.mark.parametrize("isa", levels()[-1:], ids=level_name)
def test_a_value_that_cannot_be_right_is_named_and_nothing_is_written(isa: Isa) -> None:
    config = tiny_config()
    with rig(config, random_tensors(config), Setting(isa, BLOCK_SIZE, NUM_BLOCKS, num_threads=2, max_tokens=64)) as run:
        batch = starting_batch(run)
        before = run.pool.tensor.view(torch.int32).clone()

        @settings(max_examples=400, deadline=None)
        @given(wrong(batch))
        def refused(example: tuple[Batch, str]) -> None:
            changed_batch, words = example
            with pytest.raises(ValueError, match=words):
                run.forward(changed_batch)
            assert torch.equal(run.pool.tensor.view(torch.int32), before)

        refused()
        assert run.forward(batch).isfinite().all()  # and the batch itself was fine
        assert not torch.equal(run.pool.tensor.view(torch.int32), before)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"positions": np.zeros(3, np.int32)}, "positions: 3 values"),
        ({"positions": np.zeros(33, np.int64)}, "positions: 33 values of int64, not 33 of int32"),
        ({"slot_mapping": (np.zeros(66, np.int64)[::2],)}, "slot_mapping: .* in a row"),
        ({"query_start_loc": np.zeros(3, np.int32)}, "query_start_loc: 3 values"),
        ({"block_tables": (np.zeros((2, 4), np.int32),)}, "block_tables: 8 values of int32, not 12"),
        ({"block_tables": (np.zeros((3, 1), np.int32),)}, "a table that is too short"),
        ({"block_tables": (np.zeros((3, 0), np.int32),)}, "a table that is too short"),
        ({"logits_indices": np.zeros(65, np.int32)}, "more tokens, rows or samples"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    config = tiny_config()
    with rig(config, random_tensors(config), Setting(levels()[-1], BLOCK_SIZE, NUM_BLOCKS, max_tokens=64)) as run:
        batch = starting_batch(run)
        with pytest.raises(ValueError, match=words):
            run.forward(replace(batch, **changes))


def test_more_tokens_than_the_buffers_hold_are_refused() -> None:
    config = tiny_config()
    with rig(config, random_tensors(config), Setting(levels()[-1], max_tokens=8)) as run:
        row = run.add([1] * 9)
        with pytest.raises(ValueError, match="more tokens, rows or samples than the buffers hold"):
            run.forward(run.static.batch([(row, 9)]))


def test_an_id_beyond_32_bits_does_not_wrap_into_the_vocabulary() -> None:
    config = tiny_config()
    with rig(config, random_tensors(config), Setting(levels()[-1])) as run:
        batch = run.static.batch([(run.add([1, 2]), 2)])
        for wrapping in (2**32 + 1, -(2**32) + 1):
            with pytest.raises(ValueError, match="outside the vocabulary"):
                run.model.forward(torch.tensor([1, wrapping]), batch, run.pool.tensor)


def copying(copies: list[tuple[int, int, int]]) -> torch.Tensor:
    """(6, 2, 2, 1, 8, 4): a pool after a step that embeds one token and copies. Raises ValueError."""
    pool = torch.arange(6 * 2 * 2 * 8 * 4, dtype=torch.float32).view(6, 2, 2, 1, 8, 4)
    case = Case(levels()[-1], torch.float32, pool, [[0]], [(0, 1)], copies=copies)
    run_op(case, OpKind.EMBED, None, torch.zeros(1, 4), weight=np.zeros((100, 4), np.float32))
    return pool


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 8)), max_size=6))
def test_copies_are_made_one_after_the_other(copies: list[tuple[int, int, int]]) -> None:
    expected = copying([])
    for source, destination, num_tokens in copies:
        expected[destination, :, :, :, :num_tokens] = expected[source, :, :, :, :num_tokens].clone()
    assert torch.equal(copying(copies), expected)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("value", [-1, 9, *INT32])
def test_copies_outside_the_pool_are_refused(place: int, value: int) -> None:
    copy = [1, 2, 3]
    copy[place] = value
    with pytest.raises(ValueError, match="a copy outside the pool"):
        copying([(2, 3, 4), (copy[0], copy[1], copy[2])])


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "dtype", "in_", "out", "fields"),
    [
        (OpKind.EMBED, F32, None, (4, F32), {"n": 5}),
        (OpKind.EMBED, BF16, None, (4, BF16), {}),
        (OpKind.NORM, F32, (3, F32), (4, F32), {}),
        (OpKind.NORM, BF16, (4, BF16), (4, BF16), {}),
        (OpKind.GEMM, F32, (4, F32), (4, F32), {"k": 5}),
        (OpKind.GEMM, BF16, (5, BF16), (4, F32), {"k": 5}),  # an odd width is read as pairs
        (OpKind.GEMM, BF16, (4, F32), (4, F32), {"k": 4}),
        (OpKind.GEMM, F32, (4, F32), (4, BF16), {"k": 4, "accumulate": 1}),
        (OpKind.GEMM, F32, (4, F32), (4, F32), {"k": 4, "gated": 1, "accumulate": 1}),
        (OpKind.GEMM, F32, (4, F32), (4, F32), {"k": 4, "gated": 1, "n": 5}),
        (OpKind.GEMM, F32, (4, F32), (4, BF16), {"k": 4, "peaks": 64}),
        (OpKind.HEAD_NORM, F32, (11, F32), (11, F32), {"n": 4}),
        (OpKind.ROPE_KV, BF16, (12, BF16), (12, BF16), {"n": 4}),
        (OpKind.ATTENTION, F32, (11, F32), (4, F32), {}),
        (OpKind.ATTENTION, BF16, (12, F32), (4, F32), {}),
        (OpKind.SILU_MUL, F32, (7, F32), (4, F32), {}),
        (OpKind.GATHER, F32, (4, F32), (4, BF16), {}),
        (OpKind.NORM, F32, (4, F32), (4, F32), {"layer": 1}),
        (OpKind.NORM, F32, (4, F32), (4, F32), {"n": -1}),
        (8, F32, (4, F32), (4, F32), {}),
    ],
)
def test_ops_that_do_not_fit_their_buffers_are_refused(
    kind: OpKind, dtype: torch.dtype, in_: tuple[int, torch.dtype] | None, out: tuple[int, torch.dtype], fields: Any
) -> None:
    """One head of 4 values, one kv head: qkv rows are 12 wide."""
    case = Case(levels()[-1], dtype, torch.zeros(1, 1, 2, 1, 8, 4, dtype=dtype), [[0]], [(0, 2)], samples=[0, 1])
    source = None if in_ is None else torch.zeros(2, in_[0], dtype=in_[1])
    with pytest.raises(ValueError, match="an op that is unknown or does not fit its buffers"):
        run_op(case, kind, source, torch.zeros(2, out[0], dtype=out[1]), weight=np.zeros(2048, np.float32), **fields)


@every_level
@every_dtype
def test_a_gated_gemm_is_refused_where_the_level_has_none(dtype: torch.dtype, isa: Isa) -> None:
    case = simple_case(isa, dtype, 2)
    weight = np.zeros(2048, np.float32)
    if packed_gated(case, *torch.zeros(2, 4, 4, dtype=dtype)) is not None:
        run_op(case, OpKind.GEMM, torch.zeros(2, 4, dtype=dtype), torch.zeros(2, 4), k=4, gated=1, weight=weight)
        return
    with pytest.raises(ValueError, match="does not fit"):
        run_op(case, OpKind.GEMM, torch.zeros(2, 4, dtype=dtype), torch.zeros(2, 4), k=4, gated=1, weight=weight)


@every_level
@every_dtype
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e38])
def test_slots_never_written_do_not_matter(poison: float, dtype: torch.dtype, isa: Isa) -> None:
    """Whatever they hold: logits are the same bits as over zeros."""
    config = tiny_config(sliding_window=40, head_dim=80)
    logits = []
    for fill in (0.0, poison):
        rng = np.random.default_rng(3)
        with rig(config, random_tensors(config, dtype), Setting(isa, 8, 40, num_threads=2, rng=rng)) as run:
            run.pool.tensor[:] = fill
            for ids in prompts(rng, [1, 70, 90, 13]):
                run.add(ids)
            run.run_randomly(rng)
            logits.append(torch.cat(run.logits()))
    assert torch.equal(logits[0], logits[1]) and logits[0].isfinite().all()


@every_level
@every_dtype
@pytest.mark.parametrize("plane", [0, 1], ids=["k", "v"])
def test_a_poisoned_slot_that_is_read_shows(plane: int, dtype: torch.dtype, isa: Isa) -> None:
    """`--paranoid` poisons fresh blocks: a read of one must not be swallowed by a maximum or an exponential."""
    config = tiny_config()
    with rig(config, random_tensors(config, dtype), Setting(isa)) as run:
        row = run.add(list(range(40)))
        run.step([(row, 39)])
        run.pool.tensor[row.blocks[1], :, plane, :, 3] = torch.nan
        assert run.forward(run.static.batch([(row, 1)])).isnan().any()
