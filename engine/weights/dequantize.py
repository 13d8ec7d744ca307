"""GGML blocks -> floats. The types of the default model run as torch operations on chunks; the rest go through gguf.

Formulas: ggml/src/ggml-quants.c, `dequantize_row_*`; results equal `gguf.quants.dequantize` bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pagetier.kvstore.errors import ConfigError

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK_VALUES = 32
# Below torch's grain of 32,768 values an operation stays on the calling thread. Beside a busy process the 1,600
# barriers of whole-tensor operations made a load of the default model 15 s instead of 0.4 s (two cores).
CHUNK_BLOCKS = 1023

Fill = Callable[[torch.Tensor, torch.Tensor], None]


def dequantize(raw: torch.Tensor, ggml_type: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor of `shape` and `dtype` from one tensor's stored bytes.

    raw: (nbytes,) uint8, as stored; not kept. shape: (rows, cols), outermost first. Arithmetic is float32, rounded once
    to `dtype`. Raises ConfigError for a type that nothing here can read (the caller names the tensor).
    """
    if ggml_type in FLOAT_TYPES:
        return raw.view(FLOAT_TYPES[ggml_type]).reshape(shape).to(dtype, copy=True)
    if ggml_type == "Q4_1":
        return _by_chunks(raw.reshape(-1, 20), _q4_1, dtype).reshape(shape)
    if ggml_type == "Q8_0":
        return _by_chunks(raw.reshape(-1, 34), _q8_0, dtype).reshape(shape)
    return _through_gguf(raw, ggml_type).reshape(shape).to(dtype)


def _by_chunks(blocks: torch.Tensor, fill: Fill, dtype: torch.dtype) -> torch.Tensor:
    """blocks: (num_blocks, bytes per block) u8 -> (num_blocks, 32) `dtype`."""
    out = torch.empty((len(blocks), BLOCK_VALUES), dtype=dtype)
    scratch = torch.empty((CHUNK_BLOCKS, BLOCK_VALUES), dtype=torch.float32)  # stays in the L2 cache
    for start in range(0, len(blocks), CHUNK_BLOCKS):
        chunk = blocks[start : start + CHUNK_BLOCKS]
        values = scratch[: len(chunk)]
        fill(chunk, values)
        out[start : start + CHUNK_BLOCKS] = values
    return out


def _q4_1(blocks: torch.Tensor, values: torch.Tensor) -> None:
    """blocks: (num_blocks, 20) u8: scale f16, minimum f16, 16 bytes of nibbles, the low ones first."""
    scale = blocks[:, 0:2].view(torch.float16).float()  # (num_blocks, 1)
    minimum = blocks[:, 2:4].view(torch.float16).float()  # (num_blocks, 1)
    nibbles = blocks[:, 4:]
    values[:, :16] = nibbles & 0x0F
    values[:, 16:] = nibbles >> 4
    values.mul_(scale).add_(minimum)  # two roundings, as gguf does; not fused


def _q8_0(blocks: torch.Tensor, values: torch.Tensor) -> None:
    """blocks: (num_blocks, 34) u8: scale f16, 32 signed bytes."""
    values.copy_(blocks[:, 2:].view(torch.int8))
    values.mul_(blocks[:, 0:2].view(torch.float16).float())


def _through_gguf(raw: torch.Tensor, ggml_type: str) -> torch.Tensor:
    import gguf  # here: 0.2 s that the default model does not need

    try:
        values = gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[ggml_type])
    except (KeyError, NotImplementedError):
        raise ConfigError(f"type {ggml_type} cannot be dequantised") from None
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
