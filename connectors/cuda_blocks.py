"""Staging for CUDA: page-locked host slots, a stream of its own, an event per run of copies.

The window is mapped and registered rather than taken from torch's pinned allocator, which rounds up to a power of two.
Imports torch only when it is used.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pagetier.kvstore.errors import CapacityError

if TYPE_CHECKING:
    import torch

WINDOW_BYTES = 256 << 20


class CudaStaging:
    """Implements `connectors.staged.Staging` for a device pool seen as bytes.

    For one thread. Copies start when they are asked for: the caller has waited for the kernels that wrote the blocks
    (saves) or read what they held before (loads), as the connector's rules say.
    """

    def __init__(self, pool: torch.Tensor, window_bytes: int = WINDOW_BYTES) -> None:
        """`pool`: (num_blocks, block_nbytes) uint8 on a CUDA device. Raises CapacityError when the window holds no
        block or cannot be page-locked."""
        import torch

        assert pool.dtype == torch.uint8 and pool.dim() == 2 and pool.is_cuda, f"{pool.dtype} {tuple(pool.shape)}"
        self._torch: Any = torch
        self._pool = pool
        self._nbytes = pool.shape[1]
        self._num_slots = window_bytes // self._nbytes
        if not self._num_slots:
            raise CapacityError(f"a staging window of {window_bytes} bytes holds no block of {self._nbytes}")
        size = -(-self._num_slots * self._nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._slots = torch.frombuffer(self._map, dtype=torch.uint8)[: self._num_slots * self._nbytes]
        self._slots = self._slots.view(self._num_slots, self._nbytes)
        self._address = self._slots.data_ptr()
        code = int(self._torch.cuda.cudart().cudaHostRegister(self._address, size, 0))
        if code:
            raise CapacityError(f"CUDA would not page-lock {size} bytes of host memory (error {code}); see `ulimit -l`")
        self._stream = self._torch.cuda.Stream(device=pool.device)
        self._is_closed = False

    @property
    def num_slots(self) -> int:
        return self._num_slots

    def view(self, slot: int) -> memoryview:
        return memoryview(self._map)[slot * self._nbytes : (slot + 1) * self._nbytes]

    def start_copy_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> object:
        with self._torch.cuda.stream(self._stream):
            for block_id, slot in zip(block_ids, slots, strict=True):
                self._slots[slot].copy_(self._pool[block_id], non_blocking=True)
            return self._recorded()

    def start_copy_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> object:
        with self._torch.cuda.stream(self._stream):
            for slot, block_id in zip(slots, block_ids, strict=True):
                self._pool[block_id].copy_(self._slots[slot], non_blocking=True)
            return self._recorded()

    def is_done(self, token: object) -> bool:
        assert isinstance(token, self._torch.cuda.Event), f"not a token: {token!r}"
        return bool(token.query())

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._stream.synchronize()
        self._torch.cuda.cudart().cudaHostUnregister(self._address)

    def _recorded(self) -> object:
        event = self._torch.cuda.Event()
        event.record(self._stream)
        return event
