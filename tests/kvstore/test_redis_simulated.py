"""The simulated Redis answers as a real Valkey does, byte by byte, and passes the contract below the tier."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetier.kvstore.block import BlockName, BlockStatus
from pagetier.kvstore.redis.simulated import ERROR_REPLIES, SimulatedRedis, SimulatedSockets, seeded_refusals
from pagetier.kvstore.redis.sockets import Endpoint, PlainStream, Stream
from pagetier.kvstore.redis.tier import RedisTier
from pagetier.kvstore.tier import BlockWrite, Tier
from tests.kvstore.rig import Clock
from tests.kvstore.tier_contract import DOMAIN, PART, TierContract, addresses, chain, payload_of
from tests.kvstore.valkey import Valkey, own_valkey, valkey, valkey_server  # noqa: F401

URL, ADDRESS = "redis://simulated:1", "simulated:1"
OK, ERROR, DROPPED = BlockStatus.OK, BlockStatus.ERROR, BlockStatus.DROPPED


def encode(command: Sequence[bytes]) -> bytes:
    return b"*%d\r\n" % len(command) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in command)


def dial(server: SimulatedRedis, clock: Clock) -> Stream:
    return SimulatedSockets({ADDRESS: server}, clock, clock.sleep).connect(Endpoint("simulated", 1), clock() + 1)


def say(stream: Stream, data: bytes, deadline_s: float) -> bytes:
    """Everything that is answered to `data` and a PING behind it."""
    stream.send([memoryview(data + b"PING\r\n")], deadline_s)
    answer, piece = b"", bytearray(65536)
    while not answer.endswith(b"+PONG\r\n"):
        num_bytes = stream.receive(memoryview(piece), deadline_s, whole=False)
        if not num_bytes:
            return answer
        answer += piece[:num_bytes]
    return answer


# -- against a real server ---------------------------------------------------------------------------------------------

KEYS = st.sampled_from([b"a", b"b", b"c{x}", b"abc"])
FIELDS = st.sampled_from([b"f", b"g"])
VALUES = st.binary(max_size=20) | st.sampled_from([b"10", b"x" * 5000])
NUMBERS = st.sampled_from([b"100000", b"200000", b"0", b"-1", b"x", b"1.5"])
RANGES = st.integers(-30, 30).map(lambda number: b"%d" % number)
OPTIONS = st.lists(
    st.sampled_from([(b"PX", b"100000"), (b"EX", b"100"), (b"NX",), (b"XX",), (b"KEEPTTL",), (b"PX", b"0"), (b"NO",)]),
    max_size=2,
).map(lambda options: [word for option in options for word in option])


def verb(name: bytes, *arguments: st.SearchStrategy[bytes]) -> st.SearchStrategy[list[bytes]]:
    return st.tuples(*arguments).map(lambda words: [name, *words])


COMMANDS = st.one_of(
    st.tuples(KEYS, VALUES, OPTIONS).map(lambda c: [b"SET", c[0], c[1], *c[2]]),
    *(verb(name, KEYS) for name in (b"GET", b"STRLEN", b"EXISTS", b"TYPE", b"TTL", b"PERSIST", b"HGETALL", b"HLEN")),
    *(verb(name, KEYS, KEYS) for name in (b"MGET", b"EXISTS", b"DEL", b"UNLINK", b"GET")),
    verb(b"PEXPIRE", KEYS, NUMBERS),
    verb(b"GETRANGE", KEYS, RANGES, RANGES),
    verb(b"HSET", KEYS, FIELDS, VALUES),
    verb(b"HSET", KEYS, FIELDS, VALUES, FIELDS),
    verb(b"HGET", KEYS, FIELDS),
    verb(b"HDEL", KEYS, FIELDS, FIELDS),
    *(verb(name) for name in (b"DBSIZE", b"FLUSHDB", b"PING", b"GET", b"ROLE", b"nope", b"echo", b"AUTH", b"dbsize")),
    verb(b"SELECT", st.sampled_from([b"0", b"1", b"16", b"x"])),
    verb(b"AUTH", VALUES),
    verb(b"AUTH", st.sampled_from([b"default", b"someone"]), VALUES),
    verb(b"PING", VALUES),
    verb(b"NOPE", st.just(b"x"), st.just(b"y")),
    verb(b"SCAN", st.sampled_from([b"x", b"-1"])),
    verb(b"SCAN", st.just(b"0"), st.sampled_from([b"COUNT", b"FOO"]), st.sampled_from([b"0", b"x"])),
)


@settings(max_examples=200, deadline=None)
@given(commands=st.lists(COMMANDS, max_size=12))
def test_every_reply_is_the_real_servers(valkey_server: Valkey, commands: list[list[bytes]]) -> None:  # noqa: F811
    clock = Clock()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(os.fspath(valkey_server.socket_path))
        real, simulated = PlainStream(sock), dial(SimulatedRedis(clock), clock)
        say(real, encode([b"FLUSHALL"]), time.monotonic() + 10)
        for command in commands:
            wanted = say(real, encode(command), time.monotonic() + 10)
            assert say(simulated, encode(command), clock() + 1) == wanted, command


@pytest.mark.parametrize(
    "data",
    [b"*1\r\n:3\r\n", b"*x\r\n", b"*1\r\n$abc\r\n", b"ping\r\n\r\n*0\r\n", b"*-1\r\nping x\r\n", b"echo  a \r\n"],
)
def test_what_is_no_command_is_answered_as_by_the_real_server(valkey_server: Valkey, data: bytes) -> None:  # noqa: F811
    clock = Clock()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(os.fspath(valkey_server.socket_path))
        wanted = say(PlainStream(sock), data, time.monotonic() + 10)
        assert say(dial(SimulatedRedis(clock), clock), data, clock() + 1) == wanted


def test_a_password_is_asked_for_as_by_the_real_server() -> None:
    clock, commands = Clock(), ["GET a", "NOPE", "AUTH no", "AUTH who no", "AUTH", "PING", "AUTH default pw", "GET a"]
    with own_valkey(requirepass="pw") as server, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(os.fspath(server.socket_path))
        real, simulated = PlainStream(sock), dial(SimulatedRedis(clock, password="pw"), clock)
        for command in commands:
            data = encode(command.encode().split())
            for stream, deadline_s in ((real, time.monotonic() + 10), (simulated, clock() + 1)):
                stream.send([memoryview(data)], deadline_s)
            replies = [bytearray(100), bytearray(100)]
            real.receive(memoryview(replies[0]), time.monotonic() + 10, whole=False)
            simulated.receive(memoryview(replies[1]), clock() + 1, whole=False)
            assert replies[0] == replies[1], command


# -- what the real server's tests cannot wait for ----------------------------------------------------------------------


def test_values_expire_by_the_callers_clock() -> None:
    clock = Clock()
    stream = dial(SimulatedRedis(clock), clock)
    assert say(stream, encode([b"SET", b"k", b"v", b"PX", b"500"]), clock() + 1).startswith(b"+OK")
    clock.sleep(0.25)
    assert say(stream, encode([b"PTTL", b"k"]), clock() + 1).startswith(b":250\r\n")
    clock.sleep(0.25)
    assert say(stream, encode([b"GET", b"k"]), clock() + 1).startswith(b"$-1\r\n")
    assert say(stream, encode([b"PTTL", b"k"]), clock() + 1).startswith(b":-2\r\n")


@pytest.mark.parametrize("seed", range(20))
def test_a_scan_finds_what_stays(seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    server = SimulatedRedis(clock)
    stays = {b"stays:%d" % i for i in range(40)}
    for key in stays:
        server.data.execute(0, [b"SET", key, b"v"])
    found: set[bytes] = set()
    cursor = b"0"
    while True:
        reply = server.data.execute(0, [b"SCAN", cursor, b"MATCH", b"stays:*", b"COUNT", b"%d" % rng.randrange(1, 9)])
        assert reply is not None
        words = [word for word in reply.split(b"\r\n") if word and word[:1] not in b"*$"]
        cursor, found = words[0], found | set(words[1:])
        for _ in range(5):
            other = b"goes:%d" % rng.randrange(30)
            server.data.execute(0, rng.choice([[b"SET", other, b"v"], [b"DEL", other], [b"SET", min(stays), b"w"]]))
        if cursor == b"0":
            break
    assert found == stays


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
def test_memory_is_never_exceeded(policy: str) -> None:
    clock = Clock()
    server = SimulatedRedis(clock, maxmemory=10_000, policy=policy)
    replies = {server.data.execute(0, [b"SET", b"key%d" % i, b"v" * (i % 700)]) for i in range(200)}
    server.data.check()
    assert replies == ({b"+OK\r\n"} if policy == "allkeys-lru" else {b"+OK\r\n", ERROR_REPLIES["OOM"]})
    assert server.data.keys() and bool(server.data.evictions) == (policy == "allkeys-lru")
    assert server.data.execute(0, [b"SET", b"big", b"v" * 20_000]) == ERROR_REPLIES["OOM"]


# -- below a tier ------------------------------------------------------------------------------------------------------


class TestRedisTierOverSimulation(TierContract):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        server = SimulatedRedis(time.monotonic, maxmemory=8 << 20, policy="allkeys-lru")
        sockets = SimulatedSockets({ADDRESS: server}, time.monotonic, time.sleep)
        tier = RedisTier(URL, DOMAIN, sockets=sockets, refresh_interval_s=0.0)
        tier.put_identity(DOMAIN, b"known")  # reads maxmemory
        yield tier
        tier.close()
        server.data.check()


def tier_over(server: SimulatedRedis, clock: Clock, url: str = URL) -> RedisTier:
    sockets = SimulatedSockets({ADDRESS: server}, clock, clock.sleep)
    return RedisTier(url, DOMAIN, sockets=sockets, refresh_interval_s=0.0)


def test_a_frozen_server_takes_the_time_and_no_more() -> None:
    clock = Clock()
    server = SimulatedRedis(clock)
    tier, names = tier_over(server, clock), chain(3)
    server.freeze()
    started_s = clock()
    assert tier.lookup(addresses(names[:0]), clock() + 1) == 0
    with pytest.raises(Exception, match="no answer in time"):
        tier.lookup(addresses(names), clock() + 0.125)
    assert clock() == pytest.approx(started_s + 0.125)
    server.thaw()
    assert tier.lookup(addresses(names), clock() + 0.125) == 0
    tier.close()


def test_a_write_that_timed_out_may_be_carried_out_later_and_whole() -> None:
    clock = Clock()
    server = SimulatedRedis(clock)
    stream = dial(server, clock)
    server.freeze()
    stream.send([memoryview(encode([b"SET", b"whole", b"v"]) + encode([b"SET", b"half", b"v"])[:-3])], clock() + 1)
    stream.close()
    server.thaw()
    assert server.data.keys() == [b"whole"]


def test_a_restart_is_noticed_and_empty() -> None:
    clock = Clock()
    server = SimulatedRedis(clock)
    tier, names = tier_over(server, clock), chain(3)
    assert _put(tier, clock, names) == [OK] * 3
    server.kill()
    assert _put(tier, clock, names) == [ERROR] * 3
    server.start()
    assert _put(tier, clock, names) == [OK] * 3
    assert tier.counters().restarts == 1
    tier.close()


def test_error_replies_come_as_often_as_told() -> None:
    clock = Clock()
    server = SimulatedRedis(clock)
    tier = tier_over(server, clock)
    server.refuse = seeded_refusals(random.Random(1), 1.0)
    for number in range(40):
        assert set(_put(tier, clock, chain(3, seed=number))) <= {ERROR, DROPPED}
    assert len(tier.error_replies()) > 10, "every kind comes up"
    assert server.data.keys() == []
    tier.close()


def _put(tier: RedisTier, clock: Clock, names: Sequence[BlockName]) -> list[BlockStatus]:

    return tier.put([BlockWrite(name, PART, memoryview(payload_of(name))) for name in names], clock() + 1)
