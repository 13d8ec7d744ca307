"""Writes of one put, several under way at once: while the disk takes some pieces the next one's checksums are made.

Owns a few threads and which pieces are under way; knows nothing of records. One write after the other leaves the disk
idle while checksums are made and between two requests. The threads do nothing but write: making pieces in them, too,
was slower, since they then wait for each other's turn at the interpreter (360 KiB records, two cores).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence

from pagetier.kvstore.executor import ThreadPool
from pagetier.kvstore.nvme.files import Buffer, Files, write_full

Piece = tuple[Sequence[Buffer], int]  # buffers, and where in the file they go


class OverlappedWriter:
    """Writes pieces with as many at once as `files.depth` says; with one, in order on the caller's thread.

    Owner: whoever holds the tier's write lock. Invariant: after `write` no buffer of a piece is read any more.
    """

    def __init__(self, files: Files) -> None:
        self._files, self._depth = files, files.depth
        self._pool = ThreadPool("kv-nvme-bytes", self._depth)
        self._changed = threading.Condition()
        self._num_under_way = 0  # guarded by self._changed, as the one below
        self._error: OSError | None = None

    def write(self, fd: int, pieces: Iterable[Piece]) -> None:
        """All of `pieces`, which are made one by one as there is room for them. Raises the first OSError of any, then
        with an unknown part written, and what making a piece raises."""
        if self._depth == 1:
            for buffers, offset in pieces:
                write_full(self._files, fd, buffers, offset)
            return
        try:
            for piece in pieces:
                with self._changed:
                    self._changed.wait_for(lambda: self._num_under_way < self._depth)
                    if self._error is not None:
                        break
                    self._num_under_way += 1
                self._pool.submit(functools.partial(self._write, fd, piece))
        finally:
            with self._changed:
                self._changed.wait_for(lambda: not self._num_under_way)
                error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self, timeout_s: float) -> None:
        """End the threads. Idempotent."""
        self._pool.close(timeout_s)

    def _write(self, fd: int, piece: Piece) -> None:
        error = None
        try:
            write_full(self._files, fd, *piece)
        except OSError as fault:
            error = fault
        finally:
            with self._changed:
                self._num_under_way -= 1
                self._error = self._error or error
                self._changed.notify_all()
