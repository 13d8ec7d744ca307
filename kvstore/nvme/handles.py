"""Open descriptors of segments: shared by readers, closed when nobody uses them and there are too many."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from pagetier.kvstore.nvme.files import DIRECT, Files, close_quietly

_MAX_IDLE = 128  # descriptors; two per segment at most, well below the usual limit of 1,024


@dataclass(eq=False, slots=True)
class Segment:
    """One segment file as this process knows it.

    ident: our own number for it. own: in the NN that we write. end, closed: what is known of its records so far;
    owner: whoever holds the catalog's lock.
    """

    ident: int
    path: Path
    size: int
    inode: int
    own: bool
    end: int
    closed: bool


@dataclass(eq=False, slots=True)
class _Handle:
    fd: int
    users: int
    doomed: bool


class Handles:
    """Descriptors by (segment, direct). Thread-safe. A descriptor stays valid between `acquire` and `release`."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[int, bool], _Handle] = OrderedDict()  # guarded by self._lock; least recent first
        self._closed = False  # guarded by self._lock

    def acquire(self, segment: Segment, direct: bool = False) -> tuple[int, object]:
        """A descriptor (read-write in our own NN) and what to give to `release`.

        Raises FileNotFoundError when the file is gone or is another one by now, and OSError.
        """
        key = (segment.ident, direct)
        with self._lock:
            handle = self._open.get(key)
            if handle is None:
                handle = _Handle(self._open_file(segment, direct), 0, self._closed)
                if not self._closed:
                    self._open[key] = handle
                    self._trim()
            else:
                self._open.move_to_end(key)
            handle.users += 1
            return handle.fd, handle

    def _open_file(self, segment: Segment, direct: bool) -> int:
        flags = (os.O_RDWR if segment.own else os.O_RDONLY) | (DIRECT if direct else 0)
        fd = self._files.open(segment.path, flags)
        try:
            if self._files.stat(fd).st_ino != segment.inode:
                raise FileNotFoundError(f"{segment.path} was replaced")
        except OSError:
            close_quietly(self._files, fd)
            raise
        return fd

    def release(self, handle: object) -> None:
        """Give back what `acquire` gave."""
        assert isinstance(handle, _Handle), "not a handle"
        with self._lock:
            handle.users -= 1
            assert handle.users >= 0, "handle released twice"
            if handle.doomed and not handle.users:
                close_quietly(self._files, handle.fd)

    def _trim(self) -> None:
        idle = [key for key, handle in self._open.items() if not handle.users]
        for key in idle[: max(0, len(self._open) - _MAX_IDLE)]:
            close_quietly(self._files, self._open.pop(key).fd)

    def discard(self, segment: Segment) -> None:
        """Close a segment's descriptors, as soon as they are unused."""
        with self._lock:
            for direct in (False, True):
                self._doom(self._open.pop((segment.ident, direct), None))

    def _doom(self, handle: _Handle | None) -> None:
        if handle is not None:
            handle.doomed = True
            if not handle.users:
                close_quietly(self._files, handle.fd)

    def close(self) -> None:
        """Discard all, for good: what is acquired later is closed at its release."""
        with self._lock:
            self._closed = True
            while self._open:
                self._doom(self._open.popitem()[1])
