"""Listing and purging by domain: everything of it, and nothing of anybody else."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from pagetier.kvstore.block import BlockName, BlockStatus
from pagetier.kvstore.errors import TierUnavailable
from pagetier.kvstore.keys import chain_names, root_key
from pagetier.kvstore.record import pack_header, redis_name, redis_namespace
from pagetier.kvstore.redis.namespaces import SCAN_COUNT, Purge, parse_name
from pagetier.kvstore.redis.simulated import ERROR_REPLIES, SimulatedRedis, SimulatedSockets
from pagetier.kvstore.redis.tier import RedisTier
from tests.kvstore.rig import Clock
from tests.kvstore.tier_contract import (
    DOMAIN,
    OTHER_PART,
    PART,
    PAYLOAD_BYTES,
    addresses,
    chain,
    payload_of,
    put,
    soon,
)
from tests.kvstore.valkey import Valkey, own_valkey, valkey, valkey_server  # noqa: F401
from tests.kvstore.valkey_groups import ClusterNode, own_cluster

OTHER = bytes(reversed(DOMAIN))
TWIN = DOMAIN[:8] + bytes(24)  # names of its records start as those of DOMAIN
TOKENS = [*range(40)]
FOREIGN = {
    "pgt1": b"x",
    "pgt1:": b"x",
    f"{redis_namespace(DOMAIN)}notes": b"somebody's",
    f"{redis_namespace(DOMAIN)}{{{'a' * 64}}}:notes": b"somebody's",
    f"{redis_namespace(DOMAIN)}{{{'b' * 64}}}:0.0-1.0-1": b"not a record at all, but under a record's name",
    "session:1": b"x",
}


def record_of(domain: bytes, name: BlockName) -> bytes:
    payload = payload_of(name)
    return pack_header(domain, name, PART, payload) + payload


@pytest.fixture
def tier(valkey: Valkey) -> Iterator[RedisTier]:  # noqa: F811
    """With records of DOMAIN in two parts, of two other domains, and things that are nobody's of ours."""
    client = valkey.client()
    for foreign, value in FOREIGN.items():
        client.set(foreign, value)
    client.rpush(f"{redis_namespace(DOMAIN)}{{{'c' * 64}}}:0.0-1.0-1", "a list")
    for domain in (OTHER, TWIN):
        for name in chain(5, seed=1):
            client.set(redis_name(domain, addresses([name])[0]), record_of(domain, name))
    tier = RedisTier(valkey.url, DOMAIN, ttl_s=100)
    tier.put_identity(DOMAIN, b"identity")
    put(tier, chain(20))
    put(tier, chain(20)[:4], OTHER_PART)
    yield tier
    tier.close()


def names_in(server: Valkey) -> set[bytes]:
    return {name for name in server.client().keys() if isinstance(name, bytes)}


def test_namespaces_are_listed_by_size(tier: RedisTier) -> None:
    found = tier.namespaces().list_all(soon())
    assert [(space.prefix, space.domain) for space in found] == [
        (DOMAIN[:8].hex(), DOMAIN),
        (OTHER[:8].hex(), None),
    ]
    assert [space.num_records for space in found] == [24 + 5 + 2, 5], "by name: the twin and the foreign count, too"


def test_records_are_those_of_the_domain(tier: RedisTier) -> None:
    found = list(tier.namespaces().records(DOMAIN, soon()))
    wanted = {*addresses(chain(20)), *addresses(chain(20)[:4], OTHER_PART)}
    assert {record.address for record in found} == wanted and len(found) == 24
    for record in found:
        assert record.nbytes > PAYLOAD_BYTES and record.ttl_s is not None and 90 < record.ttl_s <= 100


def test_a_purge_takes_a_domain_and_nothing_else(tier: RedisTier, valkey: Valkey) -> None:  # noqa: F811
    before = names_in(valkey)
    assert tier.namespaces().purge(DOMAIN, soon()) == Purge(num_removed=24, num_foreign=5 + 2)
    assert before - names_in(valkey) == {
        redis_name(DOMAIN, address).encode()
        for address in (*addresses(chain(20)), *addresses(chain(20)[:4], OTHER_PART))
    }
    assert tier.identities() == {DOMAIN: b"identity"}
    assert tier.namespaces().purge(DOMAIN, soon()).num_removed == 0
    assert tier.namespaces().purge(TWIN, soon()).num_removed == 5


