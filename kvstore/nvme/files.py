"""The seam under the NVMe tier: every file operation it makes, and every look at a clock, goes through `Files`.

Faults are put in here (fault_fs.py), and a disk in memory that loses what was not synced (crash_fs.py). Owns no state.
Every method is one system call (or close to it), raises OSError and nothing else, and may be called by any thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

DIRECT = getattr(os, "O_DIRECT", 0)
MAX_BUFFERS = 1024  # IOV_MAX on Linux


class Files:
    """The real file system and its clocks. depth: writes of one put that may be under way at once; with one everything
    is done on the caller's thread, in order.
    """

    depth: int = 4  # as many keep a disk busy as eight, and a piece more costs memory bandwidth of its own

    def open(self, path: Path, flags: int) -> int:
        """A descriptor, not inherited by children; files are made with mode 0600."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes read, fewer than asked for at the end of the file or by chance."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Bytes written, at times fewer than given."""
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Give the file its disk blocks and size now, so that later writes cannot meet a full disk."""
        os.posix_fallocate(fd, 0, nbytes)

    def truncate(self, target: int | Path, nbytes: int) -> None:
        os.truncate(target, nbytes)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def stat(self, target: int | Path) -> os.stat_result:
        return os.stat(target)

    def listdir(self, path: Path) -> list[str]:
        return os.listdir(path)

    def make_folder(self, path: Path) -> None:
        """Make a folder, 0700, and those above it; one that exists is left as it is."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def chmod(self, path: Path, mode: int) -> None:
        os.chmod(path, mode)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def lock(self, fd: int) -> bool:
        """Try to hold the file exclusively until the descriptor is closed; whether that worked."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def set_mtime(self, path: Path, time_ns: int) -> None:
        os.utime(path, ns=(time_ns, time_ns))

    def now_s(self) -> float:
        """Seconds of the clock that deadlines are in."""
        return time.monotonic()

    def time_ns(self) -> int:
        """The clock that modification times are in, ns since 1970."""
        return time.time_ns()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def read_full(files: Files, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill `buffers` from `offset`; bytes read, fewer only at the end of the file. Raises OSError."""
    left, total = list(buffers), 0
    while left:
        got = files.preadv(fd, left[:MAX_BUFFERS], offset + total)
        if got <= 0:
            break
        total += got
        left = [piece for piece in _after(left, got) if isinstance(piece, memoryview)]
    return total


def write_full(files: Files, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Write all of `buffers` at `offset`; their size in bytes. Raises OSError, then with an unknown part written."""
    left, total = list(buffers), 0
    while left:
        put = files.pwritev(fd, left[:MAX_BUFFERS], offset + total)
        if put <= 0:
            raise OSError(0, "nothing was written")
        total += put
        left = _after(left, put)
    return total


def read_bytes(files: Files, fd: int, nbytes: int, offset: int) -> bytes:
    """Up to `nbytes` at `offset`. Raises OSError."""
    buffer = bytearray(nbytes)
    return bytes(buffer[: read_full(files, fd, [memoryview(buffer)], offset)])


def sync_folder(files: Files, folder: Path) -> None:
    """Bring the entries of a folder to the disk. Raises OSError."""
    fd = files.open(folder, os.O_RDONLY)
    try:
        files.sync(fd)
    finally:
        files.close(fd)


def close_quietly(files: Files, fd: int) -> None:
    """Close a descriptor whose errors nobody can act on."""
    with contextlib.suppress(OSError):
        files.close(fd)


def _after(buffers: Sequence[Buffer], nbytes: int) -> list[Buffer]:
    """What is left of `buffers` behind their first `nbytes`, without empty ones."""
    for index, buffer in enumerate(buffers):
        size = len(buffer) if isinstance(buffer, (bytes, bytearray)) else buffer.nbytes
        if nbytes < size:
            return [memoryview(buffer).cast("B")[nbytes:], *buffers[index + 1 :]]
        nbytes -= size
    return []
