"""The batched attention against the slow oracle, on batches of every kind of row at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetier.benchmarks.static_rows import StaticRows
from pagetier.engine.device_pool import DevicePool, PoolShape
from pagetier.engine.models import attention
from pagetier.engine.models.attention import AttentionPlan, PoolView, Scratch
from pagetier.kernels.reference import PagedRows, paged_attention

NUM_BLOCKS, NUM_LAYERS = 60, 2
# float32: reductions in another order. 16 bits: softmax weights and the result are rounded, scores are not.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    rows=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 5, 17])), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 2, 8, 16]),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (5, 1)]),
    window=st.sampled_from([None, 1, 3, 16, 33]),
    dtype=st.sampled_from(list(TOLERANCE)),
    tile=st.sampled_from([3, 16, 256]),
)
def test_attention_equals_the_reference(
    seed: int,
    rows: list[tuple[int, int]],
    block_size: int,
    heads: tuple[int, int],
    window: int | None,
    dtype: torch.dtype,
    tile: int,
) -> None:
    """rows: (cached tokens, new tokens). The pool starts as NaN; only cached tokens' slots are filled beforehand."""
    num_blocks = NUM_BLOCKS * 16 // block_size
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    pool = DevicePool(PoolShape(num_blocks, NUM_LAYERS, num_kv_heads, block_size, 8), dtype)
    pool.poison(range(num_blocks))
    static = StaticRows(num_blocks, block_size, rng)
    view, scratch = PoolView(pool.tensor, num_heads, window), Scratch(dtype, torch.device("cpu"))
    work = [(static.add([0] * (cached + new)), cached, new) for cached, new in rows]
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(attention, "QUERY_TILE", tile)
        if before := [(row, cached) for row, cached, _ in work if cached]:
            batch = static.batch(before)
            plan = AttentionPlan(batch, view, scratch)
            for layer in range(NUM_LAYERS):
                kv = torch.randn(batch.num_tokens, 2 * num_kv_heads, 8, generator=generator)
                plan.write(layer, kv.to(dtype))  # (num_tokens, 2 * num_kv_heads, 8)
        batch = static.batch([(row, new) for row, _, new in work])
        plan = AttentionPlan(batch, view, scratch)
        reference_rows = PagedRows(
            torch.from_numpy(batch.query_start_loc).long(),
            torch.from_numpy(batch.seq_lens).long(),
            torch.from_numpy(batch.block_tables[0]).long(),
            window,
        )
        for layer in range(NUM_LAYERS):
            qkv = torch.randn(batch.num_tokens, num_heads + 2 * num_kv_heads, 8, generator=generator).to(dtype) * 2
            plan.write(layer, qkv[:, num_heads:])
            ours = plan.attend(layer, qkv[:, :num_heads])  # (num_tokens, num_heads, 8), a strided query
            expected = paged_attention(qkv[:, :num_heads].contiguous(), pool.tensor, layer, reference_rows, 8**-0.5)
            torch.testing.assert_close(ours, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    pool.close()


def test_16_bit_scores_are_not_rounded() -> None:
    """Two scores of 60 that differ by 0.1 are one number in bf16; their weights must differ."""
    queries = torch.tensor([[[60.0, 0.1]]], dtype=torch.bfloat16)  # (1, 1, 2)
    keys = torch.tensor([[[1.0, 1.0], [0.0, 1.0]]], dtype=torch.bfloat16)  # (1, 2, 2)
    scores = attention._masked_scores(queries, keys, torch.zeros(1, 1, 2), 1.0)  # (1, 1, 2)
    assert scores.dtype == torch.float32
    assert float(scores[0, 0, 1] - scores[0, 0, 0]) == pytest.approx(0.1, abs=1e-3)
    assert queries[0, 0, 0] + queries[0, 0, 1] == queries[0, 0, 0]  # what bf16 alone would make of it