def test_a_purge_of_keys_or_of_a_tenant_takes_those(tier: RedisTier) -> None:
    tenants = [chain_names(root_key(DOMAIN, salt), TOKENS, 4) for salt in (b"a", b"b")]
    for names in tenants:
        put(tier, names)
    keys = {name.key for name in chain(20)[1:3]}
    assert tier.namespaces().purge(DOMAIN, soon(), keys=keys).num_removed == 4, "in both parts"
    assert tier.lookup(addresses(chain(20)), soon()) == 1
    assert tier.namespaces().purge(DOMAIN, soon(), root=root_key(DOMAIN, b"a")).num_removed == 10
    assert [tier.lookup(addresses(names), soon()) for names in tenants] == [0, 10]


@pytest.mark.parametrize("seed", range(5))
def test_a_purge_beside_others_work_touches_none_of_it(seed: int) -> None:
    """Any mixture of domains and foreign names, more than a page of them."""
    rng, clock = random.Random(seed), Clock()
    server = SimulatedRedis(clock, seed=seed)
    sockets = SimulatedSockets({"simulated:1": server}, clock, clock.sleep)
    tier = RedisTier("redis://simulated:1", DOMAIN, sockets=sockets)
    kept: set[bytes] = set()
    doomed: set[bytes] = set()
    for name in chain(SCAN_COUNT + 500, seed):
        domain = rng.choice((DOMAIN, DOMAIN, OTHER, TWIN))
        there = redis_name(domain, addresses([name])[0]).encode()
        server.data.execute(0, [b"SET", there, record_of(domain, name)[: rng.choice((99, 500, 9000))]])
        whole = server.data.execute(0, [b"STRLEN", there]) != b":99\r\n"
        (doomed if domain == DOMAIN and whole else kept).add(there)
    for foreign, value in FOREIGN.items():
        server.data.execute(0, [b"SET", foreign.encode(), value])
        kept.add(foreign.encode())
    assert tier.namespaces().purge(DOMAIN, clock() + 60.0).num_removed == len(doomed)
    assert set(server.data.keys()) == kept
    tier.close()


def test_nothing_is_said_or_done_by_halves_in_silence(tier: RedisTier, valkey: Valkey) -> None:  # noqa: F811
    clock = Clock()
    server = SimulatedRedis(clock)
    one = RedisTier(
        "redis://simulated:1", DOMAIN, sockets=SimulatedSockets({"simulated:1": server}, clock, clock.sleep)
    )
    server.refuse = lambda command: ERROR_REPLIES["NOPERM"] if command[0] == b"SCAN" else None
    for call in (one.namespaces().list_all, lambda until_s: one.namespaces().purge(DOMAIN, until_s)):
        with pytest.raises(TierUnavailable, match="NOPERM"):
            call(clock() + 1.0)
    server.freeze()
    with pytest.raises(TierUnavailable, match="no answer in time"):
        one.namespaces().list_all(clock() + 1.0)
    one.close()


def test_no_command_that_holds_up_others_is_used(own: Valkey) -> None:
    tier = RedisTier(own.url, DOMAIN)
    put(tier, chain(50))
    tier.namespaces().list_all(soon())
    list(tier.namespaces().records(DOMAIN, soon()))
    tier.namespaces().purge(DOMAIN, soon())
    used = {str(name).partition("|")[0] for name in own.client().info("commandstats")}
    assert "cmdstat_scan" in used and not used & {"cmdstat_keys", "cmdstat_flushdb", "cmdstat_flushall", "cmdstat_del"}
    tier.close()


@pytest.fixture
def own() -> Iterator[Valkey]:
    with own_valkey() as server:
        yield server


def test_a_cluster_is_listed_and_purged_on_all_its_nodes(three: Sequence[ClusterNode]) -> None:
    tier = RedisTier(f"redis+cluster://127.0.0.1:{three[1].port}", DOMAIN)
    assert set(put(tier, chain(40))) == {BlockStatus.OK}
    tier.put_identity(DOMAIN, b"identity")
    assert [(space.domain, space.num_records) for space in tier.namespaces().list_all(soon())] == [(DOMAIN, 40)]
    assert {record.address for record in tier.namespaces().records(DOMAIN, soon())} == set(addresses(chain(40)))
    assert tier.namespaces().purge(DOMAIN, soon()) == Purge(40, 0)
    assert sum(node.client.dbsize() for node in three) == 1, "the identities"
    tier.close()


@pytest.fixture
def three() -> Iterator[list[ClusterNode]]:
    with own_cluster() as nodes:
        yield nodes


def test_names_are_parsed_as_they_are_made() -> None:
    for address in (*addresses(chain(3)), *addresses(chain(3), OTHER_PART)):
        assert parse_name(redis_name(DOMAIN, address).encode()) == address
    assert not any(parse_name(name.encode()) for name in list(FOREIGN)[:4])
