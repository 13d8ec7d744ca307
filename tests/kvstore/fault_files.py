"""A file system that fails as told: the real one with faults put in at the seam."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pagetier.kvstore.nvme.files import Buffer, Files

Rule = Callable[[str, Any, int], OSError | None]  # operation, its target (path or descriptor), how often it was called


def fail(code: int) -> OSError:
    return OSError(code, os.strerror(code))


class FaultFiles(Files):
    """`rule` is asked before every operation and may answer with an error to raise. With `short`, vectored reads and
    writes move at most that many bytes at once. Descriptors that are open are counted in `num_open`.
    """

    def __init__(self, rule: Rule | None = None, short: int | None = None) -> None:
        self.rule = rule
        self.short = short
        self.calls: dict[str, int] = {}
        self.num_open = 0
        self._lock = threading.Lock()

    def full(self) -> None:
        """From now on the disk has no free block."""
        self.rule = lambda op, target, calls: fail(errno.ENOSPC) if op == "allocate" else None

    def broken(self, *ops: str, code: int = errno.EIO) -> None:
        """From now on these operations fail; all of them without names."""
        self.rule = lambda op, target, calls: fail(code) if not ops or op in ops else None

    def well(self) -> None:
        self.rule = None

    def _enter(self, op: str, target: Any) -> None:
        with self._lock:
            calls = self.calls[op] = self.calls.get(op, 0) + 1
        error = self.rule(op, target, calls) if self.rule is not None else None
        if error is not None:
            raise error

    def open(self, path: Path, flags: int) -> int:
        self._enter("open", path)
        fd = super().open(path, flags)
        with self._lock:
            self.num_open += 1
        return fd

    def close(self, fd: int) -> None:
        with self._lock:
            self.num_open -= 1
        super().close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._enter("preadv", offset)
        if self.short is not None:
            buffers = [buffers[0].cast("B")[: self.short]]
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._enter("pwritev", offset)
        if self.short is not None:
            buffers = [memoryview(buffers[0]).cast("B")[: self.short]]
        return super().pwritev(fd, buffers, offset)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._enter("allocate", fd)
        super().allocate(fd, nbytes)

    def truncate(self, target: int | Path, nbytes: int) -> None:
        self._enter("truncate", target)
        super().truncate(target, nbytes)

    def sync(self, fd: int) -> None:
        self._enter("sync", fd)
        super().sync(fd)

    def stat(self, target: int | Path) -> os.stat_result:
        self._enter("stat", target)
        return super().stat(target)

    def listdir(self, path: Path) -> list[str]:
        self._enter("listdir", path)
        return super().listdir(path)

    def make_folder(self, path: Path) -> None:
        self._enter("make_folder", path)
        super().make_folder(path)

    def rename(self, old: Path, new: Path) -> None:
        self._enter("rename", old)
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._enter("unlink", path)
        super().unlink(path)

    def set_mtime(self, path: Path, time_ns: int) -> None:
        self._enter("set_mtime", path)
        super().set_mtime(path, time_ns)
