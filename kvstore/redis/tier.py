"""The Redis tier: one value per record under a name of its own, with a TTL (proto/FORMAT.md, "Record", "Redis").

Owns the commands and what their replies mean for each block. Speaks to one server through one pool; it holds nothing
that a tier over several (Cluster) could not hold per node: all names of a block share a slot, no command names two.

A `put` that ran out of time may still be carried out by the server later: the record then appears whole or not at all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TypeVar

from pagetier.kvstore.block import Address, BlockStatus
from pagetier.kvstore.errors import ConfigError, ProtocolError, TierUnavailable
from pagetier.kvstore.record import (
    REDIS_IDENTITIES,
    RecordStatus,
    header_bytes,
    pack_header,
    verify,
)
from pagetier.kvstore.redis.account import Account, parse_info
from pagetier.kvstore.redis.names import RecordNames
from pagetier.kvstore.redis.pool import ConnectionPool, Dialer, RefusedError
from pagetier.kvstore.redis.resp import ErrorReply, Reply, RespConnection, encode_command
from pagetier.kvstore.redis.sockets import Sockets
from pagetier.kvstore.redis.url import parse_redis_url
from pagetier.kvstore.tier import BlockRead, BlockWrite, TierCounters

TTL_S = 86_400.0
CONNECT_TIMEOUT_S = 1.0
MAX_CONNECTIONS = 8  # more than the store has byte threads
MAX_PIPELINE_BYTES = 16 << 20  # what the server may have to queue for us at once
MAX_PIPELINE_COMMANDS = 512  # 60 kB of requests fit a socket's buffer, so sending never waits on a server that writes
COMMAND_BYTES = 32  # of RESP around a name, about
HOUSEKEEPING_S = 0.25  # touch, delete and the like have no deadline of their own; none of them is worth more
REFRESH_INTERVAL_S = 5.0
READING, WRITING = "reading", "writing"

_Sized = TypeVar("_Sized", BlockRead, BlockWrite)
_FAULTS = (OSError, ProtocolError, RefusedError)


class RedisTier:
    """Implements `tier.Tier` over one Redis or Valkey.

    Invariant: a connection on which anything went wrong is closed, never lent again (`check`).
    """

    def __init__(
        self,
        url: str,
        domain: bytes,
        *,
        ttl_s: float = TTL_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        max_connections: int = MAX_CONNECTIONS,
        max_pipeline_bytes: int = MAX_PIPELINE_BYTES,
        refresh_interval_s: float = REFRESH_INTERVAL_S,
        mac_key: bytes | None = None,
        sockets: Sockets | None = None,
    ) -> None:
        """Connects to nothing: a server that is down at start is used as soon as it is up.

        `refresh_interval_s`: seconds between two INFO, which feed `counters`. `sockets`: the real ones by default;
        their clock is that of the caller's deadlines. Raises ConfigError for a URL or TTL that
        can never work.
        """
        if ttl_s < 0.001:
            raise ConfigError.bad_value("--kv-redis-ttl", ttl_s, "seconds, above zero")
        self._mac_key = mac_key
        self._url = parse_redis_url(url)
        (endpoint,) = self._url.endpoints
        sockets = sockets or Sockets()
        self._clock = sockets.now_s
        dialer = Dialer(self._url.login, connect_timeout_s, sockets)
        self._pool = ConnectionPool(functools.partial(dialer.dial, endpoint), max_connections, self._clock)
        self._account = Account(str(endpoint), refresh_interval_s, self._clock)
        self._max_window_bytes = max_pipeline_bytes // 2  # while one window arrives the next is asked for
        self._ttl_ms = b"%d" % int(ttl_s * 1000)
        self._after_value = b"\r\n" + encode_command(b"PX", self._ttl_ms).split(b"\r\n", 1)[1]
        self._own_names = RecordNames(domain)  # replaced as a whole by `set_domain`

    @property
    def name(self) -> str:
        return "redis"

    @property
    def answers_at_once(self) -> bool:
        return False

    def set_domain(self, domain: bytes) -> None:
        """As in `Tier`: names of the former domain are asked for by reads and writes that say so, and expire."""
        self._own_names = RecordNames(domain)

    def lookup(self, addresses: Sequence[Address], deadline_s: float) -> int:
        """One round trip. EXISTS, because unlike STRLEN it does not renew what it finds (TRAPS 28)."""
        if not addresses:
            return 0
        num_leading, error, names = 0, None, self._own_names
        try:
            self._check_deadline(deadline_s)
            with self._pool.lease(deadline_s) as connection:
                for window in self._windows_of_addresses(names, addresses):
                    connection.send([names.commands("EXISTS", window)], len(window), deadline_s)
                    flags = connection.read_flags(len(window), deadline_s)
                    num_leading, error = num_leading + flags.num_leading, error or flags.error
                    if flags.num_leading < len(window):
                        break
        except _FAULTS as fault:
            self._status_of(READING, fault, 1)
            raise TierUnavailable(self.name, "lookup", str(fault)) from fault
        if error is not None:
            self._account.error_reply(error.code)
            self._account.failed(READING, 1, error.code, str(error))
            if not num_leading:
                raise TierUnavailable(self.name, "lookup", str(error))
        else:
            self._account.went_well(READING)
        return num_leading

    def get(self, reads: Sequence[BlockRead], deadline_s: float) -> list[BlockStatus]:
        statuses: list[BlockStatus | None] = [None] * len(reads)
        failed, names = BlockStatus.ERROR, self._names(reads)
        try:
            self._check_deadline(deadline_s)
            with self._pool.lease(deadline_s) as connection:
                self._read(connection, reads, names, statuses, deadline_s)
        except _FAULTS as fault:
            failed = self._status_of(READING, fault, statuses.count(None))
        else:
            if BlockStatus.ERROR not in statuses:
                self._account.went_well(READING)
        corrupt = [i for i, status in enumerate(statuses) if status is BlockStatus.CORRUPT]
        if corrupt:
            self._account.found_corrupt(len(corrupt))
            if self._clock() < deadline_s:  # else the next read does it
                self._unlink([names[i].name(reads[i].address) for i in corrupt], deadline_s)
        return [failed if status is None else status for status in statuses]

    def put(self, writes: Sequence[BlockWrite], deadline_s: float) -> list[BlockStatus]:
        statuses: list[BlockStatus | None] = [None] * len(writes)
        try:
            self._check_deadline(deadline_s)
            with self._pool.lease(deadline_s) as connection:
                self._refresh(connection, deadline_s)
                self._probe(connection, writes, statuses, deadline_s)
                self._write(connection, writes, statuses, deadline_s)
        except _FAULTS as fault:
            failed = self._status_of(WRITING, fault, statuses.count(None))
            return [failed if status is None else status for status in statuses]
        done = [BlockStatus.DROPPED if status is None else status for status in statuses]
        if not {BlockStatus.ERROR, BlockStatus.DROPPED} & set(done):
            self._account.went_well(WRITING)
        return done

    def touch(self, addresses: Sequence[Address]) -> None:
        """Renews TTL and the server's idea of recency, tail first; given up after HOUSEKEEPING_S."""
        deadline_s, names = self._clock() + HOUSEKEEPING_S, self._own_names
        self._integers([names.command(b"PEXPIRE", a, self._ttl_ms) for a in reversed(addresses)], deadline_s)

    def delete(self, addresses: Sequence[Address]) -> int:
        names = self._own_names
        return self._unlink([names.name(address) for address in addresses], self._clock() + HOUSEKEEPING_S)

    def _unlink(self, names: Sequence[bytes], deadline_s: float) -> int:
        num_removed = self._integers([encode_command(b"UNLINK", name) for name in names], deadline_s)
        self._account.removed(num_removed)
        return num_removed

    def put_identity(self, domain: bytes, encoded: bytes) -> None:
        command = encode_command(b"HSET", REDIS_IDENTITIES.encode(), domain.hex().encode(), encoded)
        self._integers([command], self._clock() + HOUSEKEEPING_S)

    def identities(self) -> dict[bytes, bytes]:
        """Empty when the server does not answer."""
        reply = self._ask(encode_command(b"HGETALL", REDIS_IDENTITIES.encode()), self._clock() + HOUSEKEEPING_S)
        if not isinstance(reply, list):
            return {}
        found: dict[bytes, bytes] = {}
        for field, value in zip(reply[::2], reply[1::2], strict=False):
            if isinstance(field, bytes) and isinstance(value, bytes) and len(field) == 64:
                try:
                    found[bytes.fromhex(field.decode("ascii"))] = value
                except ValueError:
                    continue  # somebody else's field
        return found

    def counters(self) -> TierCounters:
        """`blocks`, `nbytes`, `capacity_bytes` and `evictions` are the server's, whoever caused them, as of its last
        INFO and our own work since."""
        return self._account.counters()

    def error_replies(self) -> dict[str, int]:
        """Error replies by code (OOM, LOADING, READONLY, ...) since start. No I/O."""
        return self._account.error_replies()

    def check(self) -> None:
        self._pool.check()

    def close(self) -> None:
        """Close all connections; calls under way end as failed. Idempotent."""
        self._account.mute()
        self._pool.close()

    # -- reading ------------------------------------------------------------------------------------------------------

    def _read(
        self,
        connection: RespConnection,
        reads: Sequence[BlockRead],
        names: Sequence[RecordNames],
        statuses: list[BlockStatus | None],
        deadline_s: float,
    ) -> None:
        """Set each status. Raises when the connection is lost or out of time; the rest then keeps None."""
        windows, asked_for, done = list(self._windows_of_blocks(reads)), 0, 0
        for i, window in enumerate(windows):
            for asked in windows[:2] if i == 0 else windows[i + 1 : i + 2]:
                connection.send([_get_commands(asked, names[asked_for:])], len(asked), deadline_s)
                asked_for += len(asked)
            for read in window:
                statuses[done] = self._read_one(connection, read, names[done].domain, deadline_s)
                done += 1

    def _read_one(self, connection: RespConnection, read: BlockRead, domain: bytes, deadline_s: float) -> BlockStatus:
        header = bytearray(header_bytes(read.name.num_tokens))
        payload = read.destination.cast("B")
        reply = connection.read_bulk_into((memoryview(header), payload), deadline_s)
        if reply is None:
            return BlockStatus.MISS
        if isinstance(reply, ErrorReply):
            if reply.code == "WRONGTYPE":
                self._account.error_reply(reply.code)
                return BlockStatus.CORRUPT
            return self._refused(READING, reply)
        if reply != len(header) + payload.nbytes:
            return BlockStatus.CORRUPT
        if verify(header, payload, domain, read.name, read.part, mac_key=self._mac_key) is not RecordStatus.OK:
            return BlockStatus.CORRUPT
        self._account.read(reply)
        return BlockStatus.OK

    # -- writing ------------------------------------------------------------------------------------------------------

    def _probe(
        self,
        connection: RespConnection,
        writes: Sequence[BlockWrite],
        statuses: list[BlockStatus | None],
        deadline_s: float,
    ) -> None:
        """Set the status of what is there already (and renew it) or cannot be stored, before any payload is sent.

        A value of another length or type is not there: it will be replaced.
        """
        commands = [
            names.command(b"PEXPIRE", write.address, self._ttl_ms) + names.command(b"STRLEN", write.address)
            for names, write in zip(self._names(writes), writes, strict=True)
        ]
        done = 0
        for window in self._windows_of_commands(commands):
            connection.send([b"".join(window)], 2 * len(window), deadline_s)
            for i in range(done, done + len(window)):
                renewed, length = connection.read_reply(deadline_s), connection.read_reply(deadline_s)
                if isinstance(renewed, ErrorReply):
                    statuses[i] = self._refused(WRITING, renewed)
                elif isinstance(length, ErrorReply) and length.code != "WRONGTYPE":
                    statuses[i] = self._refused(WRITING, length)
                elif renewed == 1 and length == _record_bytes(writes[i]):
                    statuses[i] = BlockStatus.EXISTS
            done += len(window)

    def _write(
        self,
        connection: RespConnection,
        writes: Sequence[BlockWrite],
        statuses: list[BlockStatus | None],
        deadline_s: float,
    ) -> None:
        """SET what has no status yet. After an error reply nothing more is sent; the rest keeps None."""
        left = [i for i, status in enumerate(statuses) if status is None]
        for window in self._windows_of_blocks([writes[i] for i in left]):
            self._check_deadline(deadline_s)
            now, left = left[: len(window)], left[len(window) :]
            buffers: list[bytes | memoryview] = []
            for write in window:
                buffers += self._set_command(write)
            connection.send(buffers, len(window), deadline_s)
            for i, write in zip(now, window, strict=True):
                reply = connection.read_reply(deadline_s)
                if reply == b"OK":
                    statuses[i] = BlockStatus.OK
                    self._account.wrote(_record_bytes(write))
                elif isinstance(reply, ErrorReply):
                    statuses[i] = self._refused(WRITING, reply)
                else:
                    connection.close()
                    raise ProtocolError(f"RESP: expected OK, got {str(reply)[:64]}")
            if any(statuses[i] is not BlockStatus.OK for i in now):
                return

    def _set_command(self, write: BlockWrite) -> tuple[bytes, memoryview, bytes]:
        """`SET name record PX ttl` around the payload, which is not copied."""
        payload = write.source.cast("B")
        (names,) = self._names([write])
        header = pack_header(names.domain, write.name, write.part, payload, mac_key=self._mac_key)
        name = names.name(write.address)
        start = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (len(name), name, len(header) + payload.nbytes, header)
        return start, payload, self._after_value

    # -- what both need -----------------------------------------------------------------------------------------------

    def _windows_of_blocks(self, blocks: Sequence[_Sized]) -> Iterator[Sequence[_Sized]]:
        """Consecutive runs of at most a window's bytes and commands; at least one block each."""
        first, num_bytes = 0, 0
        for i, block in enumerate(blocks):
            block_bytes = _record_bytes(block)
            full = num_bytes + block_bytes > self._max_window_bytes or i - first == MAX_PIPELINE_COMMANDS // 2
            if i > first and full:
                yield blocks[first:i]
                first, num_bytes = i, 0
            num_bytes += block_bytes
        if first < len(blocks):
            yield blocks[first:]

    def _names(self, blocks: Sequence[BlockRead | BlockWrite]) -> list[RecordNames]:
        """The names of each block's domain."""
        own = self._own_names
        known = {own.domain: own}
        for domain in {block.domain or own.domain for block in blocks} - known.keys():
            known[domain] = RecordNames(domain)
        return [known[block.domain or own.domain] for block in blocks]

    def _windows_of_addresses(self, names: RecordNames, addresses: Sequence[Address]) -> Iterator[Sequence[Address]]:
        """Runs whose `verb name` commands fit a window. A lookup of 100,000 tokens is one run: 0.8 MB."""
        step = max(self._max_window_bytes // (len(names.name(addresses[0])) + COMMAND_BYTES), 1)
        for first in range(0, len(addresses), step):
            yield addresses[first : first + step]

    def _windows_of_commands(self, commands: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
        """Runs of small commands with small replies, of at most a window's bytes."""
        if not commands:
            return
        step = max(self._max_window_bytes // max(map(len, commands)), 1)
        for first in range(0, len(commands), step):
            yield commands[first : first + step]

    def _integers(self, commands: Sequence[bytes], deadline_s: float) -> int:
        """Sum of the integer replies; what failed counts as zero. For work that nobody waits for."""
        total = 0
        try:
            with self._pool.lease(deadline_s) as connection:
                self._refresh(connection, deadline_s)
                for window in self._windows_of_commands(commands):
                    connection.send([b"".join(window)], len(window), deadline_s)
                    for _ in window:
                        reply = connection.read_reply(deadline_s)
                        if isinstance(reply, ErrorReply):
                            self._refused(WRITING, reply)
                        total += reply if isinstance(reply, int) else 0
        except _FAULTS as fault:
            self._status_of(WRITING, fault, 1)
        return total

    def _ask(self, command: bytes, deadline_s: float) -> Reply:
        """One reply; None when there is none or it is an error."""
        try:
            with self._pool.lease(deadline_s) as connection:
                connection.send([command], 1, deadline_s)
                reply = connection.read_reply(deadline_s)
        except _FAULTS as fault:
            self._status_of(WRITING, fault, 1)
            return None
        if isinstance(reply, ErrorReply):
            self._refused(WRITING, reply)
            return None
        return reply

    def _refresh(self, connection: RespConnection, deadline_s: float) -> None:
        """Ask for the server's state when that is due. A server that does not tell is none the worse."""
        if self._account.claim_refresh():
            connection.send([encode_command(b"INFO")], 1, deadline_s)
            reply = connection.read_reply(deadline_s)
            if isinstance(reply, bytes):
                self._account.refresh(parse_info(reply, self._url.login.db))

    def _check_deadline(self, deadline_s: float) -> None:
        if self._clock() >= deadline_s:
            raise TimeoutError("the deadline has passed")

    def _refused(self, direction: str, reply: ErrorReply) -> BlockStatus:
        """The status of a block that the server answered with an error. Full is a drop: nothing is wrong with it."""
        self._account.error_reply(reply.code)
        self._account.failed(direction, 1, reply.code, str(reply))
        return BlockStatus.DROPPED if reply.code == "OOM" else BlockStatus.ERROR

    def _status_of(self, direction: str, fault: Exception, num_blocks: int) -> BlockStatus:
        """The status of `num_blocks` that were to be answered when `fault` ended the connection."""
        if isinstance(fault, RefusedError):
            self._account.error_reply(fault.reply.code)
        self._account.failed(direction, num_blocks, type(fault).__name__, str(fault))
        return BlockStatus.TIMEOUT if isinstance(fault, TimeoutError) else BlockStatus.ERROR


def _get_commands(reads: Sequence[BlockRead], names: Sequence[RecordNames]) -> bytes:
    """GET for each read. One join when all are of one domain, as they are in a load."""
    if all(one is names[0] for one in names[: len(reads)]):
        return names[0].commands("GET", [read.address for read in reads])
    return b"".join(one.command(b"GET", read.address) for read, one in zip(reads, names, strict=False))


def _record_bytes(block: BlockRead | BlockWrite) -> int:
    payload = block.destination if isinstance(block, BlockRead) else block.source
    return header_bytes(block.name.num_tokens) + payload.nbytes
