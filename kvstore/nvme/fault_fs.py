"""A file system that fails as told: any other one with faults put in, for tests and for the simulation.

Deterministic: which operation fails follows from the calls made and from `seed` alone.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from pagetier.kvstore.nvme.files import Buffer, Files

Rule = Callable[[str, Any, int], OSError | None]  # operation, its target (path or descriptor), how often it was called

# Operations that a full disk refuses; those that it still carries out are all others.
GROWING = frozenset(("allocate", "pwritev", "make_folder", "rename"))
BY_PATH = frozenset(("open", "stat", "listdir", "make_folder", "rename", "unlink", "chmod", "set_mtime", "truncate"))
VECTORED = frozenset(("preadv", "pwritev"))


class FileFault(StrEnum):
    """What befalls one operation."""

    EIO = "eio"  # the medium fails
    ENOSPC = "enospc"  # the disk is full; only operations that take room
    EACCES = "eacces"  # permission was lost; only operations by path
    SHORT = "short"  # a read or write moves only a part of its bytes
    DELAY = "delay"  # it takes `delay_s` longer


_APPLIES = {FileFault.ENOSPC: GROWING, FileFault.EACCES: BY_PATH, FileFault.SHORT: VECTORED}


def os_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


class FaultFS(Files):
    """`base` with faults. May be called by any thread; what it is told is told by one.

    rule: asked before every operation, may answer with an error to raise. short: most bytes that a vectored read or
    write moves at once. rate, kinds: the chance of each operation to meet a fault, and of which kinds. delay_s: of a
    DELAY. calls: operations by name since it was last cleared. num_open: descriptors. depth: one, so that which
    operation fails follows from the calls made.
    """

    def __init__(
        self,
        base: Files | None = None,
        *,
        seed: int = 0,
        rule: Rule | None = None,
        short: int | None = None,
        depth: int = 1,
    ) -> None:
        self.depth = depth
        self.base = Files() if base is None else base
        self.rule = rule
        self.short = short
        self.rate = 0.0
        self.kinds: Sequence[FileFault] = tuple(FileFault)
        self.delay_s = 0.0
        self.calls: dict[str, int] = {}
        self.num_open = 0
        self._rng = random.Random(seed)
        self._lock = threading.Lock()

    def fail_nth(self, nth: int, code: int, *ops: str) -> None:
        """The nth operation from now on, counting only `ops` where given, fails once with errno `code`."""
        left = nth

        def rule(op: str, target: Any, calls: int) -> OSError | None:
            nonlocal left
            left -= not ops or op in ops
            if left or (ops and op not in ops):
                return None
            left = -1
            return os_error(code)

        self.rule = rule

    def full(self) -> None:
        """From now on the disk has no free block."""
        self.rule = lambda op, target, calls: os_error(errno.ENOSPC) if op == "allocate" else None

    def broken(self, *ops: str, code: int = errno.EIO) -> None:
        """From now on these operations fail; all of them without names."""
        self.rule = lambda op, target, calls: os_error(code) if not ops or op in ops else None

    def vanish(self) -> None:
        """The place is gone, as when it is unmounted: nothing is found by path, descriptors answer EIO."""
        self.rule = lambda op, target, calls: os_error(errno.ENOENT if isinstance(target, Path) else errno.EIO)

    def well(self) -> None:
        """No fault from now on."""
        self.rule, self.short, self.rate = None, None, 0.0

    def open(self, path: Path, flags: int) -> int:
        self._enter("open", path)
        fd = self.base.open(path, flags)
        with self._lock:
            self.num_open += 1
        return fd

    def close(self, fd: int) -> None:
        with self._lock:
            self.num_open -= 1
        self.base.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        limit = self._enter("preadv", offset)
        if limit is not None:
            buffers = _front(buffers, limit)
        return self.base.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        limit = self._enter("pwritev", offset)
        if limit is not None:
            buffers = _front(buffers, limit)
        return self.base.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._enter("allocate", fd)
        self.base.allocate(fd, nbytes)

    def truncate(self, target: int | Path, nbytes: int) -> None:
        self._enter("truncate", target)
        self.base.truncate(target, nbytes)

    def sync(self, fd: int) -> None:
        self._enter("sync", fd)
        self.base.sync(fd)

    def stat(self, target: int | Path) -> os.stat_result:
        self._enter("stat", target)
        return self.base.stat(target)

    def listdir(self, path: Path) -> list[str]:
        self._enter("listdir", path)
        return self.base.listdir(path)

    def make_folder(self, path: Path) -> None:
        self._enter("make_folder", path)
        self.base.make_folder(path)

    def chmod(self, path: Path, mode: int) -> None:
        self._enter("chmod", path)
        self.base.chmod(path, mode)

    def rename(self, old: Path, new: Path) -> None:
        self._enter("rename", old)
        self.base.rename(old, new)

    def unlink(self, path: Path) -> None:
        self._enter("unlink", path)
        self.base.unlink(path)

    def lock(self, fd: int) -> bool:
        self._enter("lock", fd)
        return self.base.lock(fd)

    def set_mtime(self, path: Path, time_ns: int) -> None:
        self._enter("set_mtime", path)
        self.base.set_mtime(path, time_ns)

    def now_s(self) -> float:
        return self.base.now_s()

    def time_ns(self) -> int:
        return self.base.time_ns()

    def sleep(self, seconds: float) -> None:
        self.base.sleep(seconds)

    def _enter(self, op: str, target: Any) -> int | None:
        """Count the operation and raise what befalls it; the most bytes it may move, None for all."""
        with self._lock:
            calls = self.calls[op] = self.calls.get(op, 0) + 1
            kind = self._drawn(op) if self.rate else None
        error = self.rule(op, target, calls) if self.rule is not None else None
        if error is not None:
            raise error
        if kind is None:
            return self.short
        if kind is FileFault.SHORT:
            return self._rng.choice((1, 63, 511, 512, 4096, 4097, 8192))
        if kind is FileFault.DELAY:
            self.base.sleep(self.delay_s)
            return self.short
        raise os_error(getattr(errno, kind.name))

    def _drawn(self, op: str) -> FileFault | None:
        if self._rng.random() >= self.rate:
            return None
        kind = self._rng.choice(self.kinds)
        return kind if op in _APPLIES.get(kind, (op,)) else None


def _front(buffers: Sequence[Any], limit: int) -> list[memoryview]:
    """The leading `limit` bytes of `buffers`."""
    front: list[memoryview] = []
    for buffer in buffers:
        view = memoryview(buffer).cast("B")[:limit]
        front.append(view)
        limit -= view.nbytes
        if not limit:
            break
    return front
