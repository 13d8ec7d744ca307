"""The NVMe tier keeps the contract on real files, across restarts, and within its cap."""

from __future__ import annotations

import logging
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest

from pagetier.kvstore.block import BlockName, BlockStatus
from pagetier.kvstore.errors import ConfigError, TierUnavailable
from pagetier.kvstore.nvme.fault_fs import FaultFS
from pagetier.kvstore.nvme.files import Files
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.record import address_bytes
from pagetier.kvstore.tier import BlockRead, BlockWrite, Tier
from tests.kvstore.tier_contract import (
    DOMAIN,
    OTHER_PART,
    PART,
    PAYLOAD_BYTES,
    TierContract,
    addresses,
    assert_readable,
    chain,
    get,
    payload_of,
    put,
    soon,
)

OK, MISS, EXISTS, DROPPED = BlockStatus.OK, BlockStatus.MISS, BlockStatus.EXISTS, BlockStatus.DROPPED
CORRUPT = BlockStatus.CORRUPT
CAPACITY = 8 << 20
RECORD = 4096 + PAYLOAD_BYTES


class TestNvmeTier(TierContract):
    @pytest.fixture(params=["auto", "buffered"])
    def tier(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Tier]:
        with NvmeTier(tmp_path / "nvme", CAPACITY, DOMAIN, io=request.param) as tier:
            yield tier


def opened(path: Path, capacity: int = CAPACITY, **settings: Any) -> NvmeTier:
    """A tier that only looks at other writers when told to."""
    return NvmeTier(path, capacity, DOMAIN, **{"refresh_s": 0, "fsync": "none", **settings})


def disk_bytes(path: Path) -> int:
    """What `du` says."""
    return sum(entry.lstat().st_blocks * 512 for entry in [path, *path.rglob("*")])


def packed(names: list[BlockName]) -> list[bytes]:
    return [address_bytes(address) for address in addresses(names)]


def segments(path: Path) -> list[Path]:
    return sorted(path.rglob("*.seg"))


def damage(path: Path, offset: int, flip: int = 0x01) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ flip]))


# ---- restarts


@pytest.mark.parametrize("fsync", ["none", "segment", "always"])
def test_records_survive_a_clean_restart(tmp_path: Path, fsync: str) -> None:
    names = chain(300)  # several segments
    with opened(tmp_path, fsync=fsync) as tier:
        assert put(tier, names) == [OK] * 300
        tier.delete(addresses(names[290:]))
    with opened(tmp_path) as tier:
        assert tier.lookup(addresses(names), soon()) == 290
        assert_readable(tier, names[:290])
        assert put(tier, names) == [EXISTS] * 290 + [OK] * 10
        tier.check()


def test_records_survive_a_crash(tmp_path: Path) -> None:
    names = chain(200)
    crashed = opened(tmp_path, fsync="none")
    put(crashed, names)
    crashed.delete(addresses(names[150:151]))
    crashed._folder.detach()  # what the kernel does when a process dies: its lock goes, nothing is closed
    with opened(tmp_path) as tier:
        assert tier.lookup(addresses(names), soon()) == 150
        assert_readable(tier, names[:150] + names[151:])
        assert tier._folder.writer == tmp_path / "00"
        tier.check()
    with opened(tmp_path) as tier:
        assert_readable(tier, names[:150] + names[151:])
    crashed.close()


