"""Several folders are one tier: spread by key, found wherever they lie, and one that fails takes its share, no more."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pagetier.kvstore.block import BlockName, BlockStatus
from pagetier.kvstore.config import StoreConfig, parse_paths
from pagetier.kvstore.errors import ConfigError, TierUnavailable
from pagetier.kvstore.nvme.fault_fs import FaultFS
from pagetier.kvstore.nvme.striped import StripedTier
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.store import open_store
from pagetier.kvstore.tier import Tier
from tests.kvstore.test_open_store import IDENTITY, PART, PAYLOAD_BYTES, put_all
from tests.kvstore.tier_contract import DOMAIN, TierContract, addresses, assert_readable, chain, get, put, soon

OK, MISS, EXISTS, ERROR = BlockStatus.OK, BlockStatus.MISS, BlockStatus.EXISTS, BlockStatus.ERROR
CAPACITY = 8 << 20


class TestStripedTier(TierContract):
    @pytest.fixture(params=[False, True], ids=["at once", "in turn"])
    def tier(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Tier]:
        tiers = [NvmeTier(tmp_path / name, CAPACITY, DOMAIN) for name in ("a", "b", "c")]
        with StripedTier(tiers, time.monotonic, in_turn=request.param) as tier:
            yield tier


class Disks:
    """Folders `a`, `b`, ... each on a disk of its own that can fail."""

    def __init__(self, path: Path, names: str = "ab", **settings: Any) -> None:
        self.files = {name: FaultFS() for name in names}
        self.now_s = 1000.0
        fixed: dict[str, Any] = {"refresh_s": 0, "fsync": "none", "segment_bytes": 256 << 10, **settings}
        self.tiers = {
            name: NvmeTier(path / name, 4 << 20, DOMAIN, files=files, **fixed) for name, files in self.files.items()
        }
        self.tier = StripedTier(list(self.tiers.values()), lambda: self.now_s)

    def __enter__(self) -> Disks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.tier.close()

    def shares(self, names: Sequence[BlockName]) -> dict[str, set[int]]:
        """By folder: the blocks, by position in `names`, that lie there."""
        return {
            disk: {i for i, held in enumerate(tier.holds(addresses(names))) if held}
            for disk, tier in self.tiers.items()
        }


def test_records_are_spread_evenly_and_by_key_alone(tmp_path: Path) -> None:
    names = chain(200)
    with Disks(tmp_path / "one") as disks, Disks(tmp_path / "other") as others:
        assert put(disks.tier, names) == [OK] * 200
        for name in reversed(names):
            put(others.tier, [name])
        shares = disks.shares(names)
        assert shares == others.shares(names), "in whatever order they come"
        assert shares["a"] | shares["b"] == set(range(200)) and not shares["a"] & shares["b"]
        assert 60 < len(shares["a"]) < 140
        assert disks.tier.counters().blocks == 200 and disks.tier.counters().capacity_bytes == 8 << 20
        disks.tier.check()


@pytest.mark.parametrize("order", ["ab", "ba", "abc", "bca"])
def test_folders_may_be_added_and_reordered(tmp_path: Path, order: str) -> None:
    names = chain(40)
    with Disks(tmp_path, "ab") as disks:
        put(disks.tier, names[:30])
    with Disks(tmp_path, order) as disks:
        assert disks.tier.lookup(addresses(names), soon()) == 30
        assert_readable(disks.tier, names[:30])
        assert put(disks.tier, names) == [EXISTS] * 30 + [OK] * 10, "nothing is stored twice"


def test_a_folder_that_is_taken_away_takes_its_share(tmp_path: Path) -> None:
    names = chain(40)
    with Disks(tmp_path, "ab") as disks:
        put(disks.tier, names)
        gone = disks.shares(names)["a"]
    with NvmeTier(tmp_path / "b", 4 << 20, DOMAIN, refresh_s=0) as alone:
        assert [i for i, status in enumerate(get(alone, names)[0]) if status is MISS] == sorted(gone)


def test_one_that_cannot_be_written_gives_its_share_to_the_other(tmp_path: Path) -> None:
    names = chain(60)
    with Disks(tmp_path) as disks:
        disks.files["a"].full()
        for first in range(0, 40, 10):
            assert put(disks.tier, names[first : first + 10]) == [OK] * 10
        assert disks.shares(names)["a"] == set()
        assert_readable(disks.tier, names[:40])
        disks.files["a"].well()
        disks.now_s += 60.0
        assert put(disks.tier, names[40:]) == [OK] * 20
        assert disks.shares(names)["a"], "it is in use again"
        assert_readable(disks.tier, names)


def test_one_that_vanishes_takes_its_share_and_brings_it_back(tmp_path: Path) -> None:
    names = chain(60)
    with Disks(tmp_path) as disks:
        assert put(disks.tier, names[:40]) == [OK] * 40
        lost = disks.shares(names)["a"]
        disks.files["a"].vanish()
        for _ in range(5):
            statuses, _ = get(disks.tier, names[:40])
            assert {i for i, status in enumerate(statuses) if status is not OK} == lost
            assert ERROR not in statuses, "the tier itself is well"
        disks.tier.refresh()
        assert not disks.tier.counters().is_down
        assert disks.tier.lookup(addresses(names[:40]), soon()) == min(lost)
        assert put(disks.tier, names) == [OK if i in lost or i >= 40 else EXISTS for i in range(60)]
        assert_readable(disks.tier, names)
        disks.files["a"].well()
        disks.now_s += 60.0
        disks.tier.refresh()
        assert disks.shares(names)["a"] == lost
        assert_readable(disks.tier, names)


def test_when_all_fail_the_tier_does(tmp_path: Path) -> None:
    names = chain(10)
    with Disks(tmp_path) as disks:
        put(disks.tier, names)
        for files in disks.files.values():
            files.vanish()
        assert set(get(disks.tier, names)[0]) == {ERROR}
        assert put(disks.tier, chain(4, seed=9)) == [ERROR] * 4
        disks.tier.refresh()
        assert disks.tier.counters().is_down
        with pytest.raises(TierUnavailable):
            disks.tier.lookup(addresses(names), soon())
        with pytest.raises(TierUnavailable):
            disks.tier.records(soon())


def test_a_crash_loses_nothing(tmp_path: Path) -> None:
    names, crashed = chain(200), Disks(tmp_path)
    put(crashed.tier, names)
    for tier in crashed.tiers.values():
        tier._folder.detach()  # what the kernel does when a process dies
    with Disks(tmp_path) as disks:
        assert disks.tier.lookup(addresses(names), soon()) == 200
        assert_readable(disks.tier, names)
        disks.tier.check()
    crashed.tier.close()


def test_hot_records_move_though_their_parents_lie_elsewhere(tmp_path: Path) -> None:
    """A chain used all the time outlives many segments of others."""
    hot = chain(12)
    with Disks(tmp_path) as disks:
        put(disks.tier, hot)
        for seed in range(1, 200):
            put(disks.tier, chain(8, seed=seed))
            disks.tier.touch(addresses(hot))
        assert disks.tier.counters().evictions > 0
        assert disks.tier.lookup(addresses(hot), soon()) == 12
        assert_readable(disks.tier, hot)
        disks.tier.check()


def test_paths_are_named_once_each() -> None:
    assert parse_paths("/a") == (Path("/a"),) and parse_paths(None) == ()
    assert parse_paths("/a, /b") == (Path("/a"), Path("/b"))
    for text in ("/a,/a", "/a,", ","):
        with pytest.raises(ConfigError, match="--kv-nvme-path"):
            parse_paths(text)
    with pytest.raises(ConfigError, match="--kv-nvme-size"):
        StoreConfig(tiers=("nvme",), nvme_path=Path("/a,/b"), nvme_size=300 << 10)


def test_open_store_spreads_over_the_folders_it_is_given(tmp_path: Path) -> None:
    path = Path(f"{tmp_path / 'a'},{tmp_path / 'b'}")
    config = StoreConfig(tiers=("nvme",), nvme_path=path, nvme_size=512 << 20, nvme_allow_unsafe=True)
    with open_store(config, IDENTITY, PART, PAYLOAD_BYTES) as store:
        put_all(store)
        assert store.stats()["nvme"]["capacity_bytes"] == 512 << 20
        assert store.flush(5.0)
    assert all((tmp_path / name / "00").is_dir() for name in "ab")
    with open_store(config, IDENTITY, PART, PAYLOAD_BYTES) as store:
        assert store.stats()["nvme"]["blocks"] == 4
        assert store.admin.purge().removed == {"nvme": 4}
