"""The Redis tier against a real Valkey: the contract, and what silence, death and foreign values do."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from pagetier.kvstore.block import BlockStatus, Part
from pagetier.kvstore.errors import ConfigError, TierUnavailable
from pagetier.kvstore.record import header_bytes, pack_header, redis_name
from pagetier.kvstore.redis.faults import FaultSockets, SocketFaults
from pagetier.kvstore.redis.names import RecordNames
from pagetier.kvstore.redis.resp import encode_command
from pagetier.kvstore.redis.sockets import Sockets
from pagetier.kvstore.redis.tier import RedisTier
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
from tests.kvstore.valkey import Valkey, own_valkey, valkey, valkey_server  # noqa: F401

OK, MISS, CORRUPT, EXISTS = BlockStatus.OK, BlockStatus.MISS, BlockStatus.CORRUPT, BlockStatus.EXISTS
ERROR, TIMEOUT, DROPPED = BlockStatus.ERROR, BlockStatus.TIMEOUT, BlockStatus.DROPPED
PATIENCE_S = 0.1


@pytest.fixture(scope="module")
def small_server() -> Iterator[Valkey]:
    with own_valkey(maxmemory=str(8 << 20), maxmemory_policy="allkeys-lru") as server:
        yield server


class TestRedisTier(TierContract):
    @pytest.fixture
    def tier(self, small_server: Valkey) -> Iterator[Tier]:
        small_server.client().flushall()
        tier = RedisTier(small_server.url, DOMAIN, refresh_interval_s=0.0)
        tier.put_identity(DOMAIN, b"known")  # reads maxmemory
        yield tier
        tier.close()


@pytest.fixture
def tier(valkey: Valkey) -> Iterator[RedisTier]:  # noqa: F811
    tier = RedisTier(valkey.url, DOMAIN)
    yield tier
    tier.check()
    tier.close()


@pytest.fixture
def own_server() -> Iterator[Valkey]:
    with own_valkey() as server:
        yield server


def names_of(seed: int, num_blocks: int = 4) -> list[str]:
    return [redis_name(DOMAIN, address) for address in addresses(chain(num_blocks, seed))]


def buffers(num_blocks: int, nbytes: int = PAYLOAD_BYTES) -> list[bytearray]:
    return [bytearray(nbytes) for _ in range(num_blocks)]


# -- what is stored ---------------------------------------------------------------------------------------------------


def test_a_value_is_header_and_payload_under_the_documented_name(tier: RedisTier, valkey: Valkey) -> None:  # noqa: F811
    (name,) = chain(1)
    put(tier, [name])
    stored = valkey.client().get(redis_name(DOMAIN, addresses([name])[0]))
    assert stored == pack_header(DOMAIN, name, PART, payload_of(name)) + payload_of(name)


def test_commands_of_many_are_the_commands_of_each() -> None:
    names = RecordNames(DOMAIN)
    same = addresses(chain(5))
    mixed = [*same, *addresses(chain(5), OTHER_PART), *addresses(chain(2), Part(1, 10, 20, 0, 12))]
    for some in (same, mixed, same[:1]):
        each = [encode_command(b"EXISTS", redis_name(DOMAIN, address).encode()) for address in some]
        assert names.commands("EXISTS", some) == b"".join(each)
        assert [names.command(b"EXISTS", address) for address in some] == each
    assert names.commands("EXISTS", []) == b""


def test_values_expire_and_use_renews_them(valkey: Valkey) -> None:  # noqa: F811
    client, names = valkey.client(), chain(3)
    tier = RedisTier(valkey.url, DOMAIN, ttl_s=100)
    put(tier, names)
    for value in names_of(0, 3):
        assert 99_000 < int(client.pttl(value)) <= 100_000
        client.pexpire(value, 5_000)
    tier.lookup(addresses(names), soon())
    assert int(client.pttl(names_of(0, 3)[0])) <= 5_000, "a lookup is not a use"
    tier.touch(addresses(names[:2]))
    assert put(tier, names[2:]) == [EXISTS]
    assert all(int(client.pttl(value)) > 99_000 for value in names_of(0, 3))
    tier.close()


def test_a_touch_renews_the_tail_first(tier: RedisTier, valkey: Valkey) -> None:  # noqa: F811
    names = chain(5)
    put(tier, names)
    with valkey.client().monitor() as monitor:  # type: ignore[no-untyped-call]
        next_command = monitor.listen()
        tier.touch(addresses(names))
        touched = [str(next(next_command)["command"]).split()[1] for _ in names]
    assert touched == [redis_name(DOMAIN, address) for address in reversed(addresses(names))]


def test_a_long_lookup_is_one_round_trip(valkey: Valkey) -> None:  # noqa: F811
    names, counted = chain(6250, seed=3), SocketFaults()
    tier = RedisTier(valkey.url, DOMAIN, sockets=FaultSockets(Sockets(), counted))
    put(tier, names[:40])
    before = counted.num_sends
    assert tier.lookup(addresses(names), soon()) == 40
    assert counted.num_sends == before + 1
    tier.close()


def test_pipelines_are_bounded_in_bytes(valkey: Valkey) -> None:  # noqa: F811
    names, counted = chain(24, seed=4), SocketFaults()
    sockets = FaultSockets(Sockets(), counted)
    tier = RedisTier(valkey.url, DOMAIN, max_pipeline_bytes=6 * PAYLOAD_BYTES, sockets=sockets)
    assert put(tier, names) == [OK] * 24
    before = counted.num_sends
    assert_readable(tier, names)
    assert counted.num_sends == before + 12, "windows of two"
    assert tier.lookup(addresses(names), soon()) == 24
    tier.close()
    smallest = RedisTier(valkey.url, DOMAIN, max_pipeline_bytes=1)
    assert_readable(smallest, names)
    assert smallest.lookup(addresses(names), soon()) == 24
    smallest.close()


def test_blocks_larger_than_any_socket_buffer(tier: RedisTier) -> None:
    names, nbytes = chain(3, seed=5), 2 << 20
    writes = [BlockWrite(name, PART, memoryview(payload_of(name, nbytes=nbytes))) for name in names]
    assert tier.put(writes, soon()) == [OK] * 3
    got = buffers(3, nbytes)
    reads = [BlockRead(name, PART, memoryview(buffer)) for name, buffer in zip(names, got, strict=True)]
    assert tier.get(reads, soon()) == [OK] * 3
    assert [bytes(buffer) for buffer in got] == [payload_of(name, nbytes=nbytes) for name in names]


# -- values that are not ours -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spot", ["payload", "header", "token"])
def test_a_flipped_byte_is_corrupt_counted_and_quarantined(
    tier: RedisTier,
    valkey: Valkey,  # noqa: F811
    spot: str,
) -> None:
    names = chain(4, seed=6)
    put(tier, names)
    client, value = valkey.client(), names_of(6)[2]
    at = {"payload": header_bytes(4) + 77, "header": 40, "token": header_bytes(4) - 1}[spot]
    client.setrange(value, at, bytes([_stored(valkey, value)[at] ^ 1]))
    assert get(tier, names)[0] == [OK, OK, CORRUPT, OK]
    assert tier.counters().corrupt == 1
    assert get(tier, names)[0] == [OK, OK, MISS, OK], "not read again and again"
    assert put(tier, names) == [EXISTS, EXISTS, OK, EXISTS]
    assert_readable(tier, names)


@pytest.mark.parametrize("kept", [0, 1, 100, header_bytes(4), -1])
def test_a_value_of_another_length_is_corrupt(tier: RedisTier, valkey: Valkey, kept: int) -> None:  # noqa: F811
    names = chain(4, seed=7)
    put(tier, names)
    client, value = valkey.client(), names_of(7)[1]
    client.set(value, _stored(valkey, value)[:kept])
    assert get(tier, names)[0] == [OK, CORRUPT, OK, OK]
    client.set(value, b"x" * 100_000)
    assert get(tier, names)[0] == [OK, CORRUPT, OK, OK]
    client.set(value, b"y" * 100)
    assert put(tier, names) == [EXISTS, OK, EXISTS, EXISTS], "what cannot be the record is replaced"
    assert_readable(tier, names)


def test_a_value_of_another_type_is_corrupt_then_replaced(tier: RedisTier, valkey: Valkey) -> None:  # noqa: F811
    names = chain(4, seed=8)
    put(tier, names)
    client = valkey.client()
    client.delete(*names_of(8)[1:3])
    client.rpush(names_of(8)[1], "a list")
    client.rpush(names_of(8)[2], "a list")
    assert put(tier, names[1:2]) == [OK]
    assert get(tier, names)[0] == [OK, OK, CORRUPT, OK]
    assert put(tier, names) == [EXISTS, EXISTS, OK, EXISTS]


def test_another_domains_record_under_our_name_is_not_served(tier: RedisTier, valkey: Valkey) -> None:  # noqa: F811
    (name,) = chain(1, seed=9)
    record = pack_header(bytes(32), name, PART, payload_of(name)) + payload_of(name)
    valkey.client().set(redis_name(DOMAIN, addresses([name])[0]), record)
    assert tier.lookup(addresses([name]), soon()) == 1
    assert get(tier, [name])[0] == [CORRUPT]


def test_foreign_fields_beside_the_identities_are_ignored(tier: RedisTier, valkey: Valkey) -> None:  # noqa: F811
    tier.put_identity(DOMAIN, b"ours")
    valkey.client().hset("pgt1:identities", mapping={"short": "x", "z" * 64: "y"})
    assert tier.identities() == {DOMAIN: b"ours"}


# -- a server that is silent, dead or full ----------------------------------------------------------------------------


def test_a_late_reply_is_never_the_next_answer(own_server: Valkey) -> None:
    tier = RedisTier(own_server.url, DOMAIN)
    first, second = chain(4, seed=10), chain(4, seed=11)
    put(tier, first + second)
    own_server.freeze()
    started_s = time.monotonic()
    got = buffers(4)
    reads = [BlockRead(name, PART, memoryview(buffer)) for name, buffer in zip(first, got, strict=True)]
    assert tier.get(reads, time.monotonic() + PATIENCE_S) == [TIMEOUT] * 4
    with pytest.raises(TierUnavailable):
        tier.lookup(addresses(first), time.monotonic() + PATIENCE_S)
    writes = [BlockWrite(name, PART, memoryview(payload_of(name))) for name in chain(2, seed=12)]
    assert tier.put(writes, time.monotonic() + PATIENCE_S) == [TIMEOUT] * 2
    assert time.monotonic() - started_s < 10 * PATIENCE_S
    tier.check()
    before = [bytes(buffer) for buffer in got]
    own_server.thaw()
    for _ in range(3):
        assert_readable(tier, second)
        assert tier.lookup(addresses(chain(4, seed=13)), soon()) == 0
        assert tier.lookup(addresses(first), soon()) == 4
    assert [bytes(buffer) for buffer in got] == before, "written to after get returned"
    tier.check()
    tier.close()


def test_a_time_out_in_the_middle_of_a_pipeline_keeps_what_arrived(own_server: Valkey) -> None:
    tier = RedisTier(own_server.url, DOMAIN, max_pipeline_bytes=4 << 20)
    names, nbytes = chain(12, seed=14), 1 << 20
    tier.put([BlockWrite(name, PART, memoryview(payload_of(name, nbytes=nbytes))) for name in names], soon())
    freezer = threading.Timer(0.0, own_server.freeze)
    got = buffers(12, nbytes)
    reads = [BlockRead(name, PART, memoryview(buffer)) for name, buffer in zip(names, got, strict=True)]
    freezer.start()
    statuses = tier.get(reads, time.monotonic() + PATIENCE_S)
    freezer.join()
    own_server.thaw()
    assert statuses == sorted(statuses, key=lambda status: status is TIMEOUT), "OK after a TIMEOUT"
    for name, status, buffer in zip(names, statuses, got, strict=True):
        assert status is TIMEOUT or bytes(buffer) == payload_of(name, nbytes=nbytes)
    assert tier.get(reads, soon()) == [OK] * 12
    tier.close()


def test_a_silent_server_holds_up_many_threads_no_longer_than_their_deadline(own_server: Valkey) -> None:
    tier = RedisTier(own_server.url, DOMAIN, max_connections=2)
    names = chain(2, seed=15)
    put(tier, names)
    own_server.freeze()
    took: list[float] = []

    def read() -> None:
        started_s = time.monotonic()
        reads = [BlockRead(name, PART, memoryview(buffer)) for name, buffer in zip(names, buffers(2), strict=True)]
        assert tier.get(reads, started_s + PATIENCE_S) == [TIMEOUT] * 2
        took.append(time.monotonic() - started_s)

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own_server.thaw()
    assert len(took) == 6 and max(took) < 10 * PATIENCE_S
    tier.close()


def test_a_server_that_is_down_at_start_is_used_when_it_comes(own_server: Valkey) -> None:
    own_server.kill()
    tier = RedisTier(own_server.url, DOMAIN)
    names = chain(3, seed=16)
    assert put(tier, names) == [ERROR] * 3
    assert get(tier, names)[0] == [ERROR] * 3
    with pytest.raises(TierUnavailable, match="lookup"):
        tier.lookup(addresses(names), soon())
    tier.touch(addresses(names))
    assert tier.delete(addresses(names)) == 0 and tier.identities() == {}
    assert tier.counters().errors > 0
    own_server.start()
    assert put(tier, names) == [OK] * 3
    assert_readable(tier, names)
    tier.close()


def test_a_restarted_server_costs_misses_not_errors(own_server: Valkey) -> None:
    tier = RedisTier(own_server.url, DOMAIN)
    names = chain(3, seed=17)
    put(tier, names)
    own_server.kill()
    own_server.start()
    assert get(tier, names)[0] == [MISS] * 3, "the stale connection was noticed"
    assert put(tier, names) == [OK] * 3
    assert tier.counters().errors == 0
    tier.close()


def test_a_restart_of_the_server_is_noticed_by_a_touch(own_server: Valkey) -> None:
    tier = RedisTier(own_server.url, DOMAIN, refresh_interval_s=0.0)
    names = chain(3, seed=19)
    put(tier, names)
    tier.touch(addresses(names))
    assert tier.counters().restarts == 0
    own_server.kill()
    own_server.start()
    tier.touch(addresses(names))  # may find the old connection closed
    tier.touch(addresses(names))
    assert tier.counters().restarts == 1 and tier.counters().blocks == 0
    tier.close()


def test_a_full_server_drops_and_goes_on_serving() -> None:
    with own_valkey(maxmemory=str(3 << 20), maxmemory_policy="noeviction") as server:
        tier = RedisTier(server.url, DOMAIN, max_pipeline_bytes=16 * PAYLOAD_BYTES, refresh_interval_s=0.0)
        names = chain(600, seed=18)
        statuses = put(tier, names)
        num_stored = statuses.index(DROPPED)
        assert 0 < num_stored and set(statuses[num_stored + 8 :]) == {DROPPED}, "sent more than the window that failed"
        assert tier.error_replies()["OOM"] > 0 and tier.counters().errors > 0
        assert tier.lookup(addresses(names), soon()) == num_stored
        assert_readable(tier, names[:num_stored])
        assert tier.counters().capacity_bytes == 3 << 20
        server.client().config_set("maxmemory", 0)
        assert put(tier, names)[:num_stored] == [EXISTS] * num_stored
        assert_readable(tier, names)
        tier.close()


def test_evictions_are_counted_from_when_we_came() -> None:
    with own_valkey(maxmemory=str(3 << 20), maxmemory_policy="allkeys-lru") as server:
        tier = RedisTier(server.url, DOMAIN, refresh_interval_s=0.0)
        put(tier, chain(600, seed=19))
        tier.touch(addresses(chain(1)))
        evicted = tier.counters().evictions
        late = RedisTier(server.url, DOMAIN, refresh_interval_s=0.0)
        late.touch(addresses(chain(1)))
        assert evicted > 0 and late.counters().evictions == 0
        for each in (tier, late):
            each.close()


def test_close_ends_a_call_that_waits(own_server: Valkey) -> None:
    counted = SocketFaults()
    tier = RedisTier(own_server.url, DOMAIN, sockets=FaultSockets(Sockets(), counted))
    names = chain(1, seed=20)
    put(tier, names)
    own_server.freeze()
    before = counted.num_receives
    statuses: list[list[BlockStatus]] = []
    thread = threading.Thread(target=lambda: statuses.append(get(tier, names)[0]))
    thread.start()
    give_up_s = time.monotonic() + 5.0
    while counted.num_receives == before and time.monotonic() < give_up_s:
        time.sleep(0.001)
    time.sleep(0.01)
    tier.close()
    thread.join(5.0)
    own_server.thaw()
    assert statuses == [[ERROR]]
    with pytest.raises(TierUnavailable):
        tier.lookup(addresses(names), soon())


# -- how to reach it --------------------------------------------------------------------------------------------------


def test_tcp_password_and_database_of_the_url() -> None:
    port = _free_port()
    with own_valkey(port=str(port), bind="127.0.0.1", requirepass="se cret/1") as server:
        tier = RedisTier(f"redis://default:se%20cret%2F1@127.0.0.1:{port}/3", DOMAIN)
        names = chain(3, seed=21)
        assert put(tier, names) == [OK] * 3
        assert_readable(tier, names)
        assert server.client(password="se cret/1", db=3).dbsize() == 3
        assert tier.counters().blocks == 3
        wrong = RedisTier(f"redis://:wrong@127.0.0.1:{port}", DOMAIN)
        none = RedisTier(f"redis://127.0.0.1:{port}", DOMAIN)
        assert put(wrong, names) == [ERROR] * 3 and wrong.error_replies() == {"WRONGPASS": 1}
        assert put(none, names) == [ERROR] * 3 and none.error_replies() == {"NOAUTH": 3}
        assert get(none, names)[0] == [ERROR] * 3
        with pytest.raises(TierUnavailable, match="NOAUTH"):
            none.lookup(addresses(names), soon())
        for each in (tier, wrong, none):
            each.close()


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("localhost:6379", "redis://"),
        ("redis://localhost:port", "redis://"),
        ("redis://localhost?socket_timeout=3", "socket_timeout"),
        ("redis://localhost?colour=red", "colour"),
        ("rediss://localhost?ssl_cert_reqs=maybe", "maybe"),
        ("unix:///tmp/" + "x" * 110, "107"),
    ],
)
def test_a_url_that_cannot_work_is_refused_at_once(url: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RedisTier(url, DOMAIN)


def test_identities_are_not_counted_as_blocks(valkey: Valkey) -> None:  # noqa: F811
    tier = RedisTier(valkey.url, DOMAIN)
    tier.put_identity(DOMAIN, b"identity")
    names = chain(3, seed=33)
    assert put(tier, names) == [OK] * 3
    tier.close()
    other = RedisTier(valkey.url, DOMAIN)
    assert put(other, names) == [EXISTS] * 3  # a put brings the server's own figures
    assert other.counters().blocks == 3
    other.close()


def test_a_ttl_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-redis-ttl"):
        RedisTier("redis://localhost", DOMAIN, ttl_s=0)


def _stored(server: Valkey, value: str) -> bytes:
    found = server.client().get(value)
    assert isinstance(found, bytes)
    return found


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
