"""The weights fingerprint: what the KV cache's identity knows about a checkpoint's values, and a cache of it by file.

SHA-256 over the sorted (name, dtype, shape, xxh3-128 of the whole tensor) of the tensors as stored. Sampled bytes would
miss a merged layer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from pagetier.engine.weights.stored import StoredInfo

RACY_NS = (
    2_000_000_000  # a file touched this recently may change again within one tick of its mtime (git calls it racy)
)
_VERSION = "pgt1-weights"


def tensor_digest(raw: npt.NDArray[np.uint8]) -> bytes:
    """16 bytes: xxh3-128 of all of a tensor's stored bytes."""
    return xxhash.xxh3_128_digest(raw.data)


def combine(digests: Iterable[tuple[StoredInfo, bytes]]) -> str:
    """Hex SHA-256 of the whole checkpoint; the order of the input does not matter."""
    total = hashlib.sha256(_VERSION.encode())
    for info, digest in sorted(digests, key=lambda item: item[0].name):
        for text in (info.name, info.dtype):
            raw = text.encode()
            total.update(struct.pack("<I", len(raw)) + raw)
        total.update(struct.pack(f"<I{len(info.shape)}Q", len(info.shape), *info.shape) + digest)
    return total.hexdigest()


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What says that a file is the one that was hashed. ctime_ns catches a rewrite whose mtime was set back."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


def stamp(files: Sequence[Path]) -> tuple[FileStamp, ...]:
    """One stamp per file, symbolic links followed. Raises OSError."""
    out = []
    for file in files:
        stat = file.stat()
        out.append(FileStamp(str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))
    return tuple(out)


class FingerprintCache:
    """Fingerprints in `<folder>/<hash of the stamps>.json`. A cache only: an unwritable folder makes loads slower."""

    def __init__(self, folder: Path, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._folder, self._clock_ns = folder, clock_ns

    def _place(self, stamps: Sequence[FileStamp]) -> Path:
        return self._folder / f"{hashlib.sha256(repr(list(stamps)).encode()).hexdigest()[:32]}.json"

    def get(self, stamps: Sequence[FileStamp]) -> str | None:
        """The fingerprint computed for exactly these files, or None."""
        try:
            entry = json.loads(self._place(stamps).read_text())
            fingerprint = entry["fingerprint"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        same = entry.get("files") == [repr(item) for item in stamps]
        return fingerprint if same and isinstance(fingerprint, str) and len(fingerprint) == 64 else None

    def put(self, stamps: Sequence[FileStamp], fingerprint: str) -> None:
        """Remember it, unless a file is so new that a change could go unseen."""
        newest = max(max(item.mtime_ns, item.ctime_ns) for item in stamps)
        if self._clock_ns() - newest < RACY_NS:
            return
        entry = json.dumps({"fingerprint": fingerprint, "files": [repr(item) for item in stamps]})
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._folder, suffix=".tmp")
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(entry)
                os.replace(name, self._place(stamps))
            except OSError:
                os.unlink(name)
                raise
