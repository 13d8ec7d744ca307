"""Warm-up fills the host tier with what was hottest, in the background, and gets in nobody's way."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from pagetier.kvstore.block import BlockName
from pagetier.kvstore.book import Entry
from pagetier.kvstore.config import StoreConfig
from pagetier.kvstore.hot import HotFile, hot_order
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.store import TieredStore, open_store
from pagetier.kvstore.tier import Tier
from pagetier.kvstore.warmup import HOST_SHARE, PAUSE_S, Warmup
from tests.kvstore.rig import PAYLOAD_BYTES, Rig, hit, memory, store_in
from tests.kvstore.test_open_store import IDENTITY, NAMES, NVME, PART, put_all
from tests.kvstore.test_open_store import PAYLOAD_BYTES as STORED_BYTES
from tests.kvstore.tier_contract import DOMAIN, addresses, chain

MIB = 1 << 20
ALL = 1 << 30


def warmup_of(store: TieredStore, max_bytes: int = ALL, file: HotFile | None = None) -> Warmup:
    warmup = store.warm_up(max_bytes, file)
    assert warmup is not None
    return warmup


def run(warmup: Warmup) -> int:
    """All steps; how many."""
    return sum(1 for _ in iter(warmup.step, None))


def num_there(tier: Tier, names: Sequence[BlockName]) -> int:
    return tier.lookup(addresses(names), 1e12)


def used(path: Path, redis: Tier, hits: dict[int, int]) -> dict[int, list[BlockName]]:
    """A process that used chains, by seed so many times, and ended: the chains."""
    chains = {seed: chain(8, seed=seed) for seed in hits}
    with Rig(memory("host"), redis, domain=DOMAIN) as rig:
        warmup_of(rig.store, 0, HotFile(path, DOMAIN))
        for seed, names in chains.items():
            rig.put(names)
            for _ in range(hits[seed]):
                hit(rig, names)
    return chains


def test_a_start_brings_the_most_hit_prefixes_first(tmp_path: Path) -> None:
    redis = memory("redis")
    chains = used(tmp_path, redis, {1: 1, 2: 5, 3: 3})
    host = memory("host")
    with Rig(host, redis, domain=DOMAIN) as rig:
        warmup = warmup_of(rig.store, 12 * PAYLOAD_BYTES, HotFile(tmp_path, DOMAIN))
        run(warmup)
        assert [num_there(host, chains[seed]) for seed in (2, 3, 1)] == [8, 4, 0], "the head of the second, too"
        assert rig.store.stats()["host"]["warmed_blocks"] == 12
        assert rig.store.stats()["redis"]["warmed_blocks"] == 0


def test_without_hit_counts_what_was_written_or_used_last_comes_first(tmp_path: Path) -> None:
    names = [chain(8, seed=seed) for seed in range(6)]
    with NvmeTier(tmp_path, 1 << 20, DOMAIN, segment_bytes=96 << 10, refresh_s=0) as nvme:  # 9 records each
        for one in names:
            store_in(nvme, one)
        nvme.touch(addresses(names[1]))
        host = memory("host")
        with Rig(host, nvme, domain=DOMAIN) as rig:
            run(warmup_of(rig.store, 16 * PAYLOAD_BYTES))
            assert num_there(host, names[1]) == 8
            assert host.counters().blocks == 16


def test_it_waits_while_the_store_has_work_and_goes_on_after(tmp_path: Path) -> None:
    redis, host = memory("redis"), memory("host")
    names = used(tmp_path, redis, {1: 1})[1]
    with Rig(host, redis, domain=DOMAIN) as rig:
        warmup = warmup_of(rig.store, ALL, HotFile(tmp_path, DOMAIN))
        ticket = rig.store.submit_lookup(chain(3, seed=9))
        assert [warmup.step(), warmup.step()] == [PAUSE_S, PAUSE_S]
        assert host.counters().blocks == 0
        rig.until(lambda: not rig.store.has_work)
        rig.store.release(ticket)
        run(warmup)
        assert num_there(host, names) == 8


def test_it_leaves_room_and_evicts_nothing(tmp_path: Path) -> None:
    redis = memory("redis")
    chains = used(tmp_path, redis, {seed: 1 for seed in range(5)})
    host = memory("host", 16)
    with Rig(host, redis, domain=DOMAIN) as rig:
        run(warmup_of(rig.store, ALL, HotFile(tmp_path, DOMAIN)))
        assert host.counters().blocks == int(16 * HOST_SHARE) and host.counters().evictions == 0
        assert sum(num_there(host, names) for names in chains.values()) == int(16 * HOST_SHARE), "heads first"


def test_a_chain_is_brought_as_far_as_it_is_whole(tmp_path: Path) -> None:
    redis, host = memory("redis"), memory("host")
    chains = used(tmp_path, redis, {1: 2, 2: 1})
    redis.delete(addresses(chains[1][3:4]))
    with Rig(host, redis, domain=DOMAIN) as rig:
        run(warmup_of(rig.store, ALL, HotFile(tmp_path, DOMAIN)))
        assert host.counters().blocks == 3 + 8
        assert (num_there(host, chains[1]), num_there(host, chains[2])) == (3, 8)


def test_it_ends_when_the_weights_change(tmp_path: Path) -> None:
    redis, host = memory("redis"), memory("host")
    used(tmp_path, redis, {1: 1})
    with Rig(host, redis, domain=DOMAIN) as rig:
        warmup = warmup_of(rig.store, ALL, HotFile(tmp_path, DOMAIN))
        rig.store.set_identity(IDENTITY)
        rig.until(lambda: not rig.store.has_work)
        assert run(warmup) == 0 and host.counters().blocks == 0


def test_a_tier_that_fails_costs_nothing_but_its_blocks(tmp_path: Path) -> None:
    redis, nvme, host = memory("redis"), memory("nvme"), memory("host")
    names = used(tmp_path, redis, {1: 1})[1]
    store_in(nvme, names[:4])
    redis.faults.down = True
    with Rig(host, nvme, redis, domain=DOMAIN) as rig:
        run(warmup_of(rig.store, ALL, HotFile(tmp_path, DOMAIN)))
        assert num_there(host, names) == 4


def test_it_keeps_to_its_rate(tmp_path: Path) -> None:
    redis = memory("redis")
    used(tmp_path, redis, {1: 1})
    with Rig(memory("host"), redis, domain=DOMAIN) as rig:
        warmup = warmup_of(rig.store, ALL, HotFile(tmp_path, DOMAIN))
        object.__setattr__(warmup._plan, "bytes_per_s", 1.0)
        rest_s = warmup.step()
        assert rest_s is not None and 0.9 * 8 * PAYLOAD_BYTES < rest_s <= 8 * PAYLOAD_BYTES


def test_nothing_is_warmed_where_there_is_no_host_tier_or_nothing_below_it() -> None:
    for tiers in ((memory("nvme"), memory("redis")), (memory("host"),)):
        with Rig(*tiers, domain=DOMAIN) as rig:
            assert rig.store.warm_up(ALL) is None


@pytest.mark.parametrize("seed", range(20))
def test_no_block_is_ordered_before_one_that_it_needs(seed: int) -> None:
    rng = random.Random(seed)
    names = [name for one in range(4) for name in chain(rng.randint(1, 9), seed=one)]
    rng.shuffle(names)
    entries = [Entry(name, DOMAIN, None, rng.random(), rng.randrange(3)) for name in names]
    ordered = hot_order(entries)
    assert sorted(ordered) == sorted(names)
    rank = {name.key: i for i, name in enumerate(ordered)}
    assert all(rank.get(name.parent, -1) < rank[name.key] for name in names)


@pytest.mark.parametrize("content", [b"", b"\x81", b"\x93\x01\x02\x03", b"not msgpack at all" * 10, b"\x80"])
def test_a_damaged_file_says_nothing_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    path, file, names = tmp_path / f"{DOMAIN.hex()}.msgpack", HotFile(tmp_path, DOMAIN), chain(3)
    assert file.read() == []
    path.write_bytes(content)
    assert file.read() == []
    file.write(names)
    assert file.read() == names and path.stat().st_mode & 0o777 == 0o600
    file.write(chain(2, seed=7))
    assert file.read() == [*chain(2, seed=7), *names], "what the former process knew is kept behind"
    assert [child.name for child in tmp_path.iterdir()] == [path.name]


def test_open_store_warms_up_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGETIER_CACHE_DIR", str(tmp_path))
    config = StoreConfig(tiers=("nvme",), host_size=64 * MIB, warmup=32 * MIB, **NVME)
    for start in range(2):
        with open_store(config, IDENTITY, PART, STORED_BYTES) as store:
            if start == 0:
                put_all(store)
                assert store.flush(5.0)
                continue
            limit_s = time.monotonic() + 20.0
            while store.stats()["host"]["warmed_blocks"] < len(NAMES):
                assert time.monotonic() < limit_s
                time.sleep(0.001)
            assert store.stats()["host"]["blocks"] == len(NAMES)
    assert len(HotFile(tmp_path / "hot", IDENTITY.domain()).read()) == len(NAMES)
