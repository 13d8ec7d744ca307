"""The slow, obvious versions of the kernels, in torch: what every other implementation is tested against.

Everything is computed in float32 and returned in the dtype of the first argument. Knows no engine and no batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """kind: default, linear or llama3; the other fields are Hugging Face's `rope_scaling`."""

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019, eq. 4). x: (..., dim); weight: (dim,)."""
    wide = x.float()  # (..., dim)
    mean_square = (wide * wide).mean(dim=-1, keepdim=True)  # (..., 1)
    return (wide / torch.sqrt(mean_square + eps) * weight.float()).to(x.dtype)  # (..., dim)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Radians per token of each of the head_dim / 2 rotations: (head_dim / 2,) float32.

    llama3 follows `_compute_llama3_parameters` of huggingface/transformers, src/transformers/modeling_rope_utils.py.
    Raises ValueError for an unknown kind.
    """
    frequencies = []
    for i in range(head_dim // 2):
        frequency = theta ** (-2 * i / head_dim)
        if scaling.kind == "linear":
            frequency /= scaling.factor
        elif scaling.kind == "llama3":
            wavelength = 2 * math.pi / frequency
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            if wavelength > scaling.original_max_position / low:
                frequency /= scaling.factor
            elif wavelength >= scaling.original_max_position / high:
                smooth = (scaling.original_max_position / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        elif scaling.kind != "default":
            raise ValueError(f"rope kind {scaling.kind!r}; known: default, linear, llama3")
        frequencies.append(frequency)
    return torch.tensor(frequencies, dtype=torch.float32)  # (head_dim / 2,)


def rope(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Rotates the pairs (x[i], x[i + head_dim / 2]) by positions * frequencies[i] (Su et al. 2021; halves as GPT-NeoX).

    x: (num_tokens, num_heads, head_dim); positions: (num_tokens,); frequencies: (head_dim / 2,).
    """
    angles = positions.float()[:, None, None] * frequencies  # (num_tokens, 1, head_dim / 2)
    first, second = x.float().chunk(2, dim=-1)  # 2 x (num_tokens, num_heads, head_dim / 2)
    cos, sin = angles.cos(), angles.sin()  # (num_tokens, 1, head_dim / 2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up: (..., 2 * dim), gate first; returns (..., dim)."""
    gate, up = gate_up.float().chunk(2, dim=-1)  # 2 x (..., dim)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)  # (..., dim)


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where each row's queries and keys are. All tensors int64 on the pool's device.

    query_start_loc: (num_rows + 1,); seq_lens: (num_rows,) including the queries, which are the last tokens;
    block_tables: (num_rows, max_blocks). window: a query sees itself and the window - 1 tokens before it; None: all.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    window: int | None = None


def paged_attention(query: Tensor, pool: Tensor, layer: int, rows: PagedRows, scale: float) -> Tensor:
    """Causal attention of each query over its row's blocks, one query and one head at a time.

    query: (num_tokens, num_heads, head_dim); pool: (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim), any
    strides. Query head h reads kv head h // (num_heads / num_kv_heads). Reads only slots a query may see.
    Returns (num_tokens, num_heads, head_dim).
    """
    num_heads, num_kv_heads, block_size = query.shape[1], pool.shape[3], pool.shape[4]
    out = torch.empty_like(query)  # (num_tokens, num_heads, head_dim)
    for row, seq_len in enumerate(rows.seq_lens.tolist()):
        start, end = int(rows.query_start_loc[row]), int(rows.query_start_loc[row + 1])
        for token in range(start, end):
            position = seq_len - (end - token)
            first = 0 if rows.window is None else max(0, position - rows.window + 1)
            seen = torch.arange(first, position + 1, device=pool.device)  # (num_keys,)
            blocks = rows.block_tables[row, seen // block_size]  # (num_keys,)
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                keys = pool[blocks, layer, 0, kv_head, seen % block_size].float()  # (num_keys, head_dim)
                values = pool[blocks, layer, 1, kv_head, seen % block_size].float()  # (num_keys, head_dim)
                weights = torch.softmax(keys @ query[token, head].float() * scale, dim=0)  # (num_keys,)
                out[token, head] = (weights @ values).to(query.dtype)  # (head_dim,)
    return out
