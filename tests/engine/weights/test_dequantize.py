"""Dequantised values equal gguf's own, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from pagetier.engine.weights.dequantize import dequantize
from pagetier.kvstore.errors import ConfigError

FLOATS = ("F32", "F16", "BF16")
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
SHAPE = (24, 256)


def stored(kind: str, values: np.ndarray) -> torch.Tensor:
    raw = gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(np.ascontiguousarray(raw).view(np.uint8).reshape(-1).copy())


@pytest.mark.parametrize("kind", [*FLOATS, *BLOCKS])
def test_float32_equals_gguf(kind: str) -> None:
    values = np.random.default_rng(0).normal(0, 3, SHAPE).astype(np.float32)
    raw = stored(kind, values)
    expected = gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]).reshape(SHAPE)
    got = dequantize(raw, kind, SHAPE, torch.float32)
    assert got.shape == SHAPE and got.is_contiguous()
    assert torch.equal(got, torch.from_numpy(np.ascontiguousarray(expected)))
    assert np.abs(got.numpy() - values).max() < 2.0  # and it is about what went in


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_random_blocks_equal_gguf(kind: str) -> None:
    """Any bytes, infinite and not-a-number scales included: the fast path has no shortcut for tame values."""
    rng = np.random.default_rng(1)
    nbytes = {"Q4_1": 20, "Q8_0": 34}[kind]
    raw = rng.integers(0, 256, (4096, nbytes), dtype=np.uint8).reshape(-1)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(4096, 32)
    got = dequantize(torch.from_numpy(raw.copy()), kind, (4096, 32), torch.float32).numpy()
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_go_through_gguf(kind: str) -> None:
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.random.default_rng(2).integers(0, 100, (6, nbytes), dtype=np.uint8)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(3, 2 * block)
    got = dequantize(torch.from_numpy(raw.reshape(-1).copy()), kind, (3, 2 * block), torch.float32)
    np.testing.assert_array_equal(got.numpy(), expected)


@pytest.mark.parametrize("kind", [*FLOATS, "Q4_1", "Q8_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounds_once_to_the_compute_dtype_and_copies(kind: str, dtype: torch.dtype) -> None:
    raw = stored(kind, np.random.default_rng(3).normal(0, 1, SHAPE).astype(np.float32))
    got = dequantize(raw, kind, SHAPE, dtype)
    assert torch.equal(got, dequantize(raw, kind, SHAPE, torch.float32).to(dtype))
    before = got.clone()
    raw.zero_()
    assert torch.equal(got, before)


def test_a_type_nobody_reads_is_named() -> None:
    with pytest.raises(ConfigError, match="type I8 cannot be dequantised"):
        dequantize(torch.zeros(32, dtype=torch.uint8), "I8", (1, 32), torch.float32)
