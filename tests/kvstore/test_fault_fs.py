"""FaultFS: what it is told to break breaks, nothing else does, and a seed repeats itself."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetier.kvstore.nvme.crash_fs import CrashFS
from pagetier.kvstore.nvme.fault_fs import BY_PATH, GROWING, FaultFS, FileFault
from pagetier.kvstore.nvme.files import read_bytes, write_full

FOLDER = Path("/d")


def fresh(seed: int = 0) -> FaultFS:
    files = FaultFS(CrashFS(), seed=seed)
    files.make_folder(FOLDER)
    return files


def trace(files: FaultFS, num_steps: int = 60) -> list[object]:
    """What a fixed sequence of operations answers."""
    seen: list[object] = []
    for step in range(num_steps):
        path = FOLDER / str(step % 5)
        try:
            fd = files.open(path, os.O_RDWR | os.O_CREAT)
            try:
                seen.append(files.pwritev(fd, [bytes([step]) * 6000], step))
                seen.append(files.preadv(fd, [memoryview(bytearray(9000))], 0))
                files.allocate(fd, 4096 * step)
                files.sync(fd)
            finally:
                files.close(fd)
            seen.append(sorted(files.listdir(FOLDER)))
            files.rename(path, FOLDER / "x")
        except OSError as error:
            seen.append(error.errno)
    return seen


@given(seed=st.integers(0, 1 << 32))
def test_a_seed_repeats_itself(seed: int) -> None:
    traces = []
    for _ in range(2):
        files = fresh(seed)
        files.rate, files.delay_s = 0.3, 0.25
        traces.append((trace(files), files.now_s(), files.calls))
    assert traces[0] == traces[1]


@pytest.mark.parametrize("kind", FileFault)
def test_a_kind_befalls_only_what_it_can(kind: FileFault) -> None:
    files = fresh(1)
    files.rate, files.kinds, files.delay_s = 0.5, (kind,), 2.0
    failed: dict[str, set[int | None]] = {}

    def noted(op: str, code: int | None) -> None:
        failed.setdefault(op, set()).add(code)

    for step in range(200):
        path = FOLDER / str(step)
        for op, call in (
            ("make_folder", lambda: files.make_folder(FOLDER)),
            ("listdir", lambda: files.listdir(FOLDER)),
            ("open", lambda path=path: files.close(files.open(path, os.O_RDWR | os.O_CREAT))),
            ("rename", lambda path=path: files.rename(path, path)),
            ("unlink", lambda path=path: files.unlink(path)),
        ):
            try:
                call()
                noted(op, None)
            except OSError as error:
                noted(op, error.errno)
    code = {FileFault.SHORT: None, FileFault.DELAY: None}.get(kind, getattr(errno, kind.name, None))
    allowed = {FileFault.ENOSPC: GROWING, FileFault.EACCES: BY_PATH}.get(kind, frozenset(failed))
    for op, codes in failed.items():
        unexpected = codes - {None, errno.ENOENT} - ({code} if op in allowed or op == "open" else set())
        assert not unexpected, f"{op} failed with {unexpected}"
    assert (files.now_s() > 50) is (kind is FileFault.DELAY)


@given(seed=st.integers(0, 1 << 32), nbytes=st.integers(1, 40_000))
def test_short_transfers_are_carried_on(seed: int, nbytes: int) -> None:
    """What `read_full` and `write_full` are for."""
    files = fresh(seed)
    fd = files.open(FOLDER / "f", os.O_RDWR | os.O_CREAT)
    files.rate, files.kinds = 0.9, (FileFault.SHORT,)
    data = bytes(i % 251 for i in range(nbytes))
    assert write_full(files, fd, [data[: nbytes // 3], data[nbytes // 3 :]], 17) == nbytes
    assert read_bytes(files, fd, nbytes, 17) == data


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_the_nth_operation_fails_once(nth: int) -> None:
    files = fresh()
    fd = files.open(FOLDER / "f", os.O_RDWR | os.O_CREAT)
    files.fail_nth(nth, errno.EIO, "pwritev")
    outcomes = []
    for _ in range(8):
        files.stat(fd)
        try:
            files.pwritev(fd, [b"x"], 0)
            outcomes.append(True)
        except OSError as error:
            assert error.errno == errno.EIO
            outcomes.append(False)
    assert outcomes == [i != nth - 1 for i in range(8)]


def test_a_place_that_vanished_comes_back_as_it_was() -> None:
    files = fresh()
    fd = files.open(FOLDER / "f", os.O_RDWR | os.O_CREAT)
    files.vanish()
    with pytest.raises(FileNotFoundError):
        files.listdir(FOLDER)
    with pytest.raises(OSError, match="Input/output"):
        files.pwritev(fd, [b"x"], 0)
    files.well()
    assert files.listdir(FOLDER) == ["f"]
    files.close(fd)
    assert files.num_open == 0
