"""The oracles against independent implementations: transformers' RoPE tables and torch's SDPA."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from pagetier.kernels import reference
from pagetier.kernels.reference import PagedRows, RopeScaling

LLAMA3 = RopeScaling("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=256)


@pytest.mark.parametrize("scaling", [RopeScaling(), RopeScaling("linear", factor=3.0), LLAMA3], ids=lambda s: s.kind)
def test_rope_equals_transformers(scaling: RopeScaling) -> None:
    parameters = {"rope_type": scaling.kind, "rope_theta": 10_000.0}
    if scaling.kind != "default":
        parameters["factor"] = scaling.factor
    if scaling.kind == "llama3":
        parameters |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, rope_parameters=parameters, max_position_embeddings=2048
    )
    positions = torch.tensor([0, 1, 17, 255, 256, 1999])  # (6,)
    x = torch.randn(6, 2, 64)  # (6, 2, 64)
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])  # (1, 6, 64) each
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)  # (1, 2, 6, 64)
    rotated = reference.rope(x, positions, reference.rope_frequencies(64, 10_000.0, scaling))
    torch.testing.assert_close(rotated, expected[0].transpose(0, 1), atol=2e-4, rtol=0)  # angles of 2,000 rad in fp32


def test_unknown_rope_is_refused() -> None:
    with pytest.raises(ValueError, match="yarn"):
        reference.rope_frequencies(8, 10_000.0, RopeScaling("yarn"))


def test_rms_norm_and_silu_mul_equal_torch() -> None:
    x, weight = torch.randn(5, 48), torch.randn(48)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), F.rms_norm(x, (48,), weight, 1e-5))
    torch.testing.assert_close(reference.silu_mul(x), F.silu(x[:, :24]) * x[:, 24:])


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_paged_attention_equals_dense(window: int | None) -> None:
    """Two rows in shuffled blocks, with everything a query may not see poisoned."""
    torch.manual_seed(0)
    num_heads, num_kv_heads, block_size, dim = 6, 2, 4, 8
    pool = torch.full((12, 3, 2, num_kv_heads, block_size, dim), torch.nan)
    tables = torch.randperm(12).view(2, 6)  # (rows, blocks)
    seq_lens, query_lens = torch.tensor([11, 21]), [3, 21]
    queries, expected = [], []
    for row, seq_len in enumerate(seq_lens.tolist()):
        k, v = torch.randn(2, num_kv_heads, seq_len, dim)  # (num_kv_heads, seq_len, dim) each
        for position in range(seq_len):
            block = tables[row, position // block_size]
            pool[block, 1, 0, :, position % block_size] = k[:, position]
            pool[block, 1, 1, :, position % block_size] = v[:, position]
        query = torch.randn(query_lens[row], num_heads, dim)  # (queries, heads, dim)
        distance = torch.arange(seq_len)[-query_lens[row] :, None] - torch.arange(seq_len)  # (queries, keys)
        mask = (distance >= 0) & (distance < (window or seq_len))
        dense = F.scaled_dot_product_attention(
            query.transpose(0, 1), k.repeat_interleave(3, 0), v.repeat_interleave(3, 0), attn_mask=mask, scale=0.3
        )
        queries.append(query)
        expected.append(dense.transpose(0, 1))
    rows = PagedRows(torch.tensor([0, 3, 24]), seq_lens, tables, window)
    out = reference.paged_attention(torch.cat(queries), pool, 1, rows, 0.3)
    torch.testing.assert_close(out, torch.cat(expected))
