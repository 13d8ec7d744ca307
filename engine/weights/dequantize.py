"""GGML blocks -> floats. The types of the default model run as whole-tensor torch operations; the rest go through gguf.

Formulas: ggml/src/ggml-quants.c, `dequantize_row_*`; results equal `gguf.quants.dequantize` bit for bit.
"""

from __future__ import annotations

import numpy as np
import torch

from pagetier.kvstore.errors import ConfigError

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dequantize(raw: torch.Tensor, ggml_type: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor of `shape` and `dtype` from one tensor's stored bytes.

    raw: (nbytes,) uint8, as stored; not kept. shape: (rows, cols), outermost first. Arithmetic is float32, rounded once
    to `dtype`. Raises ConfigError for a type that nothing here can read (the caller names the tensor).
    """
    if ggml_type in FLOAT_TYPES:
        return raw.view(FLOAT_TYPES[ggml_type]).reshape(shape).to(dtype, copy=True)
    if ggml_type == "Q4_1":
        return _q4_1(raw).to(dtype).reshape(shape)
    if ggml_type == "Q8_0":
        return _q8_0(raw).to(dtype).reshape(shape)
    return _through_gguf(raw, ggml_type).reshape(shape).to(dtype)


def _q4_1(raw: torch.Tensor) -> torch.Tensor:
    blocks = raw.reshape(-1, 20)  # (num_blocks, 20) u8: scale f16, minimum f16, 16 bytes of nibbles
    scale = blocks[:, 0:2].view(torch.float16).float()  # (num_blocks, 1)
    minimum = blocks[:, 2:4].view(torch.float16).float()  # (num_blocks, 1)
    nibbles = blocks[:, 4:]
    out = torch.empty((len(blocks), 32), dtype=torch.float32)
    out[:, :16] = nibbles & 0x0F  # low nibbles are the first half
    out[:, 16:] = nibbles >> 4
    return out.mul_(scale).add_(minimum)  # two roundings, as gguf does; not fused


def _q8_0(raw: torch.Tensor) -> torch.Tensor:
    blocks = raw.reshape(-1, 34)  # (num_blocks, 34) u8: scale f16, 32 signed bytes
    scale = blocks[:, 0:2].view(torch.float16).float()  # (num_blocks, 1)
    return blocks[:, 2:].view(torch.int8).float().mul_(scale)


def _through_gguf(raw: torch.Tensor, ggml_type: str) -> torch.Tensor:
    import gguf  # here: 0.2 s that the default model does not need

    try:
        values = gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[ggml_type])
    except (KeyError, NotImplementedError):
        raise ConfigError(f"type {ggml_type} cannot be dequantised") from None
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
