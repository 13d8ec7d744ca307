"""Copies of blocks within this process, each with its checksum.

Knows no tier. The engine hands the store one of its compiled core's, which does both in one pass; this one, numpy and
xxhash, serves where there is none (proto and kvstore import no kernels).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import xxhash

Copy = tuple[memoryview, memoryview]  # (source, destination), of equal length


class Copier(Protocol):
    """Any thread may call it, several at once."""

    def copy(self, copies: Sequence[Copy]) -> list[bytes]:
        """Copy them all, without the GIL; the xxh3-128 digest of each."""


class PlainCopier:
    """Implements `Copier`: a copy, then a pass over what was copied."""

    def copy(self, copies: Sequence[Copy]) -> list[bytes]:
        digests = []
        for source, destination in copies:
            # Not by slices, whose assignment would hold the GIL
            np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))
            digests.append(xxhash.xxh3_128_digest(destination))
        return digests
