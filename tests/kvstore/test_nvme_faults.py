"""A disk that is full, broken, forbidden or gone makes statuses; the tier comes back when the disk does."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagetier.kvstore.block import BlockStatus
from pagetier.kvstore.errors import TierUnavailable
from pagetier.kvstore.executor import SeededExecutor
from pagetier.kvstore.job import LoadDone, LookupDone
from pagetier.kvstore.nvme.fault_fs import FaultFS, os_error
from pagetier.kvstore.nvme.files import Files
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.store import TieredStore
from tests.kvstore.rig import Clock
from tests.kvstore.tier_contract import (
    DOMAIN,
    PART,
    PAYLOAD_BYTES,
    addresses,
    assert_readable,
    chain,
    get,
    payload_of,
    put,
    soon,
)

OK, MISS, EXISTS, ERROR = BlockStatus.OK, BlockStatus.MISS, BlockStatus.EXISTS, BlockStatus.ERROR
CAPACITY = 4 << 20


def opened(path: Path, files: FaultFS, **settings: Any) -> NvmeTier:
    return NvmeTier(path, CAPACITY, DOMAIN, refresh_s=0, files=files, segment_bytes=256 << 10, **settings)


def test_a_full_disk_is_an_error_and_passes(tmp_path: Path) -> None:
    files, names = FaultFS(), chain(10)
    with opened(tmp_path, files) as tier:
        files.full()
        assert put(tier, names) == [ERROR] * 10
        assert tier.counters().errors > 0
        assert tier.lookup(addresses(names), soon()) == 0
        assert not list(tmp_path.rglob("*.tmp"))
        files.well()
        assert put(tier, names) == [OK] * 10
        assert_readable(tier, names)
        tier.check()


def test_a_disk_filled_by_others_shrinks_the_cache_and_goes_on(tmp_path: Path) -> None:
    files = FaultFS()
    with opened(tmp_path, files) as tier:
        for seed in range(10):
            put(tier, chain(15, seed=seed))
        before = len(list(tmp_path.rglob("*.seg")))

        def full_while_many(op: str, target: Any, calls: int) -> OSError | None:
            return (
                os_error(errno.ENOSPC)
                if op == "allocate" and len(list(tmp_path.rglob("*.seg"))) >= before - 2
                else None
            )

        files.rule = full_while_many
        assert put(tier, chain(30, seed=99)) == [OK] * 30
        assert_readable(tier, chain(30, seed=99))
        tier.check()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("nth", range(1, 7))
@pytest.mark.parametrize("end", ["close", "crash"])
def test_any_write_may_fail_and_nothing_half_written_shows(tmp_path: Path, code: int, nth: int, end: str) -> None:
    files, names = FaultFS(), chain(12)
    with opened(tmp_path, files) as tier:
        put(tier, chain(2, seed=5))
        files.calls.clear()
        files.rule = lambda op, target, calls: os_error(code) if op == "pwritev" and calls == nth else None
        statuses = [put(tier, [name])[0] for name in names]
        assert statuses.count(ERROR) == 1
        files.well()
        found = get(tier, names)[0]
        assert found == [OK if status is OK else MISS for status in statuses]
        tier.check()
        assert tier.counters().corrupt == 0
        if end == "crash":
            files.broken("pwritev", "truncate")  # the segment cannot be closed
    with opened(tmp_path, FaultFS()) as tier:
        assert get(tier, names)[0] == found
        assert put(tier, names) == [EXISTS if status is OK else OK for status in statuses]
        assert_readable(tier, names)


@pytest.mark.parametrize(
    "op", ["open", "stat", "listdir", "allocate", "rename", "unlink", "truncate", "sync", "pwritev"]
)
@pytest.mark.parametrize("nth", [1, 2, 5, 11])
def test_any_operation_may_fail_once(tmp_path: Path, op: str, nth: int) -> None:
    files = FaultFS()
    written: list[int] = []
    with opened(tmp_path, files, fsync="always" if op == "sync" else "none") as tier:
        files.calls.clear()
        files.rule = lambda name, target, calls: os_error(errno.EIO) if name == op and calls == nth else None
        for seed in range(50):
            statuses = put(tier, chain(8, seed=seed))
            assert set(statuses) <= {OK, ERROR, BlockStatus.DROPPED}
            written += [seed] if set(statuses) == {OK} else []
        assert len(written) >= 47
        for seed in written[-10:]:
            statuses, buffers = get(tier, chain(8, seed=seed))
            for name, status, buffer in zip(chain(8, seed=seed), statuses, buffers, strict=True):
                assert status is MISS or (status is OK and buffer == payload_of(name))
        assert tier.counters().corrupt == 0
        files.well()
        tier.refresh()
        tier.check()
        assert put(tier, chain(8, seed=1000)) == [OK] * 8
    assert files.num_open == 0


def test_only_the_records_that_cannot_be_read_fail(tmp_path: Path) -> None:
    files, names = FaultFS(), chain(6)
    with opened(tmp_path, files) as tier:
        put(tier, names)
        (bad,) = [p.offset for a, p in tier._index.places() if a.startswith(names[3].key)]

        files.calls.clear()
        files.rule = lambda op, target, calls: (
            os_error(errno.EIO) if op == "preadv" and (calls == 1 or target == bad) else None
        )
        expected = [OK, OK, OK, ERROR, OK, OK]
        assert get(tier, names)[0] == expected
        for _ in range(2):
            files.calls.clear()
            assert get(tier, names)[0] == expected
        files.calls.clear()
        assert get(tier, names)[0] == [OK, OK, OK, MISS, OK, OK]  # not tried for ever
        counters = tier.counters()
        assert (counters.errors, counters.corrupt) == (3, 1)
        files.well()
        assert put(tier, names) == [EXISTS] * 3 + [OK] + [EXISTS] * 2
        assert_readable(tier, names)


def test_a_disk_that_answers_nothing_loses_no_record(tmp_path: Path) -> None:
    files, names = FaultFS(), chain(6)
    with opened(tmp_path, files) as tier:
        put(tier, names)
        files.broken()
        for _ in range(10):
            assert get(tier, names)[0] == [ERROR] * 6
            assert put(tier, chain(2, seed=1)) == [ERROR] * 2
            tier.refresh()
            tier.put_identity(DOMAIN, b"identity")
            assert tier.identities() == {}
            tier.delete(addresses(chain(1, seed=9)))
        files.well()
        assert put(tier, names) in ([EXISTS] * 6, [OK] * 6)
        assert_readable(tier, names)
        tier.put_identity(DOMAIN, b"identity")
        assert tier.identities() == {DOMAIN: b"identity"}
        tier.check()
    assert files.num_open == 0


def test_a_start_without_the_disk_is_degraded_and_heals(tmp_path: Path) -> None:
    files, names = FaultFS(), chain(4)
    files.broken(code=errno.EACCES)
    with opened(tmp_path, files) as tier:
        with pytest.raises(TierUnavailable, match="Permission denied"):
            tier.lookup(addresses(names), soon())
        assert put(tier, names) == [ERROR] * 4
        assert get(tier, names)[0] == [ERROR] * 4
        assert tier.counters().blocks == 0
        tier.put_identity(DOMAIN, b"identity")
        files.well()
        tier.refresh()
        assert tier.lookup(addresses(names), soon()) == 0
        assert put(tier, names) == [OK] * 4
        assert tier.identities() == {DOMAIN: b"identity"}
    assert files.num_open == 0


def test_a_path_that_cannot_be_a_folder_is_degraded(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("not a folder")
    with NvmeTier(path, CAPACITY, DOMAIN) as tier:
        with pytest.raises(TierUnavailable):
            tier.lookup([], soon())
        assert put(tier, chain(1)) == [ERROR]


def remove(path: Path) -> None:
    shutil.rmtree(path)


def replace(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def remove_inner(path: Path) -> None:
    shutil.rmtree(path / "00")


def remove_segments(path: Path) -> None:
    for segment in path.rglob("*.seg"):
        segment.unlink()


@pytest.mark.parametrize("vanish", [remove, replace, remove_inner, remove_segments])
@pytest.mark.parametrize("then", ["put", "refresh", "get"])
def test_a_folder_that_vanishes_is_made_again(tmp_path: Path, vanish: Callable[[Path], None], then: str) -> None:
    path, names, files = tmp_path / "nvme", chain(20), FaultFS()
    with opened(path, files) as tier:
        put(tier, names)
        vanish(path)
        if then == "refresh":
            tier.refresh()
            assert tier.lookup(addresses(names), soon()) == 0
        elif then == "get":
            statuses, buffers = get(tier, names)
            for name, status, buffer in zip(names, statuses, buffers, strict=True):
                assert status is MISS or (status is OK and buffer == payload_of(name))
        new = chain(20, seed=7)
        put(tier, new)
        tier.refresh()
        put(tier, new)
        put(tier, names)
        assert_readable(tier, new + names)
        assert list(path.rglob("*.seg"))
        tier.check()
    with opened(path, FaultFS()) as tier:
        assert_readable(tier, new + names)
    assert files.num_open == 0


def test_bytes_taken_away_in_the_middle_of_a_read_are_no_corruption(tmp_path: Path) -> None:
    files, names = FaultFS(), chain(4)
    with opened(tmp_path, files, io="buffered") as tier:
        put(tier, names)
        (path,) = tmp_path.rglob("*.seg")

        def evicted_by_another(op: str, target: Any, calls: int) -> None:
            if op == "preadv" and path.exists():
                path.write_bytes(bytes(path.stat().st_size))
                path.unlink()

        files.rule = evicted_by_another
        assert get(tier, names)[0] == [MISS] * 4
        counters = tier.counters()
        assert (counters.blocks, counters.corrupt, counters.errors) == (0, 0, 0)
        files.well()
        tier.refresh()
        tier.check()


class TimedFiles(Files):
    """Real files and a clock of the test's own."""

    def __init__(self, clock: Clock) -> None:
        self.now_s = clock  # type: ignore[method-assign]