def test_a_restart_reads_footers_only(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        put(tier, chain(300))
    files = FaultFS()
    with opened(tmp_path, files=files) as tier:
        assert tier.counters().blocks == 300
        count = len(segments(tmp_path))
        assert files.calls["preadv"] <= 3 * count + 1  # page 0, map, footer; and the probe of direct I/O


def test_empty_segments_leave_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        put(tier, chain(1))
    for _ in range(3):
        with opened(tmp_path):
            pass
    assert len(segments(tmp_path)) == 1


def test_folders_and_files_are_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "nvme"
    (path / "00").mkdir(parents=True, mode=0o755)
    path.chmod(0o755)
    with opened(path) as tier:
        put(tier, chain(3))
        tier.put_identity(DOMAIN, b"identity")
        for entry in path.rglob("*"):
            assert stat.S_IMODE(entry.stat().st_mode) == (0o700 if entry.is_dir() else 0o600), entry
    with opened(tmp_path / "made"):
        assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700


def test_identities_are_small_files_that_survive(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        tier.put_identity(DOMAIN, b"identity")
    assert (tmp_path / "identities" / DOMAIN.hex()).read_bytes() == b"identity"
    with opened(tmp_path) as tier:
        assert tier.identities() == {DOMAIN: b"identity"}


# ---- cap and eviction


@pytest.mark.parametrize("capacity", [256 << 10, 1 << 20, 3_000_000, 8 << 20])
def test_the_cap_holds_in_disk_blocks_after_every_put(tmp_path: Path, capacity: int) -> None:
    with opened(tmp_path, capacity) as tier:
        for seed in range(2 * capacity // (8 * RECORD) + 3):
            put(tier, chain(8, seed=seed))
            assert disk_bytes(tmp_path) <= capacity
        assert tier.counters().evictions > 0
        tier.check()
    for _ in range(3):
        with opened(tmp_path, capacity) as tier:
            assert disk_bytes(tmp_path) <= capacity
            assert tier.counters().blocks > 0
            put(tier, chain(8, seed=10_000))
            assert disk_bytes(tmp_path) <= capacity


def test_a_smaller_cap_takes_effect_before_the_next_write(tmp_path: Path) -> None:
    with opened(tmp_path, 8 << 20) as tier:
        for seed in range(60):
            put(tier, chain(8, seed=seed))
    with opened(tmp_path, 2 << 20) as tier:
        assert put(tier, chain(2, seed=99)) == [OK] * 2
        assert disk_bytes(tmp_path) <= 2 << 20


def test_what_can_never_fit_is_dropped(tmp_path: Path) -> None:
    with opened(tmp_path, 256 << 10) as tier:
        (name,) = chain(1)
        assert tier.put([BlockWrite(name, PART, memoryview(bytes(1 << 20)))], soon()) == [DROPPED]
        assert put(tier, [name]) == [OK]


def test_a_record_larger_than_a_segment_gets_a_larger_one(tmp_path: Path) -> None:
    with opened(tmp_path, 8 << 20, segment_bytes=64 << 10) as tier:
        (name,) = chain(1)
        payload = payload_of(name, nbytes=1 << 20)
        assert tier.put([BlockWrite(name, PART, memoryview(payload))], soon()) == [OK]
        buffer = bytearray(1 << 20)
        assert tier.get([BlockRead(name, PART, memoryview(buffer))], soon()) == [OK]
        assert buffer == payload
        tier.check()


def test_eviction_keeps_what_is_used(tmp_path: Path) -> None:
    used = chain(12, seed=1)
    with opened(tmp_path, 2 << 20) as tier:
        put(tier, used)
        for seed in range(100, 200):
            tier.touch(addresses(used))
            put(tier, chain(8, seed=seed))
            assert tier.lookup(addresses(used), soon()) == 12, f"after {seed}"
        assert_readable(tier, used)
        assert tier.counters().evictions >= 500
        tier.check()


def test_hot_records_move_when_their_segment_goes(tmp_path: Path) -> None:
    """Every segment holds something used; the used parts move on, the rest goes."""
    with opened(tmp_path, 1 << 20, segment_bytes=128 << 10) as tier:
        hot = [chain(1, seed=seed) for seed in range(12)]
        for seed in range(12):
            put(tier, hot[seed])
            put(tier, chain(8, seed=50 + seed))  # fills the segment
        hot = [names for names in hot if tier.lookup(addresses(names), soon())]
        first = {place.segment for names in hot for place in tier._index.find(packed(names)) if place is not None}
        assert len(first) == len(hot) >= 6
        for seed in range(100, 130):
            for names in hot:
                tier.touch(addresses(names))
            put(tier, chain(4, seed=seed))
        for names in hot:
            assert_readable(tier, names)
        assert not [segment for segment in first if tier._catalog.get(segment) is not None]
        tier.check()


def test_a_hot_child_without_its_parent_is_not_kept(tmp_path: Path) -> None:
    with opened(tmp_path, 1 << 20, segment_bytes=128 << 10) as tier:
        parent, child = chain(2, seed=1)
        other = chain(1, seed=2)
        put(tier, [parent, child, *other])
        put(tier, chain(5, seed=3))
        tier.delete(addresses([parent]))
        for seed in range(100, 140):
            tier.touch(addresses([child]))
            tier.touch(addresses(other))
            put(tier, chain(8, seed=seed))
        assert tier.lookup(addresses(other), soon()) == 1
        assert tier.lookup(addresses([child]), soon()) == 0


def test_one_block_twice_in_a_batch_is_stored_once(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        a, b = chain(2)
        assert put(tier, [a, b, a]) == [OK, OK, EXISTS]
        assert tier.counters().bytes_written == 2 * RECORD
        assert_readable(tier, [a, b, a])


@pytest.fixture
def quick_turns() -> Iterator[None]:
    """Threads take turns often: more happens between each other's steps, and one that waits for files does not wait
    5 ms for the interpreter after each of them while others compute."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_turns")
def test_readers_see_right_bytes_or_a_miss_while_their_segments_go(tmp_path: Path) -> None:
    failures: list[str] = []
    stop = threading.Event()
    with opened(tmp_path, 1 << 20, segment_bytes=128 << 10) as tier, opened(tmp_path, 1 << 20) as other:
        put(other, chain(4, seed=1_000_000))

        def read(offset: int) -> None:
            seed = offset
            while not stop.is_set():
                seed = (seed + 7) % 90
                names = chain(6, seed=seed)
                statuses, buffers = get(tier, names)
                for name, status, buffer in zip(names, statuses, buffers, strict=True):
                    if status is not MISS and (status is not OK or buffer != payload_of(name)):
                        failures.append(f"{status} for chain {seed}")

        threads = [threading.Thread(target=read, args=(offset,)) for offset in range(3)]
        for thread in threads:
            thread.start()
        for seed in range(90):
            put(tier if seed % 4 else other, chain(6, seed=seed))
        stop.set()
        for thread in threads:
            thread.join()
        assert not failures
        assert tier.counters().corrupt == tier.counters().errors == 0
        tier.refresh()
        tier.check()


def test_eviction_takes_tails_before_heads(tmp_path: Path) -> None:
    long = chain(60, seed=1)
    with opened(tmp_path, 1 << 20, segment_bytes=128 << 10) as tier:
        for start in range(0, 60, 4):
            put(tier, long[start : start + 4])
        before = tier.lookup(addresses(long), soon())
        put(tier, chain(40, seed=2))
        after = tier.lookup(addresses(long), soon())
        assert 0 < after < before
        held = [name for name in long if tier.lookup(addresses([name]), soon())]
        assert len(held) - after < 10  # of the tail only what shares a segment with the other chain


def test_recency_survives_a_restart(tmp_path: Path) -> None:
    first, second = chain(20, seed=1), chain(20, seed=2)
    with opened(tmp_path, 4 << 20, segment_bytes=256 << 10) as tier:
        put(tier, first)
        put(tier, second)
        tier.refresh()
        tier.touch(addresses(first))
        tier.refresh()
    with opened(tmp_path, 1 << 20, segment_bytes=256 << 10) as tier:
        put(tier, chain(20, seed=3))
        put(tier, chain(10, seed=4))
        assert tier.lookup(addresses(first), soon()) > tier.lookup(addresses(second), soon())


# ---- several writers


def test_two_writers_of_one_path_share_and_are_both_right(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as two:
        a, b = chain(150, seed=1), chain(150, seed=2)
        assert put(one, a) == [OK] * 150
        assert put(two, b) == [OK] * 150
        assert {path.parent.name for path in segments(tmp_path)} == {"00", "01"}
        one.refresh()
        two.refresh()
        for tier in (one, two):
            assert_readable(tier, a)
            assert_readable(tier, b)
            assert put(tier, a + b) == [EXISTS] * 300
        more = chain(160, seed=1)[150:]
        assert put(one, more) == [OK] * 10
        assert two.lookup(addresses(more), soon()) == 0
        two.refresh()
        assert_readable(two, more)
        one.check()
        two.check()


def test_a_running_tier_finds_what_another_wrote_by_itself(tmp_path: Path) -> None:
    names = chain(20)
    with opened(tmp_path) as one, NvmeTier(tmp_path, CAPACITY, DOMAIN, refresh_s=0.01) as two:
        put(one, names)
        until = time.monotonic() + 10
        while two.lookup(addresses(names), soon()) < 20 and time.monotonic() < until:
            time.sleep(0.01)
        assert_readable(two, names)


def test_two_writers_stay_under_one_cap_and_neither_starves(tmp_path: Path) -> None:
    capacity = 2 << 20
    with opened(tmp_path, capacity) as one, opened(tmp_path, capacity) as two:
        for seed in range(80):
            assert put(one, chain(8, seed=seed)) == [OK] * 8
        for seed in range(80, 160):
            assert put(two, chain(8, seed=seed)) == [OK] * 8
            assert disk_bytes(tmp_path) <= capacity
        for seed in range(160, 200):
            for tier in (one, two):
                put(tier, chain(8, seed=seed))
                assert disk_bytes(tmp_path) <= capacity
        for tier in (one, two):
            tier.refresh()
            tier.check()
            assert tier.counters().corrupt == 0


def test_a_segment_evicted_by_another_is_a_miss(tmp_path: Path) -> None:
    names = chain(100, seed=1)
    with opened(tmp_path, 2 << 20) as one, opened(tmp_path, 2 << 20) as two:
        put(one, names)
        assert_readable(one, names)  # descriptors are open
        for seed in range(10, 60):
            put(two, chain(8, seed=seed))
        statuses, buffers = get(one, names)
        assert set(statuses) <= {OK, MISS} and MISS in statuses
        for name, status, buffer in zip(names, statuses, buffers, strict=True):
            assert status is MISS or buffer == payload_of(name)
        assert one.counters().corrupt == 0
        one.refresh()
        one.check()


def test_a_replaced_segment_of_another_writer_is_read_anew(tmp_path: Path) -> None:
    old, new = chain(4, seed=1), chain(4, seed=2)
    one, two = opened(tmp_path), opened(tmp_path)
    put(one, old)
    two.refresh()
    assert_readable(two, old)
    one.close()
    path = segments(tmp_path)[0]
    path.unlink()
    with opened(tmp_path) as three:
        put(three, new)
        (newer,) = segments(tmp_path)
        assert newer > path, "no name is given twice"
        two.refresh()
        assert two.lookup(addresses(old), soon()) == 0
        assert_readable(two, new)
        two.check()
    two.close()


def test_a_dead_writers_folder_is_taken_over(tmp_path: Path) -> None:
    with opened(tmp_path) as one:
        two = opened(tmp_path)
        put(two, chain(10, seed=2))
        two._folder.detach()
        put(one, chain(10, seed=1))
        with opened(tmp_path) as three:
            assert three._folder.writer == tmp_path / "01"
            assert_readable(three, chain(10, seed=2))
            assert_readable(three, chain(10, seed=1))
        two.close()


def test_the_hundred_and_first_writer_reads_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from pagetier.kvstore.nvme.folder import Folder

    others = [Folder(Files(), tmp_path) for _ in range(100)]
    for folder in others:
        folder.attach()
        if folder.writer is None:
            folder.add_writer()
    with caplog.at_level(logging.WARNING), opened(tmp_path) as tier:
        assert put(tier, chain(2)) == [DROPPED] * 2
        assert tier.try_write(soon()) is DROPPED
        assert tier.lookup(addresses(chain(2)), soon()) == 0
    assert "100 writers are taken" in caplog.text
    for folder in others:
        folder.detach()


# ---- damage


def test_damage_is_corrupt_once_then_a_miss_then_writable_again(tmp_path: Path) -> None:
    names = chain(5)
    with opened(tmp_path, io="buffered") as tier:
        put(tier, names)
        start = min(place.offset for _, place in tier._index.places())
        damage(segments(tmp_path)[0], start + 2 * RECORD + 4096 + 100)
        assert get(tier, names)[0] == [OK, OK, CORRUPT, OK, OK]
        assert tier.counters().corrupt == 1
        assert tier.lookup(addresses(names), soon()) == 2
        assert get(tier, names)[0] == [OK, OK, MISS, OK, OK]
        assert tier.counters().corrupt == 1
        tier.check()
    with opened(tmp_path, io="buffered") as tier:  # remembered
        assert get(tier, names)[0] == [OK, OK, MISS, OK, OK]
        assert tier.counters().corrupt == 0
        assert put(tier, names) == [EXISTS, EXISTS, OK, EXISTS, EXISTS]
        assert_readable(tier, names)
    with opened(tmp_path, io="buffered") as tier:
        assert_readable(tier, names)


def test_every_flipped_byte_of_a_record_is_never_served(tmp_path: Path) -> None:
    (name,) = chain(1)
    payload = payload_of(name, nbytes=4096)
    with opened(tmp_path, 2 << 20, segment_bytes=64 << 10, io="buffered") as tier:
        for at in [*range(0, 240), *range(240, 4096, 61), *range(4096, 8192, 13)]:
            assert tier.put([BlockWrite(name, PART, memoryview(payload))], soon()) == [OK]
            ((_, place),) = tier._index.places()
            segment = tier._catalog.get(place.segment)
            assert segment is not None
            damage(segment.path, place.offset + at, 1 << (at % 8))
            buffer = bytearray(4096)
            assert tier.get([BlockRead(name, PART, memoryview(buffer))], soon()) == [CORRUPT], f"byte {at}"
        assert tier.counters().blocks == 0
        tier.check()


def test_a_cut_segment_serves_what_is_left(tmp_path: Path) -> None:
    names = chain(20)
    with opened(tmp_path) as tier:
        put(tier, names)
    (path,) = segments(tmp_path)
    whole = path.read_bytes()
    for size in (len(whole) - 4096, 15 * RECORD, 6 * RECORD + 5000, 8192, 10, 0):
        path.write_bytes(whole[:size])
        with opened(tmp_path) as tier:
            statuses, buffers = get(tier, names)
            for name, status, buffer in zip(names, statuses, buffers, strict=True):
                assert status is MISS or (status is OK and buffer == payload_of(name))
            assert tier.counters().blocks == statuses.count(OK) == max(0, min(20, (size - 8192) // RECORD))
            tier.check()


def test_foreign_files_are_left_alone_until_room_is_needed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "00").mkdir()
    (tmp_path / "00" / f"{7:016x}.seg").write_bytes(os.urandom(100_000))
    (tmp_path / "00" / "notes.txt").write_text("mine")
    (tmp_path / "holiday.jpg").write_bytes(bytes(10_000))
    with opened(tmp_path, 1 << 20) as tier:
        for seed in range(20):
            assert put(tier, chain(8, seed=seed)) == [OK] * 8
        assert not (tmp_path / "00" / f"{7:016x}.seg").exists()
    assert (tmp_path / "00" / "notes.txt").exists() and (tmp_path / "holiday.jpg").exists()
    assert caplog.text.count("is no segment of this version") == 1


# ---- memory and I/O


def aligned(nbytes: int) -> memoryview:
    return memoryview(mmap(-1, nbytes))


@pytest.mark.parametrize("write_io", ["direct", "buffered"])
@pytest.mark.parametrize("read_io", ["direct", "buffered"])
def test_direct_and_buffered_read_each_other(tmp_path: Path, write_io: str, read_io: str) -> None:
    names = chain(8)
    try:
        tier = opened(tmp_path, io=write_io)
    except ConfigError as error:
        pytest.skip(str(error))
    with tier:
        sources = [aligned(PAYLOAD_BYTES) for _ in names]
        for name, source in zip(names, sources, strict=True):
            source[:] = payload_of(name)
        writes = [BlockWrite(name, PART, source) for name, source in zip(names, sources, strict=True)]
        assert tier.put(writes, soon()) == [OK] * 8
        assert_readable(tier, names)  # unaligned destinations
    with opened(tmp_path, io=read_io) as tier:
        buffers = [aligned(PAYLOAD_BYTES) for _ in names]
        reads = [BlockRead(name, PART, buffer) for name, buffer in zip(names, buffers, strict=True)]
        assert tier.get(reads, soon()) == [OK] * 8
        assert [bytes(buffer) for buffer in buffers] == [payload_of(name) for name in names]


def test_neighbours_travel_together(tmp_path: Path) -> None:
    names = chain(64)
    files = FaultFS()
    with opened(tmp_path, files=files) as tier:
        files.calls.clear()
        put(tier, names)
        assert files.calls["pwritev"] <= 4  # page 0, data, commit block
        files.calls.clear()
        assert_readable(tier, [*names[32:], *names[:32]])
        assert files.calls["preadv"] == 1


def test_short_reads_and_writes_are_carried_on(tmp_path: Path) -> None:
    names = chain(6)
    with opened(tmp_path, files=FaultFS(short=1000)) as tier:
        assert put(tier, names) == [OK] * 6
        assert_readable(tier, names)
    with opened(tmp_path) as tier:
        assert_readable(tier, names)


def test_odd_payload_sizes_and_parts(tmp_path: Path) -> None:
    names = chain(10)
    sizes = [1, 100, 4095, 4096, 4097, 5000, 8191, 12_288, 20_001, 0]
    with opened(tmp_path) as tier:
        for part in (PART, OTHER_PART):
            payloads = [payload_of(name, part, size) for name, size in zip(names, sizes, strict=True)]
            writes = [BlockWrite(n, part, memoryview(p)) for n, p in zip(names, payloads, strict=True)]
            assert tier.put(writes, soon()) == [OK] * 10
            buffers = [bytearray(size) for size in sizes]
            reads = [BlockRead(n, part, memoryview(b)) for n, b in zip(names, buffers, strict=True)]
            assert tier.get(reads, soon()) == [OK] * 10
            assert [bytes(buffer) for buffer in buffers] == payloads
        tier.check()


# ---- settings


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"io": "mmap"}, "--kv-nvme-io"),
        ({"fsync": "sometimes"}, "--kv-nvme-fsync"),
        ({"capacity": 1000}, "--kv-nvme-size"),
    ],
)
def test_settings_that_cannot_be_are_named(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        opened(tmp_path, **settings)


def test_after_close_everything_is_a_status(tmp_path: Path) -> None:
    names = chain(2)
    tier = opened(tmp_path)
    put(tier, names)
    tier.close()
    assert get(tier, names)[0] == [BlockStatus.ERROR] * 2
    assert set(put(tier, names)) == {BlockStatus.ERROR}
    with pytest.raises(TierUnavailable, match="closed"):
        tier.lookup(addresses(names), soon())
