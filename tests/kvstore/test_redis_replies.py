"""What the Redis tier makes of every reply a server could give, with a scripted server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from pagetier.kvstore.block import BlockStatus
from pagetier.kvstore.errors import TierUnavailable
from pagetier.kvstore.record import pack_header
from pagetier.kvstore.redis.tier import RedisTier
from pagetier.kvstore.tier import BlockRead, BlockWrite
from tests.kvstore.resp_server import Command, RespServer
from tests.kvstore.tier_contract import DOMAIN, PART, PAYLOAD_BYTES, addresses, chain, get, payload_of, put, soon

OK, MISS, CORRUPT, EXISTS = BlockStatus.OK, BlockStatus.MISS, BlockStatus.CORRUPT, BlockStatus.EXISTS
ERROR, TIMEOUT, DROPPED = BlockStatus.ERROR, BlockStatus.TIMEOUT, BlockStatus.DROPPED

ERRORS = {
    "LOADING": b"-LOADING Valkey is loading the dataset in memory\r\n",
    "READONLY": b"-READONLY You can't write against a read only replica.\r\n",
    "MOVED": b"-MOVED 3999 127.0.0.1:6381\r\n",
    "ASK": b"-ASK 3999 127.0.0.1:6381\r\n",
    "NOAUTH": b"-NOAUTH Authentication required.\r\n",
    "NOPERM": b"-NOPERM User has no permissions to run this command\r\n",
    "MISCONF": b"-MISCONF Errors writing to the AOF file\r\n",
    "CLUSTERDOWN": b"-CLUSTERDOWN The cluster is down\r\n",
    "MASTERDOWN": b"-MASTERDOWN Link with MASTER is down\r\n",
    "BUSY": b"-BUSY Valkey is busy running a script.\r\n",
    "ERR": b"-ERR max number of clients reached\r\n",
}


def tier_of(server: RespServer, **options: float) -> RedisTier:
    return RedisTier(server.url, DOMAIN, refresh_interval_s=1e9, **options)  # type: ignore[arg-type]


def record(number: int) -> bytes:
    name = chain(8)[number]
    return pack_header(DOMAIN, name, PART, payload_of(name)) + payload_of(name)


def bulk(body: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(body), body)


def stored() -> Callable[[Command], bytes]:
    """Answers as a server does that holds the first eight blocks of `chain`."""
    values = {name.key.hex().encode(): bulk(record(i)) for i, name in enumerate(chain(8))}

    def answer(command: Command) -> bytes:
        verb, *rest = command
        value = values.get(rest[0].split(b"{")[1].split(b"}")[0]) if rest and b"{" in rest[0] else None
        if verb == b"GET":
            return value or b"$-1\r\n"
        if verb in (b"EXISTS", b"PEXPIRE", b"UNLINK"):
            return b":%d\r\n" % (value is not None)
        return b":0\r\n" if verb == b"STRLEN" else b"+OK\r\n"

    return answer


@pytest.mark.parametrize("code", ERRORS)
def test_an_error_reply_is_one_blocks_failure(code: str) -> None:
    healthy = stored()
    sick_key = chain(8)[2].key.hex().encode()

    def answer(command: Command) -> bytes:
        return ERRORS[code] if sick_key in b"".join(command[1:2]) else healthy(command)

    with RespServer(answer) as server:
        tier, names = tier_of(server), chain(8)
        statuses, buffers = get(tier, names)
        assert statuses == [OK, OK, ERROR] + [OK] * 5
        assert bytes(buffers[3]) == payload_of(names[3])
        assert put(tier, names) == [OK, OK, ERROR] + [OK] * 5
        assert tier.lookup(addresses(names), soon()) == 2
        with pytest.raises(TierUnavailable, match=code):
            tier.lookup(addresses(names[2:]), soon())
        assert tier.error_replies()[code] == 4
        assert tier.counters().errors == 4
        tier.touch(addresses(names))
        assert tier.delete(addresses(names)) == 7
        tier.check()
        tier.close()
        # An error reply leaves the connection in step; who reads READONLY dials anew, in case the name has moved on.
        assert server.num_connections == 1 or code == "READONLY"


@pytest.mark.parametrize("code", ["LOADING", "NOAUTH", "CLUSTERDOWN"])
def test_a_server_that_refuses_everything_gets_no_payload(code: str) -> None:
    with RespServer(lambda command: ERRORS[code]) as server:
        tier = tier_of(server)
        assert put(tier, chain(4)) == [ERROR] * 4
        assert not any(command[0] == b"SET" for command in server.commands)
        tier.put_identity(DOMAIN, b"x")
        assert tier.identities() == {}
        tier.close()


def test_a_replica_that_refuses_to_write_still_serves() -> None:
    healthy = stored()
    writes = (b"SET", b"PEXPIRE", b"UNLINK", b"HSET")
    with RespServer(lambda command: ERRORS["READONLY"] if command[0] in writes else healthy(command)) as server:
        tier = tier_of(server)
        assert put(tier, chain(4)) == [ERROR] * 4
        assert get(tier, chain(4))[0] == [OK] * 4
        tier.close()


def test_an_error_to_the_set_itself_is_that_blocks_and_ends_the_sending() -> None:
    def answer(command: Command) -> bytes:
        if command[0] != b"SET":
            return b":0\r\n"
        return ERRORS["MISCONF"] if len([c for c in server.commands if c[0] == b"SET"]) == 2 else b"+OK\r\n"

    with RespServer(answer) as server:
        tier = tier_of(server, max_pipeline_bytes=4 * 9000)
        assert put(tier, chain(8)) == [OK, ERROR] + [DROPPED] * 6
        tier.close()


@pytest.mark.parametrize(
    "reply",
    [
        b"?what\r\n",
        b"$abc\r\n",
        b"+OK\r\n",
        b":1\r\n",
        b"*1\r\n$1\r\nx\r\n",
        b"\r\n",
        b"x" * 100_000,
        bulk(record(0))[:-2] + b"xx",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
    ids=["type", "length", "simple", "integer", "array", "empty", "endless", "unended", "http"],
)
def test_what_is_not_a_bulk_reply_closes_the_connection(reply: bytes) -> None:
    with RespServer(lambda command: reply) as server:
        tier = tier_of(server)
        assert get(tier, chain(2))[0] == [ERROR] * 2
        tier.check()
        server.answer = stored()
        assert get(tier, chain(2))[0] == [OK] * 2
        assert server.num_connections == 2
        tier.close()


@pytest.mark.parametrize("cut", [0, 1, 5, 100, 240, 4000, -2, -1])
def test_a_server_that_dies_inside_a_reply_fails_that_block_and_the_rest(cut: int) -> None:
    healthy, gets = stored(), [0]

    def answer(command: Command) -> bytes | None:
        gets[0] += 1
        if gets[0] > 2:
            return None
        reply = healthy(command)
        return reply if gets[0] == 1 else reply[:cut]

    with RespServer(answer) as server:
        tier = tier_of(server)
        statuses, buffers = get(tier, chain(4))
        assert statuses == [OK, ERROR, ERROR, ERROR]
        assert bytes(buffers[0]) == payload_of(chain(1)[0])
        server.answer = healthy
        assert get(tier, chain(4))[0] == [OK] * 4
        tier.close()


def test_a_server_that_drips_is_cut_off_at_the_deadline() -> None:
    healthy = stored()

    def answer(command: Command) -> bytes:
        time.sleep(0.03)
        return healthy(command)

    with RespServer(answer) as server:
        tier = tier_of(server)
        started_s = time.monotonic()
        names = chain(8)
        assert tier.lookup(addresses(names[:1]), soon()) == 1
        with pytest.raises(TierUnavailable):
            tier.lookup(addresses(names), time.monotonic() + 0.1)
        assert time.monotonic() - started_s < 1.0
        server.answer = healthy
        assert get(tier, names)[0] == [OK] * 8
        tier.close()


def test_a_value_that_drips_is_cut_off_at_the_deadline() -> None:
    with RespServer(stored()) as server:
        server.piece_bytes, server.pause_s = 100, 0.02  # 1.6 s a value, and always some progress
        tier = tier_of(server)
        started_s = time.monotonic()
        reads = [BlockRead(name, PART, memoryview(bytearray(PAYLOAD_BYTES))) for name in chain(2)]
        assert tier.get(reads, started_s + 0.1) == [TIMEOUT] * 2
        assert time.monotonic() - started_s < 1.0
        tier.close()


def test_a_server_that_reads_nothing_ends_a_put_at_the_deadline() -> None:
    unread = threading.Event()

    def answer(command: Command) -> bytes:
        if command[0] == b"SET":
            unread.wait(5.0)
        return b":0\r\n" if command[0] != b"SET" else b"+OK\r\n"

    with RespServer(answer) as server:
        tier = tier_of(server)
        name, payload = chain(1)[0], bytes(4 << 20)
        started_s = time.monotonic()
        writes = [BlockWrite(name, PART, memoryview(payload))] * 3
        assert tier.put(writes, started_s + 0.1) == [TIMEOUT] * 3
        assert time.monotonic() - started_s < 2.0
        unread.set()
        tier.close()


def test_replies_in_small_pieces_are_put_together() -> None:
    healthy = stored()
    with RespServer(healthy) as server:
        server.piece_bytes = 1000
        tier = tier_of(server)
        statuses, buffers = get(tier, chain(8))
        assert statuses == [OK] * 8
        assert [bytes(buffer) for buffer in buffers] == [payload_of(name) for name in chain(8)]
        server.piece_bytes = 1
        assert tier.lookup(addresses([*chain(8), *chain(2, seed=1)]), soon()) == 8
        tier.close()


def test_bytes_nobody_asked_for_end_the_connection() -> None:
    healthy = stored()
    with RespServer(lambda command: healthy(command) + b"+late\r\n") as server:
        tier = tier_of(server)
        assert get(tier, chain(1))[0] == [OK]  # one sendall through a Unix socket: the rest came with it
        server.answer = healthy
        assert get(tier, chain(3))[0] == [OK] * 3
        assert server.num_connections == 2
        tier.close()


def test_one_log_line_per_change(caplog: pytest.LogCaptureFixture) -> None:
    healthy = stored()
    with RespServer(lambda command: ERRORS["LOADING"]) as server:
        tier = tier_of(server)
        for _ in range(3):
            get(tier, chain(3))
        server.answer = healthy
        for _ in range(3):
            get(tier, chain(3))
        tier.close()
    assert [("LOADING" in line, "again" in line) for line in caplog.messages] == [(True, False), (False, True)]
