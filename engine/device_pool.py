"""The device tier's bytes: one tensor of KV blocks. Knows no keys and no requests; who uses a block is BlockPool's."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagetier.engine.models.config import ModelConfig
from pagetier.kvstore.block import KVGroup, Plane
from pagetier.kvstore.errors import CapacityError, ClosedError, ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a resolved dtype name. Raises ConfigError."""
    if name not in DTYPES:
        raise ConfigError.bad_value("dtype", name, ", ".join(DTYPES))
    return DTYPES[name]


def kv_group(config: ModelConfig, dtype: str) -> KVGroup:
    """The model's one KV group; `dtype` is the resolved name, never `auto`."""
    shape = (config.num_kv_heads, config.head_dim)
    planes = (Plane("k", dtype, shape), Plane("v", dtype, shape))
    nbytes = config.num_layers * 2 * config.num_kv_heads * config.head_dim * torch_dtype(dtype).itemsize
    return KVGroup(tuple(range(config.num_layers)), planes, config.sliding_window, nbytes)


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The pool tensor's extents but for the planes, which are two: k and v."""

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int

    @classmethod
    def of(cls, config: ModelConfig, num_blocks: int, block_size: int) -> Self:
        return cls(num_blocks, config.num_layers, config.num_kv_heads, block_size, config.head_dim)

    @property
    def extents(self) -> tuple[int, int, int, int, int, int]:
        return (self.num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_numel(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim


class DevicePool:
    """KV blocks of one group: `tensor` (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim), contiguous.

    Zero-initialised: a slot never written may be read under a mask, and whatever malloc left there may be NaN. On CPU
    the memory is an anonymous map with huge pages asked for; the kernel hands out its zeros on first touch.
    Not thread-safe: blocks are written by the runner and, through `view`, by loads into blocks no batch reads.
    """

    def __init__(self, shape: PoolShape, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.shape = shape
        self.device = torch.device(device)
        self.block_nbytes = shape.block_numel * dtype.itemsize
        self._map: mmap.mmap | None = None
        self._tensor: Tensor | None = None
        nbytes = shape.num_blocks * self.block_nbytes
        if self.device.type != "cpu":
            self._tensor = torch.zeros(shape.extents, dtype=dtype, device=self.device)
            return
        try:
            self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise CapacityError(f"cannot map {nbytes} bytes for {shape.num_blocks} KV blocks: {error}") from error
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self._tensor = torch.frombuffer(self._map, dtype=dtype).view(shape.extents)

    @property
    def tensor(self) -> Tensor:
        """(num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim). Raises ClosedError."""
        if self._tensor is None:
            raise ClosedError("the device pool is closed")
        return self._tensor

    def view(self, block_id: int) -> memoryview:
        """The block's bytes, writable, no copy. CPU only. The view keeps the memory alive."""
        if self._map is None:
            raise ClosedError("the device pool is closed or not in host memory")
        if not 0 <= block_id < self.shape.num_blocks:
            raise IndexError(f"block {block_id} of {self.shape.num_blocks}")
        start = block_id * self.block_nbytes
        return memoryview(self._map)[start : start + self.block_nbytes]

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN, so that a read of a slot that was never written, or is somebody else's by now, cannot
        go unseen (--paranoid). Waits for it: a load may write to them next."""
        for block_id in block_ids:
            self.tensor[block_id].fill_(torch.nan)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def differ(self, a: int, b: int, tolerance: float) -> bool:
        """Whether two blocks hold different KV. tolerance 0.0: in any bit; else the norm of the difference may be that
        share of the norm of `b`, in each layer's K and V."""
        one, other = self.tensor[a], self.tensor[b]  # (num_layers, 2, num_kv_heads, block_size, head_dim)
        if not tolerance:
            return not torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        distance = (one.float() - other.float()).flatten(2).norm(dim=2)  # (num_layers, 2)
        return not bool((distance <= tolerance * other.float().flatten(2).norm(dim=2)).all())  # NaN differs

    def copy_slots(self, copies: npt.NDArray[np.int32]) -> None:
        """Copy-on-write. copies: (num_copies, 3) of (source, destination, num_tokens): the first num_tokens slots of
        every layer and plane, one row after the other."""
        blocks = self.tensor
        for source, destination, num_tokens in copies.tolist():
            blocks[destination, :, :, :, :num_tokens] = blocks[source, :, :, :, :num_tokens]

    def close(self) -> None:
        """Let the memory go once the last view is gone. Idempotent."""
        self._tensor = None
        self._map = None
