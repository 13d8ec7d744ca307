"""CrashFS: the same answers as the real file system, and over a power cut what a disk keeps and no more."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetier.kvstore.nvme.crash_fs import CrashFS, Killed
from pagetier.kvstore.nvme.disk import BLOCK_BYTES, SECTOR_BYTES, Disk
from pagetier.kvstore.nvme.files import Files, read_bytes

ROOT = Path("/root")
NAMES = ("a", "b", "c")
SEEDS = st.integers(0, 1 << 32)


def act(files: Files, root: Path, rng: random.Random, fds: list[int]) -> object:
    """One random operation; what it answered, descriptors by their rank."""
    path, other = root / rng.choice(NAMES), root / rng.choice(NAMES)
    op, offset, size = rng.randrange(10), rng.randrange(3) * 700, rng.randrange(1, 3000)
    rank = rng.randrange(len(fds)) if fds else None
    flags = rng.choice((0, os.O_CREAT, os.O_CREAT | os.O_TRUNC, os.O_CREAT | os.O_EXCL))
    flags |= rng.choice((os.O_RDWR, os.O_RDONLY)) if not flags & os.O_TRUNC else os.O_RDWR
    try:
        if op <= 1 or rank is None:
            fds.append(files.open(path, flags))
        elif op == 2:
            files.close(fds.pop(rank))
        elif op == 3:
            return files.pwritev(fds[rank], [bytes([size % 256]) * (size // 2), b"y" * 9], offset)
        elif op == 4:
            buffers = [bytearray(100), bytearray(size)]
            return files.preadv(fds[rank], [memoryview(buffer) for buffer in buffers], offset), buffers
        elif op == 5:
            files.truncate(rng.choice((fds[rank], path)), size)
        elif op == 6:
            files.rename(path, other)
        elif op == 7:
            files.unlink(path)
        elif op == 8:
            return files.lock(fds[rank])
        else:
            files.make_folder(path.with_name("folder"))
        return sorted(files.listdir(root)), [files.stat(fd).st_size for fd in fds]
    except OSError as error:
        return error.errno


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_it_answers_like_the_real_one(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    real, simulated = Files(), CrashFS()
    places = {real: tmp_path_factory.mktemp("real"), simulated: ROOT}
    simulated.make_folder(ROOT)
    answers: dict[Files, list[object]] = {}
    for files, root in places.items():
        rng, fds = random.Random(seed), list[int]()
        answers[files] = [act(files, root, rng, fds) for _ in range(60)]
        for fd in fds:
            files.close(fd)
    assert answers[simulated] == answers[real]
    assert simulated.num_open == 0


def busy(seed: int, disk_seed: int = 0) -> tuple[Disk, CrashFS, random.Random]:
    """A disk after many operations, few of them synced."""
    disk, rng = Disk(seed=disk_seed), random.Random(seed)
    files = CrashFS(disk)
    files.make_folder(ROOT)
    fds: list[int] = []
    for _ in range(40):
        act(files, ROOT, rng, fds)
        if fds and rng.random() < 0.1:
            files.sync(rng.choice(fds))
    return disk, files, rng


def contents(files: CrashFS) -> dict[Path, bytes]:
    return {path: bytes(files.disk.at(str(path)).data) for path in files.disk.paths_below(Path("/"))}


@given(seed=SEEDS)
def test_a_kill_loses_nothing_but_the_process(seed: int) -> None:
    disk, files, _ = busy(seed)
    before = contents(files)
    files.kill()
    with pytest.raises(Killed):
        files.listdir(ROOT)
    after = CrashFS(disk)
    assert contents(after) == before
    for path in before:
        assert after.lock(after.open(path, os.O_RDONLY)), "a lock outlived its process"


@pytest.mark.parametrize("nbytes", [0, 1, 700, 5000])
def test_a_kill_within_a_write_leaves_its_front(nbytes: int) -> None:
    files = CrashFS()
    fd = files.open(Path("/f"), os.O_RDWR | os.O_CREAT)
    files.dies_after = nbytes
    with pytest.raises(Killed):
        files.pwritev(fd, [b"a" * 1000, b"b" * 1000], 0)
    assert bytes(files.disk.at("/f").data) == (b"a" * 1000 + b"b" * 1000)[:nbytes] and files.is_killed


@given(seed=SEEDS, disk_seed=st.integers(0, 99))
def test_a_power_cut_repeats_itself(seed: int, disk_seed: int) -> None:
    images = []
    for _ in range(2):
        disk, files, _ = busy(seed, disk_seed)
        disk.power_cut()
        with pytest.raises(Killed):
            files.listdir(Path("/"))
        images.append(contents(CrashFS(disk)))
    assert images[0] == images[1]


@given(seed=SEEDS, disk_seed=st.integers(0, 99))
def test_after_a_shutdown_in_order_a_power_cut_loses_nothing(seed: int, disk_seed: int) -> None:
    disk, files, _ = busy(seed, disk_seed)
    before = contents(files)
    disk.orderly_shutdown()
    disk.power_cut()
    assert contents(CrashFS(disk)) == before
    used = sum(CrashFS(disk).stat(path).st_blocks * 512 for path in before) + BLOCK_BYTES * len(disk.folders)
    assert disk.used_bytes == used


@given(seed=SEEDS, disk_seed=st.integers(0, 99))
def test_synced_bytes_survive_and_every_other_sector_is_one_that_was(seed: int, disk_seed: int) -> None:
    disk, rng = Disk(seed=disk_seed), random.Random(seed)
    files = CrashFS(disk)
    files.make_folder(ROOT)
    fd = files.open(ROOT / "f", os.O_RDWR | os.O_CREAT)
    for folder in (Path("/"), ROOT):
        files.sync(files.open(folder, os.O_RDONLY))
    files.allocate(fd, 8 * SECTOR_BYTES)
    files.pwritev(fd, [rng.randbytes(8 * SECTOR_BYTES)], 0)
    files.sync(fd)
    versions = [bytes(disk.at("/root/f").data)]
    for _ in range(rng.randrange(6)):
        offset = rng.randrange(7 * SECTOR_BYTES)
        files.pwritev(fd, [rng.randbytes(rng.randrange(1, SECTOR_BYTES))], offset)
        versions.append(bytes(disk.at("/root/f").data))
    disk.power_cut()
    view = CrashFS(disk)
    after = read_bytes(view, view.open(ROOT / "f", os.O_RDONLY), 8 * SECTOR_BYTES, 0)
    for start in range(0, 8 * SECTOR_BYTES, SECTOR_BYTES):
        sectors = {version[start : start + SECTOR_BYTES] for version in versions}
        assert after[start : start + SECTOR_BYTES] in sectors


@given(seed=SEEDS, disk_seed=st.integers(0, 99))
def test_of_a_folders_changes_the_first_few_survive(seed: int, disk_seed: int) -> None:
    disk, rng = Disk(seed=disk_seed), random.Random(seed)
    files = CrashFS(disk)
    files.make_folder(ROOT)
    files.sync(files.open(Path("/"), os.O_RDONLY))
    listings = [set[str]()]
    for step in range(rng.randrange(8)):
        names = sorted(files.listdir(ROOT))
        if names and rng.random() < 0.3:
            files.unlink(ROOT / rng.choice(names))
        elif names and rng.random() < 0.5:
            files.rename(ROOT / rng.choice(names), ROOT / f"renamed{step}")
        else:
            files.close(files.open(ROOT / f"new{step}", os.O_RDWR | os.O_CREAT))
        if rng.random() < 0.2:
            files.sync(files.open(ROOT, os.O_RDONLY))
            listings.clear()
        listings.append(set(files.listdir(ROOT)))
    disk.power_cut()
    assert set(CrashFS(disk).listdir(ROOT)) in listings


def test_power_cuts_tear_lose_and_keep() -> None:
    """All three happen, over a few seeds."""
    seen: set[str] = set()
    for seed in range(40):
        disk = Disk(seed=seed)
        files = CrashFS(disk)
        fd = files.open(Path("/f"), os.O_RDWR | os.O_CREAT)
        files.sync(files.open(Path("/"), os.O_RDONLY))
        files.pwritev(fd, [b"x" * 4 * SECTOR_BYTES], 0)
        disk.power_cut()
        data = bytes(disk.at("/f").data)
        seen.add("kept" if data == b"x" * 4 * SECTOR_BYTES else "lost" if not data.strip(b"\0") else "torn")
    assert seen == {"kept", "lost", "torn"}


def test_a_full_disk_refuses_and_freed_room_is_used_again() -> None:
    disk = Disk(capacity_bytes=6 * BLOCK_BYTES)
    files = CrashFS(disk)
    one = files.open(Path("/one"), os.O_RDWR | os.O_CREAT)
    files.allocate(one, 4 * BLOCK_BYTES)
    two = files.open(Path("/two"), os.O_RDWR | os.O_CREAT)
    with pytest.raises(OSError) as full:
        files.allocate(two, 2 * BLOCK_BYTES)
    assert full.value.errno == errno.ENOSPC
    files.unlink(Path("/one"))
    with pytest.raises(OSError):
        files.allocate(two, 2 * BLOCK_BYTES)  # a descriptor still holds it
    files.close(one)
    files.allocate(two, 2 * BLOCK_BYTES)
    files.truncate(Path("/two"), 0)
    assert disk.used_bytes == BLOCK_BYTES


def test_a_removed_tree_is_gone_and_its_descriptors_are_good() -> None:
    disk = Disk()
    files = CrashFS(disk)
    files.make_folder(ROOT / "sub")
    fd = files.open(ROOT / "sub" / "f", os.O_RDWR | os.O_CREAT)
    disk.remove_tree(ROOT)
    with pytest.raises(FileNotFoundError):
        files.stat(ROOT)
    assert files.pwritev(fd, [b"still here"], 0) == 10
    files.close(fd)
    files.make_folder(ROOT)
    assert files.listdir(ROOT) == [] and disk.used_bytes == 2 * BLOCK_BYTES


def test_bit_rot_is_for_good() -> None:
    disk = Disk()
    files = CrashFS(disk)
    fd = files.open(Path("/f"), os.O_RDWR | os.O_CREAT)
    files.pwritev(fd, [b"aaaa"], 0)
    disk.orderly_shutdown()
    disk.flip(Path("/f"), 2)
    disk.power_cut()
    assert bytes(disk.at("/f").data) == b"aa \x61"
