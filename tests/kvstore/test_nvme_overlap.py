"""Writes of one put that are under way at once: all bytes arrive, a fault is told once, and nothing is read later."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pagetier.kvstore.nvme.fault_fs import FaultFS
from pagetier.kvstore.nvme.files import Buffer, Files
from pagetier.kvstore.nvme.overlap import OverlappedWriter, Piece

PIECE_BYTES = 5000


class Gated(Files):
    """The real files; a write waits until `gate` is open. most_at_once: writes that were under way together."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.most_at_once = self._num_under_way = 0
        self._lock = threading.Lock()

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        with self._lock:
            self._num_under_way += 1
            self.most_at_once = max(self.most_at_once, self._num_under_way)
            if self._num_under_way == self.depth:
                self.gate.set()
        assert self.gate.wait(10.0)
        done = super().pwritev(fd, buffers, offset)
        with self._lock:
            self._num_under_way -= 1
        return done


def pieces(count: int, made: list[int] | None = None) -> Iterator[Piece]:
    for i in range(count):
        if made is not None:
            made.append(i)
        half = bytes([i + 1]) * (PIECE_BYTES // 2)
        yield [half, memoryview(half)], i * PIECE_BYTES


def expected(count: int) -> bytes:
    return b"".join(bytes([i + 1]) * PIECE_BYTES for i in range(count))


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("count", [0, 1, 3, 20])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_all_pieces_are_written(fd: int, count: int, depth: int) -> None:
    writer = OverlappedWriter(FaultFS(depth=depth))
    for _ in range(2):  # a writer is used again and again
        os.truncate(fd, 0)
        writer.write(fd, pieces(count))
        assert os.pread(fd, 1 << 20, 0) == expected(count)
    writer.close(10.0)


def test_as_many_are_under_way_as_the_depth_says(fd: int) -> None:
    files, made = Gated(), list[int]()
    writer = OverlappedWriter(files)
    writer.write(fd, pieces(12, made))
    assert files.most_at_once == files.depth and made == list(range(12))
    assert os.pread(fd, 1 << 20, 0) == expected(12)
    writer.close(10.0)


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("nth", [1, 2, 9, 12])
def test_a_fault_is_raised_once_after_all_have_ended(fd: int, depth: int, nth: int) -> None:
    files = FaultFS(depth=depth, short=PIECE_BYTES // 3)
    writer = OverlappedWriter(files)
    files.fail_nth(nth, errno.EIO, "pwritev")
    with pytest.raises(OSError, match="Input/output"):
        writer.write(fd, pieces(12))
    calls = files.calls["pwritev"]
    writer.write(fd, pieces(12))
    assert os.pread(fd, 1 << 20, 0) == expected(12)
    assert files.calls["pwritev"] >= calls + 36
    writer.close(10.0)


def test_what_a_piece_raises_comes_out_when_nothing_is_under_way(fd: int) -> None:
    def broken() -> Iterator[Piece]:
        yield from pieces(3)
        raise ValueError("no such record")

    writer = OverlappedWriter(Files())
    with pytest.raises(ValueError, match="no such record"):
        writer.write(fd, broken())
    assert os.pread(fd, 1 << 20, 0) == expected(3)
    writer.close(10.0)
