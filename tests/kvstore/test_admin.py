"""Questions about a store are answered with what a hand-made history says; a purge takes what it names and no more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pagetier.kvstore.block import BlockName
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.events import EventKind
from pagetier.kvstore.keys import chain_names
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.prefixes import Prefix
from pagetier.kvstore.redis.tier import RedisTier
from pagetier.kvstore.store import TieredStore
from pagetier.kvstore.tier import Tier
from tests.kvstore.rig import PAYLOAD_BYTES, Rig, hit, memory
from tests.kvstore.tier_contract import DOMAIN, PART, addresses, chain
from tests.kvstore.valkey import Valkey, valkey, valkey_server  # noqa: F401

MIB = 1 << 20


def keys(names: Sequence[BlockName]) -> list[bytes]:
    return [name.key for name in names]


@pytest.fixture(params=["memory", "real"])
def tiers(request: pytest.FixtureRequest, tmp_path: Path, valkey: Valkey) -> Iterator[tuple[Tier, Tier]]:  # noqa: F811
    if request.param == "memory":
        yield memory("nvme", 4096), memory("redis", 4096)
        return
    nvme = NvmeTier(tmp_path / "nvme", 64 * MIB, DOMAIN, refresh_s=0, fsync="none")
    yield nvme, RedisTier(valkey.url, DOMAIN)


def test_query_says_where_blocks_are_and_how_often_they_were_hit(tiers: tuple[Tier, Tier]) -> None:
    with Rig(*tiers, domain=DOMAIN) as rig:
        names = chain(6)
        rig.put(names[:4])
        tiers[0].delete(addresses(names[2:3]))
        for _ in range(2):
            hit(rig, names[:2])
        rig.store.touch(names[:1])
        infos = rig.store.admin.query(keys(names))
        assert [info.tiers for info in infos] == [
            *[("nvme", "redis")] * 2,
            ("redis",),
            ("nvme", "redis"),
            *[()] * 2,
        ]
        assert [info.hits for info in infos] == [3, 2, 0, 0, 0, 0]
        assert [info.nbytes for info in infos] == [PAYLOAD_BYTES] * 4 + [0] * 2
        assert [info.name for info in infos] == [*names[:4], None, None]
        assert all(info.age_s is not None and 0 <= info.age_s < 60 for info in infos[:4])
        shown = infos[1].as_dict()
        assert shown["tokens"] == [4, 7] and shown["num_tokens"] == 4 and shown["hits"] == 2


def test_a_store_that_was_just_opened_reads_names_from_the_records(tiers: tuple[Tier, Tier]) -> None:
    names = chain(3)
    with Rig(*tiers, domain=DOMAIN) as rig:
        rig.put(names)
        fresh = TieredStore(tiers, part=PART, payload_bytes=PAYLOAD_BYTES, domain=DOMAIN)
        assert [info.name for info in fresh.admin.query(keys(names))] == names
        (prefix,) = fresh.admin.top()
        assert prefix.num_blocks == 3 and prefix.hits == 0


def shape(prefixes: Sequence[Prefix]) -> list[object]:
    return [(p.position, p.num_blocks, p.hits, shape(p.children)) for p in prefixes]


def test_top_is_the_forest_of_what_is_stored(tiers: tuple[Tier, Tier]) -> None:
    with Rig(*tiers, domain=DOMAIN) as rig:
        system = chain(4)
        asked = [fork(system, seed) for seed in (1, 2)]
        other = chain(2, seed=9)
        for names in (*asked, other):
            rig.put(names)
        for _ in range(3):
            hit(rig, system)
        hit(rig, asked[0])
        hit(rig, asked[1][:5])
        assert shape(rig.store.admin.top()) == [
            (0, 4, 5, [(16, 2, 1, []), (16, 1, 1, [(20, 1, 0, [])])]),
            (0, 2, 0, []),
        ]
        assert shape(rig.store.admin.top(limit=1)) == [(0, 4, 5, [])]
        assert rig.store.admin.top()[0].as_dict()["num_tokens"] == 16
        rig.store.admin.purge(keys=keys(system))
        assert {p.position for p in rig.store.admin.top()} == {0, 16}


def fork(system: Sequence[BlockName], seed: int) -> list[BlockName]:
    """The system prompt with two blocks more."""
    tokens = [seed * 100 + i for i in range(8)]
    more = chain_names(system[0].root, tokens, 4, parent=system[-1].key, position=16)
    return [*system, *more]


def test_a_purge_takes_keys_a_tenant_or_all(tiers: tuple[Tier, Tier]) -> None:
    with Rig(*tiers, domain=DOMAIN) as rig:
        mine, theirs = chain(5, salt=b"a"), chain(5, salt=b"b")
        rig.put(mine)
        rig.put(theirs)
        admin = rig.store.admin
        returns = rig.store.num_returns
        assert admin.purge(keys=keys(mine[3:]), tiers=["redis"]).removed == {"redis": 2}
        assert [info.tiers for info in admin.query(keys(mine))] == [("nvme", "redis")] * 3 + [("nvme",)] * 2
        assert rig.store.num_returns == returns + 1  # so that what is still used is offered again
        assert admin.purge(root=mine[0].root).removed == {"nvme": 5, "redis": 3}
        assert [info.tiers for info in admin.query(keys(theirs))] == [("nvme", "redis")] * 5
        assert admin.purge().removed == {"nvme": 5, "redis": 5}
        assert not any(info.tiers for info in admin.query(keys(mine + theirs)))
        assert admin.top() == []
        with pytest.raises(ConfigError, match="unknown tier"):
            admin.purge(tiers=["disk"])


def test_events_tell_what_each_tier_took_and_lost() -> None:
    host = memory("host", 8)
    with Rig(host, memory("nvme"), domain=DOMAIN) as rig:
        rig.put(chain(6))
        rig.put(chain(6, seed=1))
        events = rig.store.events.since(0).events
        gone = [key for event in events if event.kind is EventKind.REMOVED for key in event.keys]
        stored: dict[str, list[bytes]] = {"host": [], "nvme": []}
        for event in events:
            if event.kind is EventKind.STORED:
                stored[event.medium] += event.keys
        assert sorted(stored["nvme"]) == sorted(keys(chain(6) + chain(6, seed=1)))
        there = {name.key for name in chain(6) + chain(6, seed=1) if host.lookup(addresses([name]), 1e12)}
        assert set(stored["host"]) - set(gone) == there and len(gone) == len(set(gone)) > 0
        rig.store.admin.purge(tiers=["host"])
        kinds = [event.kind for event in rig.store.events.since(len(events)).events]
        assert kinds[-1] is EventKind.CLEARED and set(kinds[:-1]) == {EventKind.REMOVED}