@pytest.mark.parametrize("ops", [("pwritev",), ("pwritev", "allocate"), ("pwritev", "open")])
def test_a_disk_that_is_well_again_says_so_where_all_is_hits(tmp_path: Path, ops: tuple[str, ...]) -> None:
    """Nothing is left to be stored, and what is stored already is no write: no put ever finds out."""
    names, clock = chain(8), Clock()
    files = FaultFS(TimedFiles(clock))
    tier = opened(tmp_path, files)
    executor = SeededExecutor.inline()
    store = TieredStore([tier], part=PART, payload_bytes=PAYLOAD_BYTES, clock=clock, make_executor=executor.factory)

    store.submit_put(names, [memoryview(payload_of(name)) for name in names])
    store.poll()

    def load_all() -> None:
        ticket = store.submit_lookup(names)
        assert [done for done in store.poll() if isinstance(done, LookupDone)] == [LookupDone(ticket, ("nvme",) * 8)]
        store.submit_load(ticket, names, [memoryview(bytearray(PAYLOAD_BYTES)) for _ in names])
        assert any(isinstance(done, LoadDone) and set(done.statuses) == {OK} for done in store.poll())
        store.release(ticket)

    files.broken(*ops)
    for number in range(4):
        some = chain(1, seed=100 + number)
        store.submit_put(some, [memoryview(payload_of(some[0]))])
        store.poll()
    assert store.stats()["nvme"]["breaker"] == "open"
    clock.sleep(2.0)
    load_all()
    assert store.stats()["nvme"]["breaker"] == "open", "it is not well yet"
    files.well()
    clock.sleep(60.0)
    load_all()
    assert store.stats()["nvme"]["breaker"] == "closed"
    assert not list(tmp_path.rglob("*.tmp"))
    store.close()
