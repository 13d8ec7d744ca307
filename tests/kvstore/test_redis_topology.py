"""Several real servers below one tier: a Cluster that loses, moves and replaces nodes, and a fail-over by Sentinel."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterator, Sequence

import pytest

from pagetier.kvstore.block import BlockName, BlockStatus
from pagetier.kvstore.errors import ConfigError, TierUnavailable
from pagetier.kvstore.record import redis_name
from pagetier.kvstore.redis.node import Redirect, parse_redirect
from pagetier.kvstore.redis.resp import ErrorReply
from pagetier.kvstore.redis.simulated import ERROR_REPLIES, SimulatedRedis, SimulatedSockets
from pagetier.kvstore.redis.simulated_data import array, bulk
from pagetier.kvstore.redis.sockets import Endpoint
from pagetier.kvstore.redis.tier import RedisTier
from pagetier.kvstore.redis.topology import slot_of
from pagetier.kvstore.redis.url import Kind, Login, parse_redis_url
from pagetier.kvstore.tier import BlockRead, BlockWrite, Tier
from tests.kvstore.rig import Clock
from tests.kvstore.tier_contract import (
    DOMAIN,
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
from tests.kvstore.valkey import Valkey, own_valkey
from tests.kvstore.valkey_groups import (
    NUM_SLOTS,
    QUICK,
    ClusterNode,
    free_port,
    own_cluster,
    own_replica_of,
    own_sentinel,
    wait_for,
)

OK, MISS, EXISTS, ERROR, TIMEOUT = (
    BlockStatus.OK,
    BlockStatus.MISS,
    BlockStatus.EXISTS,
    BlockStatus.ERROR,
    BlockStatus.TIMEOUT,
)


def url_of(nodes: Sequence[ClusterNode]) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)


def owner_of(name: BlockName) -> int:
    """Which of the three masters has it at first."""
    return min(slot_of(addresses([name])[0]) * 3 // NUM_SLOTS, 2)


def of(node: int, names: Sequence[BlockName], on_it: BlockStatus, elsewhere: BlockStatus) -> list[BlockStatus]:
    return [on_it if owner_of(name) == node else elsewhere for name in names]


# -- a Cluster in good health ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[list[ClusterNode]]:
    with own_cluster(maxmemory=str(4 << 20), maxmemory_policy="allkeys-lru") as nodes:
        yield nodes


@pytest.fixture
def cluster(shared_cluster: list[ClusterNode]) -> list[ClusterNode]:
    for node in shared_cluster:
        node.client.flushall()
    return shared_cluster


class TestClusterTier(TierContract):
    @pytest.fixture
    def tier(self, cluster: list[ClusterNode]) -> Iterator[Tier]:
        tier = RedisTier(url_of(cluster[:1]), DOMAIN, refresh_interval_s=0.0)
        tier.put_identity(DOMAIN, b"known")
        tier.touch(addresses(chain(64, seed=99)))  # reads every node's maxmemory
        yield tier
        tier.close()


def test_blocks_lie_on_all_nodes_and_are_found_whatever_is_missing(cluster: list[ClusterNode]) -> None:
    tier, names, rng = RedisTier(url_of(cluster), DOMAIN), chain(60, seed=1), random.Random(1)
    assert put(tier, names) == [OK] * 60
    assert [node.client.dbsize() for node in cluster] == [sum(owner_of(n) == i for n in names) for i in range(3)]
    assert_readable(tier, names)
    missing: set[int] = set()
    for _ in range(12):
        missing.add(rng.randrange(60))
        tier.delete(addresses([names[max(missing)], *[names[i] for i in missing]]))
        assert tier.lookup(addresses(names), soon()) == min(missing)
        assert get(tier, names)[0] == [MISS if i in missing else OK for i in range(60)]
    assert tier.counters().errors == 0 and not tier.error_replies()
    tier.check()
    tier.close()


def test_counters_are_those_of_all_nodes(cluster: list[ClusterNode]) -> None:
    tier, names = RedisTier(url_of(cluster), DOMAIN, refresh_interval_s=0.0), chain(30, seed=2)
    put(tier, names)
    tier.touch(addresses(names))
    assert tier.counters().blocks == 30 and tier.counters().capacity_bytes == 3 * (4 << 20)
    reader = RedisTier(url_of(cluster), DOMAIN)
    assert reader.lookup(addresses(names), soon()) == 30
    assert reader.counters().blocks == 30, "who only reads knows, too"
    for each in (tier, reader):
        each.close()


def test_a_node_of_a_cluster_alone_says_what_is_wrong(
    cluster: list[ClusterNode], caplog: pytest.LogCaptureFixture
) -> None:
    tier, names = RedisTier(f"redis://127.0.0.1:{cluster[0].port}", DOMAIN), chain(20, seed=3)
    assert put(tier, names) == of(0, names, OK, ERROR)
    assert any("redis+cluster://" in message for message in caplog.messages)
    tier.close()


def _slot_to_move(cluster: list[ClusterNode], names: Sequence[BlockName]) -> tuple[int, list[BlockName]]:
    """A slot of the first node with blocks in it, and those."""
    slot = next(slot_of(addresses([name])[0]) for name in names if owner_of(name) == 0)
    return slot, [name for name in names if slot_of(addresses([name])[0]) == slot]


def _hand_over(source: ClusterNode, target: ClusterNode, slot: int) -> None:
    for node in (target, source):
        node.call(f"CLUSTER SETSLOT {slot} NODE {target.node_id}")


def test_a_slot_that_moves_is_followed_block_by_block(cluster: list[ClusterNode]) -> None:
    """ASK while its blocks travel, MOVED when they have; nothing fails, and what is new lands where it belongs."""
    tier, names = RedisTier(url_of(cluster), DOMAIN), chain(40, seed=4)
    slot, moving = _slot_to_move(cluster, names)
    put(tier, names[: names.index(moving[0])])
    put(tier, [name for name in names if name not in moving])
    source, target = cluster[0], cluster[1]
    target.call(f"CLUSTER SETSLOT {slot} IMPORTING {source.node_id}")
    source.call(f"CLUSTER SETSLOT {slot} MIGRATING {target.node_id}")
    try:
        assert set(put(tier, names)) == {OK, EXISTS}, "a new block of the slot goes where it will belong"
        assert target.client.cluster("COUNTKEYSINSLOT", str(slot)) == len(moving)
        assert tier.error_replies()["ASK"] > 0
        assert put(tier, names) == [EXISTS] * 40
        assert_readable(tier, names)
        _hand_over(source, target, slot)
        assert_readable(tier, names)
        assert tier.lookup(addresses(names), soon()) == 40
        assert tier.error_replies()["MOVED"] > 0 and tier.counters().errors == 0
        late = RedisTier(url_of(cluster[2:]), DOMAIN)
        assert_readable(late, names)
        assert not late.error_replies()
        late.close()
    finally:
        target.client.flushall()
        _hand_over(target, source, slot)
        tier.close()


def test_a_lookup_follows_what_moved(cluster: list[ClusterNode]) -> None:
    tier, names = RedisTier(url_of(cluster), DOMAIN), chain(40, seed=5)
    put(tier, names)
    slot, moving = _slot_to_move(cluster, names)
    cluster[0].client.delete(*[redis_name(DOMAIN, address) for address in addresses(moving)])
    _hand_over(cluster[0], cluster[2], slot)
    try:
        assert tier.lookup(addresses(names), soon()) == names.index(moving[0])
        assert put(tier, moving) == [OK] * len(moving)
        assert tier.lookup(addresses(names), soon()) == 40
        assert tier.counters().errors == 0
    finally:
        cluster[2].client.flushall()
        _hand_over(cluster[2], cluster[0], slot)
        tier.close()


# -- a Cluster that fails ----------------------------------------------------------------------------------------------


def test_a_lost_node_takes_its_own_blocks_with_it_and_comes_back() -> None:
    with own_cluster() as nodes:
        tier, names = RedisTier(url_of(nodes), DOMAIN), chain(30, seed=6)
        put(tier, names)
        first_lost = [owner_of(name) for name in names].index(1)
        nodes[1].server.kill()
        assert get(tier, names)[0] == of(1, names, ERROR, OK)
        assert put(tier, names) == of(1, names, ERROR, EXISTS)
        assert tier.lookup(addresses(names), soon()) == first_lost
        with pytest.raises(TierUnavailable):
            tier.lookup(addresses(names[first_lost:]), soon())
        fresh = RedisTier(url_of([nodes[1], nodes[0]]), DOMAIN)
        assert get(fresh, names)[0] == of(1, names, ERROR, OK), "the first node of the URL need not be up"
        nodes[1].server.start()
        wait_for("it belongs again", lambda: set(put(tier, names)) <= {OK, EXISTS})
        for each in (tier, fresh):
            assert_readable(each, names)
            each.check()
            each.close()


def test_a_silent_node_takes_its_share_of_the_time_and_no_more() -> None:
    with own_cluster(cluster_node_timeout="60000") as nodes:
        tier, names = RedisTier(url_of(nodes), DOMAIN), chain(30, seed=7)
        put(tier, names)
        nodes[0].server.freeze()
        buffers = [bytearray(PAYLOAD_BYTES) for _ in names]
        reads = [BlockRead(name, PART, memoryview(buffer)) for name, buffer in zip(names, buffers, strict=True)]
        started_s = time.monotonic()
        assert tier.get(reads, started_s + 1.0) == of(0, names, TIMEOUT, OK)
        assert tier.lookup(addresses(names[1:]) if owner_of(names[0]) == 0 else addresses(names), started_s + 2.0) >= 0
        nodes[0].server.thaw()
        assert_readable(tier, names)
        tier.close()


def test_a_replica_takes_over() -> None:
    with own_cluster(num_replicas=1) as nodes:
        tier, names = RedisTier(url_of(nodes), DOMAIN), chain(30, seed=8)
        assert put(tier, names) == [OK] * 30
        wait_for("the replica has all", lambda: nodes[3].client.dbsize() == nodes[0].client.dbsize())
        nodes[0].server.kill()
        wait_for("the replica serves", lambda: get(tier, names)[0] == [OK] * 30)
        assert_readable(tier, names)
        assert put(tier, chain(30, seed=9)) == [OK] * 30
        tier.check()
        tier.close()


@pytest.mark.slow
def test_a_cluster_that_wants_all_its_nodes_is_down_without_one() -> None:
    with own_cluster(cluster_require_full_coverage="yes") as nodes:
        tier, names = RedisTier(url_of(nodes), DOMAIN), chain(10, seed=10)
        put(tier, names)
        nodes[2].server.kill()
        wait_for("the others notice", lambda: not nodes[0].is_well() and not nodes[1].is_well())
        assert get(tier, names)[0] == [ERROR] * 10 and put(tier, names) == [ERROR] * 10
        assert tier.error_replies()["CLUSTERDOWN"] > 0
        with pytest.raises(TierUnavailable):
            tier.lookup(addresses(names), soon())
        nodes[2].server.start()
        wait_for("it is whole again", lambda: set(put(tier, names)) <= {OK, EXISTS})
        tier.close()


def test_no_node_at_all_is_a_tier_that_is_down() -> None:
    tier, names = RedisTier(f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{free_port()}", DOMAIN), chain(3)
    assert put(tier, names) == [ERROR] * 3 and get(tier, names)[0] == [ERROR] * 3
    with pytest.raises(TierUnavailable, match="no node of the Cluster"):
        tier.lookup(addresses(names), soon())
    tier.touch(addresses(names))
    tier.put_identity(DOMAIN, b"x")
    assert tier.delete(addresses(names)) == 0 and tier.identities() == {}
    tier.close()


# -- Sentinel ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def watched() -> Iterator[tuple[Valkey, Valkey, int]]:
    """A master, its replica, and the port of the Sentinel that calls them mymaster."""
    with (
        own_valkey(port=str(free_port()), bind="127.0.0.1", **QUICK) as master,
        own_replica_of(master) as replica,
        own_sentinel("mymaster", master) as sentinel,
    ):
        yield master, replica, sentinel


def test_a_fail_over_by_sentinel_is_followed(watched: tuple[Valkey, Valkey, int]) -> None:
    master, replica, sentinel = watched
    other = RedisTier(f"redis+sentinel://127.0.0.1:{sentinel}/other", DOMAIN)
    with pytest.raises(TierUnavailable, match="no Sentinel names a master of 'other'"):
        other.lookup(addresses(chain(1)), soon())
    other.close()
    url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{sentinel}/mymaster/2"
    tier, names = RedisTier(url, DOMAIN), chain(12, seed=11)
    assert put(tier, names) == [OK] * 12, "a Sentinel that is down is passed over"
    assert master.client(db=2).dbsize() == 12
    wait_for("the replica has all", lambda: replica.client(db=2).dbsize() == 12)
    master.kill()
    assert get(tier, names)[0] == [ERROR] * 12
    wait_for("the replica was made master", lambda: get(tier, names)[0] == [OK] * 12)
    assert_readable(tier, names)
    assert put(tier, chain(5, seed=12)) == [OK] * 5
    tier.check()
    tier.close()


class SimulatedWatch:
    """Two simulated servers and a Sentinel that names one of them, rightly or not."""

    def __init__(self) -> None:
        self.clock, self.named, self.master = Clock(), "a", "a"
        self.servers = {name: SimulatedRedis(self.clock) for name in ("a", "b", "sentinel")}
        for name, server in self.servers.items():
            server.refuse = functools.partial(self.answer, name)
        places = {f"{name}:{26379 if name == 'sentinel' else 6379}": server for name, server in self.servers.items()}
        sockets = SimulatedSockets(places, self.clock, self.clock.sleep)
        self.tier = RedisTier("redis+sentinel://sentinel/mymaster", DOMAIN, sockets=sockets)

    def answer(self, name: str, command: Sequence[bytes]) -> bytes | None:
        if command[0] == b"SENTINEL":
            return array((bulk(self.named.encode()), bulk(b"6379"))) if command[2] == b"mymaster" else array(())
        if name == self.master:
            return None
        if command[0] == b"ROLE":
            return array((bulk(b"slave"), bulk(self.master.encode()), b":6379\r\n", bulk(b"connected"), b":0\r\n"))
        return ERROR_REPLIES["READONLY"] if command[0] in (b"SET", b"PEXPIRE", b"UNLINK") else None

    def put(self, names: Sequence[BlockName]) -> list[BlockStatus]:
        writes = [BlockWrite(name, PART, memoryview(payload_of(name))) for name in names]
        return self.tier.put(writes, self.clock() + 1.0)


def test_a_master_that_was_demoted_is_left_for_the_new_one() -> None:
    """Without a death: connections to the old master stay open, and answer READONLY."""
    watch, names = SimulatedWatch(), chain(3, seed=14)
    assert watch.put(names) == [OK] * 3
    watch.master = watch.named = "b"
    assert watch.put(names) == [ERROR] * 3, "that is how it is noticed"
    assert watch.put(names) == [OK] * 3
    assert len(watch.servers["b"].data.keys()) == 3
    watch.tier.check()
    watch.tier.close()


def test_a_sentinel_that_is_behind_sends_nobody_to_a_replica() -> None:
    watch, names = SimulatedWatch(), chain(3, seed=15)
    watch.master = "b"
    assert watch.put(names) == [ERROR] * 3
    with pytest.raises(TierUnavailable, match="a:6379 is not the master of 'mymaster'"):
        watch.tier.lookup(addresses(names), watch.clock() + 1.0)
    watch.named = "b"
    assert watch.put(names) == [OK] * 3
    watch.tier.close()


# -- URLs and replies --------------------------------------------------------------------------------------------------


def test_urls_of_several_servers() -> None:
    parsed = parse_redis_url("redis+sentinel://me:se%20cret@one,two:1234,[::1]:5/main/3?sentinel_password=other")
    assert parsed.kind is Kind.SENTINEL and parsed.service == "main"
    assert parsed.endpoints == (Endpoint("one", 26379), Endpoint("two", 1234), Endpoint("::1", 5))
    assert parsed.login == Login("me", "se cret", 3) and parsed.sentinel_login == Login(None, "other")
    assert "cret" not in repr(parsed) and "other" not in repr(parsed)
    parsed = parse_redis_url("rediss+cluster://:pw@one:7000,two?ssl_check_hostname=false")
    assert parsed.kind is Kind.CLUSTER and parsed.login == Login(None, "pw")
    assert [str(endpoint) for endpoint in parsed.endpoints] == ["one:7000", "two:6379"]
    assert parsed.endpoints[0].tls == (("ssl_check_hostname", False),)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("redis+sentinel://host:1", "/service"),
        ("redis+sentinel://host:1/a/1/2", "/service"),
        ("redis+cluster://host:1/3", "0: a Cluster has no other"),
        ("redis+cluster://host:1/a/b", "its last host"),
        ("redis+cluster://host:1,", "host:port"),
        ("redis+cluster://host:port", "host:port"),
        ("redis+cluster://host:1?colour=red", "colour"),
        ("redis+cluster://host:1?sentinel_password=x", "sentinel_password"),
        ("redis+cluster://host:1?ssl_ca_certs=/x", "rediss://"),
        ("rediss://host:1?ssl_ca_certs=/nowhere.pem", "ssl_ca_certs"),
        ("redis+fleet://host:1", "redis\\+sentinel://"),
    ],
)
def test_a_url_that_cannot_work_is_refused_without_its_password(url: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        parse_redis_url(url.replace("://", "://:hidden@", 1))
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "text", "redirect"),
    [
        ("MOVED", "3999 127.0.0.1:6381", Redirect(3999, "127.0.0.1", 6381, False)),
        ("ASK", "0 [::1]:1", Redirect(0, "::1", 1, True)),
        ("MOVED", "5 ::1:6379", Redirect(5, "::1", 6379, False)),
        ("MOVED", "7 :6379", Redirect(7, "", 6379, False)),
        ("MOVED", "", None),
        ("MOVED", "x host:1", None),
        ("ASK", "1 host", None),
        ("ERR", "1 host:1", None),
    ],
)
def test_redirects(code: str, text: str, redirect: Redirect | None) -> None:
    assert parse_redirect(ErrorReply(code, text)) == redirect


def test_every_block_has_its_own_bytes_on_every_node(cluster: list[ClusterNode]) -> None:
    tier, names = RedisTier(url_of(cluster), DOMAIN), chain(30, seed=16)
    put(tier, names)
    for node in cluster:
        for name in node.client.scan_iter(match="pgt1:*{*"):
            value = node.client.get(name)
            assert isinstance(value, bytes)
            assert any(value.endswith(payload_of(block)) for block in names)
    tier.close()
