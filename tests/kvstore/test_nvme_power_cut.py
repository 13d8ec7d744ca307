"""The NVMe tier on a disk that loses what was not synced: what it promised is there, and the cap holds again."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from pagetier.kvstore.block import Address, BlockStatus
from pagetier.kvstore.nvme.crash_fs import CrashFS, Killed
from pagetier.kvstore.nvme.disk import BLOCK_BYTES, Disk
from pagetier.kvstore.nvme.fault_fs import FaultFS, os_error
from pagetier.kvstore.nvme.striped import StripedTier
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.tier import BlockRead, BlockWrite
from tests.kvstore.tier_contract import DOMAIN, PART, chain, payload_of

PATH = Path("/var/cache/pagetier/nvme")  # nothing of it is there at first
CAPACITY = 512 << 10
SEGMENT = 96 << 10
NO_DEADLINE_S = 1e6
OK, MISS = BlockStatus.OK, BlockStatus.MISS


def opened(disk: Disk, fsync: str = "segment") -> NvmeTier:
    files = CrashFS(disk)
    return NvmeTier(PATH, CAPACITY, DOMAIN, io="buffered", fsync=fsync, segment_bytes=SEGMENT, files=files, refresh_s=0)


def put(tier: NvmeTier, seed: int, num_blocks: int = 6) -> list[BlockStatus]:
    writes = [BlockWrite(name, PART, memoryview(payload_of(name))) for name in chain(num_blocks, seed)]
    return tier.put(writes, NO_DEADLINE_S)


def read(tier: NvmeTier, seed: int, num_blocks: int = 6) -> list[BlockStatus]:
    """Statuses; whatever is OK holds its own bytes."""
    names = chain(num_blocks, seed)
    buffers = [bytearray(len(payload_of(name))) for name in names]
    reads = [BlockRead(name, PART, memoryview(buffer)) for name, buffer in zip(names, buffers, strict=True)]
    statuses = tier.get(reads, NO_DEADLINE_S)
    for name, buffer, status in zip(names, buffers, statuses, strict=True):
        assert status is not OK or buffer == payload_of(name)
    return statuses


def used_bytes(disk: Disk) -> int:
    return disk.used_bytes - BLOCK_BYTES * (len(PATH.parts) - 1)  # less the folders above PATH


@pytest.mark.parametrize("disk_seed", range(12))
def test_always_means_that_what_was_answered_outlives_a_power_cut(disk_seed: int) -> None:
    """The very first put too: all folders were made for it."""
    disk = Disk(seed=disk_seed)
    tier = opened(disk, fsync="always")
    assert put(tier, 1) == [OK] * 6
    assert put(tier, 2, 2) == [OK] * 2
    disk.power_cut()
    with opened(disk, fsync="always") as tier:
        assert read(tier, 1) == [OK] * 6
        assert read(tier, 2, 2) == [OK] * 2
        tier.check()


@pytest.mark.parametrize("disk_seed", range(12))
def test_what_several_folders_answered_outlives_a_power_cut(disk_seed: int) -> None:
    """Killed at every operation of a put over two folders: each keeps what it had answered."""
    for dies_after in range(0, 60, 3):
        disk = Disk(seed=disk_seed)

        def both(files: CrashFS, disk: Disk = disk) -> StripedTier:
            settings: dict[str, Any] = {"io": "buffered", "fsync": "always", "segment_bytes": SEGMENT, "refresh_s": 0}
            tiers = [NvmeTier(PATH / name, CAPACITY, DOMAIN, files=files, **settings) for name in "ab"]
            return StripedTier(tiers, files.now_s, in_turn=True)

        files = CrashFS(disk)
        tier, answered = both(files), dict[str, BlockStatus]()
        files.dies_after = dies_after
        with contextlib.suppress(Killed):
            for seed in range(3):
                for name in chain(6, seed):
                    write = BlockWrite(name, PART, memoryview(payload_of(name)))
                    (answered[name.key.hex()],) = tier.put([write], NO_DEADLINE_S)
        disk.power_cut()
        with both(CrashFS(disk)) as tier:
            for seed in range(3):
                names = chain(6, seed)
                for name in names:
                    read = BlockRead(name, PART, memoryview(bytearray(len(payload_of(name)))))
                    (status,) = tier.get([read], NO_DEADLINE_S)
                    assert status is not OK or read.destination == payload_of(name)
                    assert status is OK or answered.get(name.key.hex()) is not OK, f"dies after {dies_after}"
            tier.check()


@pytest.mark.parametrize("disk_seed", range(12))
def test_segment_means_that_a_power_cut_costs_the_open_segment(disk_seed: int) -> None:
    disk = Disk(seed=disk_seed)
    tier = opened(disk)
    for seed in range(4):
        put(tier, seed)
    closed = {path for path in disk.paths_below(PATH) if path.suffix == ".seg"}
    open_segment = max(closed)
    kept = [
        (seed, i)
        for seed in range(4)
        for i, name in enumerate(chain(6, seed))
        for address, place in tier._index.places()
        if address.startswith(name.key)
        and (segment := tier._catalog.get(place.segment)) is not None
        and segment.path != open_segment
    ]
    assert len(kept) > 6
    disk.power_cut()
    with opened(disk) as tier:
        for seed, i in kept:
            assert read(tier, seed)[i] is OK
        tier.check()


@pytest.mark.parametrize("fsync", ["none", "segment", "always"])
@pytest.mark.parametrize("disk_seed", range(12))
def test_after_a_power_cut_the_cap_holds_and_nothing_is_wrong(disk_seed: int, fsync: str) -> None:
    """Segments that were evicted may come back with the power; the start evicts for them."""
    disk = Disk(seed=disk_seed)
    for round_ in range(3):
        tiers = [opened(disk, fsync), opened(disk, fsync)]
        assert used_bytes(disk) <= CAPACITY, "the start left more than the cap"
        for seed in range(30):
            put(tiers[seed // 7 % 2], 100 * round_ + seed)
            assert used_bytes(disk) <= CAPACITY
        tier = tiers[0]
        tier.refresh()
        for seed in range(100 * (round_ + 1)):
            assert set(read(tier, seed)) <= {OK, MISS, BlockStatus.CORRUPT}
        tier.check()
        disk.power_cut()


@pytest.mark.parametrize("disk_seed", range(8))
def test_a_kill_before_the_sync_of_a_closed_segment_is_made_good_by_the_next_start(disk_seed: int) -> None:
    disk = Disk(seed=disk_seed)
    tier = opened(disk)
    put(tier, 1)
    files = tier._files
    assert isinstance(files, CrashFS)

    def kill_at_sync(op: str) -> None:
        if op == "sync":
            files.kill()
            raise Killed(op)

    files.on_operation = kill_at_sync
    with pytest.raises(Killed):
        tier.close()
    opened(disk)  # and no more than that
    disk.power_cut()
    with opened(disk) as tier:
        assert read(tier, 1) == [OK] * 6


@pytest.mark.parametrize("nth", range(1, 6))
def test_what_a_failed_creation_leaves_is_counted(nth: int) -> None:
    """The disk refuses the name of the new segment, and then to remove what was made for it."""
    disk = Disk()
    crash_fs = CrashFS(disk)
    files = FaultFS(crash_fs)
    tier = NvmeTier(PATH, CAPACITY, DOMAIN, io="buffered", segment_bytes=SEGMENT, files=files, refresh_s=0)
    for seed in range(20):
        put(tier, seed, 2)
        tier._log.close_open()  # small ones: to evict one makes little room
    is_failing = False

    def rule(op: str, target: Any, calls: int) -> OSError | None:
        nonlocal is_failing
        is_failing |= op == "rename" and calls == nth
        refused = op == "rename" or (op == "unlink" and str(target).endswith(".tmp"))
        return os_error(errno.ENOSPC) if is_failing and refused else None

    def check(op: str) -> None:
        disk.now_ns += 1000  # so that the next attempt has another name
        assert used_bytes(disk) <= CAPACITY, f"over the cap at {op}"

    files.calls.clear()
    files.rule, crash_fs.on_operation = rule, check
    for seed in range(20, 26):
        put(tier, seed)
    files.well()
    assert put(tier, 30) == [OK] * 6
    tier.check()


def watched(disk: Disk) -> CrashFS:
    files = CrashFS(disk)

    def check(op: str) -> None:
        assert used_bytes(disk) <= CAPACITY, f"over the cap before {op}"

    files.on_operation = check
    return files


def filled(free_blocks: int) -> Disk:
    """PATH with closed segments up to that much below its cap, as a power cut may leave it: all of them live."""
    disk = Disk()
    with opened(disk) as tier:
        for seed in range(30):
            put(tier, seed)
    filler = disk.make(str(PATH / "00" / f"{1:016x}.seg"), stat.S_IFREG | 0o600)
    disk.allocate(filler, CAPACITY - used_bytes(disk) - free_blocks * BLOCK_BYTES)
    assert used_bytes(disk) == CAPACITY - free_blocks * BLOCK_BYTES
    return disk


@pytest.mark.parametrize("free_blocks", range(5))
@pytest.mark.parametrize("what", ["identities", "writers", "tries", "damage"])
def test_what_takes_room_besides_segments_makes_it_first(what: str, free_blocks: int) -> None:
    """Nothing leans on the slack that a new segment leaves: after a power cut there may be none."""
    disk = filled(free_blocks)
    settings: dict[str, Any] = {"io": "buffered", "segment_bytes": SEGMENT, "refresh_s": 0}
    tiers = [NvmeTier(PATH, CAPACITY, DOMAIN, files=watched(disk), **settings)]
    blocks = tiers[0].counters().blocks
    disk.allocate(disk.at(str(PATH / "00" / "lock")), CAPACITY - used_bytes(disk) - free_blocks * BLOCK_BYTES)
    if what == "identities":
        for number in range(20):
            tiers[0].put_identity(bytes([number]) * 32, bytes(5000))
        assert len(tiers[0].identities()) == 20
    elif what == "writers":
        tiers += [NvmeTier(PATH, CAPACITY, DOMAIN, files=watched(disk), **settings) for _ in range(8)]
        assert tiers[-1]._folder.writer == PATH / "08"
    elif what == "tries":
        assert tiers[0].try_write(NO_DEADLINE_S) is OK
    else:
        tiers[0].quarantine([Address(name.key, PART) for name in chain(6, 29)], "a test")
        tiers[0].refresh()
    assert used_bytes(disk) <= CAPACITY
    assert tiers[0].counters().blocks > blocks // 3, "no more goes than has to"
    assert put(tiers[0], 31) == [OK] * 6
    for tier in tiers:
        tier.check()
        tier.close()


def test_identities_that_found_no_room_are_written_with_the_next_put() -> None:
    disk = Disk()
    tier, other = opened(disk), CrashFS(disk)
    put(tier, 1, 1)  # makes what holds the lock below
    fd = other.open(PATH / "lock", os.O_RDWR)
    assert other.lock(fd)  # somebody makes room, for long
    tier.put_identity(DOMAIN, b"identity")
    assert not tier.identities()
    other.close(fd)
    put(tier, 2, 1)
    assert tier.identities() == {DOMAIN: b"identity"}


def test_a_killed_write_of_an_identity_leaves_nothing_for_long() -> None:
    disk = Disk()
    killed = opened(disk)
    files = killed._files
    assert isinstance(files, CrashFS)
    files.dies_after = 3
    with pytest.raises(Killed):
        killed.put_identity(DOMAIN, b"identity")
    assert any(path.suffix == ".tmp" for path in disk.paths_below(PATH))
    with opened(disk) as tier:
        put(tier, 1)
        assert not any(path.suffix == ".tmp" for path in disk.paths_below(PATH))


def test_an_empty_segment_gives_its_blocks_back_whoever_has_it_open() -> None:
    disk = Disk()
    writer = opened(disk)
    put(writer, 1)
    writer._log.roll(8192, NO_DEADLINE_S)
    (empty,) = [s for s in writer._catalog.segments() if not s.closed]
    reader = CrashFS(disk)
    reader.open(empty.path, os.O_RDONLY)
    before = disk.used_bytes
    writer.close()
    assert disk.used_bytes == before - SEGMENT
    crashed = opened(disk)
    crashed._log.roll(8192, NO_DEADLINE_S)
    (empty,) = [s for s in crashed._catalog.segments() if not s.closed]
    reader.open(empty.path, os.O_RDONLY)
    before = disk.used_bytes
    crashed._files.kill()  # type: ignore[attr-defined]
    opened(disk).close()
    assert disk.used_bytes == before - SEGMENT


def test_a_reader_never_takes_a_new_segment_for_the_old_one_of_its_name() -> None:
    """Disks give the inode number of a removed file to the next one; names were given anew, too."""
    disk = Disk(reuses_numbers=True)
    reader = opened(disk)  # takes 00; the writer below takes 01
    writer = opened(disk)
    put(writer, 1)
    writer._log.close_open()
    reader.refresh()  # it knows the records now, and has no descriptor of their file
    (old,) = [path for path in disk.paths_below(PATH / "01") if path.suffix == ".seg"]
    old_number = disk.at(str(old)).number
    assert writer._log._evict(0, [])
    put(writer, 2)
    (new,) = [path for path in disk.paths_below(PATH / "01") if path.suffix == ".seg"]
    assert disk.at(str(new)).number == old_number and new > old
    assert set(read(reader, 1)) == {MISS}
    reader.refresh()
    assert read(reader, 2) == [OK] * 6
    assert read(writer, 2) == [OK] * 6
    assert writer.counters().corrupt == reader.counters().corrupt == 0
