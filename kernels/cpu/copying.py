"""Copies of blocks with their checksum by the compiled core: one pass over the bytes, one call for several blocks."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence

import numpy as np
import xxhash

from pagetier.kernels.cpu.library import COPIED, MIN_HASHED_BYTES, Isa, Library

DIGEST_BYTES = 16


class StreamingCopier:
    """Implements `kvstore.copier.Copier`. isa: the level to use, None for the machine's best: all copy the same."""

    def __init__(self, library: Library, isa: Isa | None = None) -> None:
        self._library, self._isa = library, library.best_isa() if isa is None else isa

    def copy(self, copies: Sequence[tuple[memoryview, memoryview]]) -> list[bytes]:
        """Copy each source to its destination; the xxh3-128 digest of each.

        Raises ValueError, before any is copied, for two that differ in length."""
        if any(len(source) != len(destination) for source, destination in copies):
            raise ValueError("a copy between places of different lengths")
        if any(len(source) < MIN_HASHED_BYTES for source, _ in copies):
            return [self._copy_small(source, destination) for source, destination in copies]
        rows = [(_address(source), _address(destination), len(source)) for source, destination in copies]
        digests = self._library.copy(self._isa, np.array(rows, COPIED))
        return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]

    def _copy_small(self, source: memoryview, destination: memoryview) -> bytes:
        if len(source) >= MIN_HASHED_BYTES:
            return self.copy([(source, destination)])[0]
        destination[:] = source
        return xxhash.xxh3_128_digest(destination)


def _address(view: memoryview) -> int:
    """Where a contiguous view begins. Of two ways the fast one, 0.2 us against 2, needs one that may be written to."""
    if not view.readonly:
        return c.addressof(c.c_char.from_buffer(view))
    address: int = np.frombuffer(view, np.uint8).ctypes.data
    return address
