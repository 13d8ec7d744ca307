"""One Redis server: the commands a tier sends it, and what its replies mean for each block.

Owns a pool of connections to it. Knows neither the other servers nor who answers when this one sends a block elsewhere.
Nothing here raises for what the server or the network does, except where it says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pagetier.kvstore.block import Address, BlockStatus
from pagetier.kvstore.codec import NONE, stored_as
from pagetier.kvstore.errors import ProtocolError
from pagetier.kvstore.record import RecordStatus, header_bytes, pack_header, unpack
from pagetier.kvstore.redis.account import Account, parse_info
from pagetier.kvstore.redis.names import RecordNames
from pagetier.kvstore.redis.pool import ConnectionPool, RefusedError
from pagetier.kvstore.redis.resp import ErrorReply, Reply, RespConnection, encode_command
from pagetier.kvstore.tier import BlockRead, BlockWrite

MAX_PIPELINE_COMMANDS = 512  # 60 kB of requests fit a socket's buffer, so sending never waits on a server that writes
SEND_BYTES = 256 << 10  # of values that go out at once: a call costs some percent of what the checksums save
COMMAND_BYTES = 32  # of RESP around a name, about
READING, WRITING = "reading", "writing"
FAULTS = (OSError, ProtocolError, RefusedError)

_INFO, _ASKING = encode_command(b"INFO"), encode_command(b"ASKING")
_Sized = TypeVar("_Sized", BlockRead, BlockWrite)


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What all nodes of a tier have in common. window_bytes: of one pipeline; while one window arrives the next is
    asked for. db: for the keyspace in INFO. codec: of what is written; what is read may have any.
    """

    ttl_ms: int
    window_bytes: int
    max_connections: int
    db: int
    mac_key: bytes | None
    codec: int = NONE


@dataclass(frozen=True, slots=True)
class Redirect:
    """MOVED: the slot is another node's from now on. ASK: this block may be there already, said after ASKING."""

    slot: int
    host: str
    port: int
    is_asking: bool


Answer = BlockStatus | Redirect


class Node:
    """One server. Thread-safe.

    Invariant: a connection on which anything went wrong is closed, never lent again (`check`).
    """

    def __init__(
        self,
        server: str,
        dial: Callable[[float], RespConnection],
        settings: NodeSettings,
        account: Account,
        clock: Callable[[], float],
        on_redirect: Callable[[Redirect], Redirect] | None = None,
    ) -> None:
        """Connects to nothing. `server`: for people. `on_redirect`: is told of every MOVED and ASK and completes them;
        without it they are errors like others."""
        self.server = server
        self._settings, self._account, self._clock, self._on_redirect = settings, account, clock, on_redirect
        self._pool = ConnectionPool(dial, settings.max_connections, clock)
        ttl = encode_command(b"PX", b"%d" % settings.ttl_ms)
        self._after_value = b"\r\n" + ttl.split(b"\r\n", 1)[1]

    def check(self) -> None:
        self._pool.check()

    def close(self) -> None:
        """Close all connections; calls under way end as failed. Idempotent."""
        self._pool.close()

    # -- lookups ------------------------------------------------------------------------------------------------------

    def count_leading(
        self, names: RecordNames, addresses: Sequence[Address], deadline_s: float
    ) -> tuple[int, ErrorReply | None]:
        """Leading addresses that are there, and an error reply among the answers. One round trip.

        EXISTS, because unlike STRLEN it does not renew what it finds. Raises one of FAULTS.
        """
        num_leading, error = 0, None
        try:
            with self._lease(deadline_s) as connection:
                for window in self._windows_of_addresses(names, addresses):
                    asks = self._account.claim_refresh(self.server)
                    commands = [names.commands("EXISTS", window), *((_INFO,) if asks else ())]
                    connection.send(commands, len(window) + asks, deadline_s)
                    flags = connection.read_flags(len(window), deadline_s)
                    if asks:
                        self._refreshed(connection.read_reply(deadline_s))
                    num_leading, error = num_leading + flags.num_leading, error or flags.error
                    if flags.num_leading < len(window):
                        break
        except FAULTS as fault:
            self._failed(READING, fault, 1)
            raise
        if error is None:
            self._account.went_well(self.server, READING)
        elif self._redirect(error) is None:
            self._refused(READING, error)
        return num_leading, error

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(
        self, reads: Sequence[BlockRead], names: Sequence[RecordNames], deadline_s: float, is_asking: bool
    ) -> list[Answer]:
        """As `Tier.get`, without quarantine. `is_asking`: each command comes after ASKING."""
        answers: list[Answer | None] = [None] * len(reads)
        failed = BlockStatus.ERROR
        try:
            with self._lease(deadline_s) as connection:
                self._read(connection, reads, names, answers, deadline_s, is_asking=is_asking)
        except FAULTS as fault:
            failed = self._failed(READING, fault, answers.count(None))
        else:
            if BlockStatus.ERROR not in answers:
                self._account.went_well(self.server, READING)
        return [failed if answer is None else answer for answer in answers]

    def _read(
        self,
        connection: RespConnection,
        reads: Sequence[BlockRead],
        names: Sequence[RecordNames],
        answers: list[Answer | None],
        deadline_s: float,
        *,
        is_asking: bool,
    ) -> None:
        """Set each answer. Raises when the connection is lost or out of time; the rest then keeps None."""
        windows, asked_for, done = list(self._windows_of_blocks(reads)), 0, 0
        for i, window in enumerate(windows):
            for asked in windows[:2] if i == 0 else windows[i + 1 : i + 2]:
                commands = _get_commands(asked, names[asked_for:], is_asking=is_asking)
                connection.send([commands], len(asked) * (1 + is_asking), deadline_s)
                asked_for += len(asked)
            for read in window:
                if is_asking:
                    connection.read_reply(deadline_s)
                answers[done] = self._read_one(connection, read, names[done].domain, deadline_s)
                done += 1

    def _read_one(self, connection: RespConnection, read: BlockRead, domain: bytes, deadline_s: float) -> Answer:
        header = bytearray(header_bytes(read.name.num_tokens))
        payload = read.destination.cast("B")
        reply = connection.read_bulk_into((memoryview(header), payload), deadline_s)
        if reply is None:
            return BlockStatus.MISS
        if isinstance(reply, ErrorReply):
            if reply.code == "WRONGTYPE":
                self._account.error_reply(reply.code)
                return BlockStatus.CORRUPT
            return self._redirect(reply) or self._refused(READING, reply)
        if not len(header) < reply <= len(header) + payload.nbytes:
            return BlockStatus.CORRUPT
        stored, mac_key = payload[: reply - len(header)], self._settings.mac_key
        if unpack(header, stored, payload, domain, read.name, read.part, mac_key=mac_key) is not RecordStatus.OK:
            return BlockStatus.CORRUPT
        self._account.read(reply)
        return BlockStatus.OK

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(
        self, writes: Sequence[BlockWrite], names: Sequence[RecordNames], deadline_s: float, is_asking: bool
    ) -> list[Answer]:
        """As `Tier.put`. `is_asking`: each command comes after ASKING."""
        answers: list[Answer | None] = [None] * len(writes)
        try:
            with self._lease(deadline_s) as connection:
                self._refresh(connection, deadline_s)
                self._probe(connection, writes, names, answers, deadline_s, is_asking=is_asking)
                self._write(connection, writes, names, answers, deadline_s, is_asking=is_asking)
        except FAULTS as fault:
            failed = self._failed(WRITING, fault, answers.count(None))
            return [failed if answer is None else answer for answer in answers]
        done = [BlockStatus.DROPPED if answer is None else answer for answer in answers]
        if BlockStatus.ERROR not in done and BlockStatus.DROPPED not in done:
            self._account.went_well(self.server, WRITING)
        return done

    def _probe(
        self,
        connection: RespConnection,
        writes: Sequence[BlockWrite],
        names: Sequence[RecordNames],
        answers: list[Answer | None],
        deadline_s: float,
        *,
        is_asking: bool,
    ) -> None:
        """Answer for what is there already (and renew it) or cannot be stored, before any payload is sent.

        A value of another length or type is not there: it will be replaced. With a codec, shorter ones are.
        """
        ttl, first = b"%d" % self._settings.ttl_ms, _ASKING if is_asking else b""
        commands = [
            first + one.command(b"PEXPIRE", write.address, ttl) + first + one.command(b"STRLEN", write.address)
            for one, write in zip(names, writes, strict=True)
        ]
        done = 0
        for window in self._windows_of_commands(commands):
            connection.send([b"".join(window)], (2 + 2 * is_asking) * len(window), deadline_s)
            for i in range(done, done + len(window)):
                replies = [connection.read_reply(deadline_s) for _ in range(2 + 2 * is_asking)]
                renewed, length = replies[-3 if is_asking else -2], replies[-1]
                if isinstance(renewed, ErrorReply):
                    answers[i] = self._redirect(renewed) or self._refused(WRITING, renewed)
                elif isinstance(length, ErrorReply) and length.code != "WRONGTYPE":
                    answers[i] = self._redirect(length) or self._refused(WRITING, length)
                elif renewed == 1 and self._is_length_of(writes[i], length):
                    answers[i] = BlockStatus.EXISTS
            done += len(window)

    def _is_length_of(self, write: BlockWrite, length: object) -> bool:
        whole = _record_bytes(write)
        if self._settings.codec == NONE:
            return length == whole
        return isinstance(length, int) and header_bytes(write.name.num_tokens) < length <= whole

    def _write(
        self,
        connection: RespConnection,
        writes: Sequence[BlockWrite],
        names: Sequence[RecordNames],
        answers: list[Answer | None],
        deadline_s: float,
        *,
        is_asking: bool,
    ) -> None:
        """SET what has no answer yet. After an error reply nothing more is sent; the rest keeps None."""
        left, sizes = [i for i, answer in enumerate(answers) if answer is None], dict[int, int]()
        for window in self._windows_of_blocks([writes[i] for i in left]):
            self._check_deadline(deadline_s)
            now, left = left[: len(window)], left[len(window) :]
            for few in _in_sends(now, window):
                buffers: list[bytes | memoryview] = []
                for i, write in few:
                    start, payload = self._set_command(write, names[i])
                    buffers += [*((_ASKING,) if is_asking else ()), start, payload, self._after_value]
                    sizes[i] = header_bytes(write.name.num_tokens) + payload.nbytes
                connection.send(buffers, len(few) * (1 + is_asking), deadline_s)
            for i in now:
                if is_asking:
                    connection.read_reply(deadline_s)
                answers[i] = self._stored(connection, sizes[i], deadline_s)
            if any(answers[i] is not BlockStatus.OK for i in now):
                return

    def _stored(self, connection: RespConnection, nbytes: int, deadline_s: float) -> Answer:
        """What the reply to a SET of so many bytes says."""
        reply = connection.read_reply(deadline_s)
        if reply == b"OK":
            self._account.wrote(self.server, nbytes)
            return BlockStatus.OK
        if isinstance(reply, ErrorReply):
            return self._redirect(reply) or self._refused(WRITING, reply)
        connection.close()
        raise ProtocolError(f"RESP: expected OK, got {str(reply)[:64]}")

    def _set_command(self, write: BlockWrite, names: RecordNames) -> tuple[bytes, memoryview]:
        """`SET name record` up to the payload, and that, which is not copied unless it is encoded."""
        settings, name = self._settings, names.name(write.address)
        payload, coding = stored_as(write.source.cast("B"), settings.codec)
        header = pack_header(names.domain, write.name, write.part, payload, coding, mac_key=settings.mac_key)
        start = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (len(name), name, len(header) + payload.nbytes, header)
        return start, payload

    # -- small commands -----------------------------------------------------------------------------------------------

    def integers(self, commands: Sequence[bytes], deadline_s: float) -> int:
        """Sum of the integer replies; what failed counts as zero. For work that nobody waits for."""
        total = 0
        try:
            with self._lease(deadline_s) as connection:
                self._refresh(connection, deadline_s)
                for window in self._windows_of_commands(commands):
                    connection.send([b"".join(window)], len(window), deadline_s)
                    for _ in window:
                        reply = connection.read_reply(deadline_s)
                        if isinstance(reply, ErrorReply) and self._redirect(reply) is None:
                            self._refused(WRITING, reply)
                        total += reply if isinstance(reply, int) else 0
        except FAULTS as fault:
            self._failed(WRITING, fault, 1)
        return total

    def remove(self, names: Sequence[bytes], deadline_s: float) -> int:
        """UNLINK records; how many were there."""
        num_removed = self.integers([encode_command(b"UNLINK", name) for name in names], deadline_s)
        self._account.removed(self.server, num_removed)
        return num_removed

    def ask_all(self, commands: Sequence[bytes], deadline_s: float) -> list[Reply]:
        """All replies. Raises one of FAULTS."""
        replies: list[Reply] = []
        with self._lease(deadline_s) as connection:
            for window in self._windows_of_commands(commands):
                connection.send([b"".join(window)], len(window), deadline_s)
                replies += [connection.read_reply(deadline_s) for _ in window]
        return replies

    def ask(self, command: bytes, deadline_s: float) -> Reply:
        """One reply. Raises one of FAULTS."""
        return self.ask_all([command], deadline_s)[0]

    # -- what all need ------------------------------------------------------------------------------------------------

    def _lease(self, deadline_s: float) -> contextlib.AbstractContextManager[RespConnection]:
        self._check_deadline(deadline_s)
        return self._pool.lease(deadline_s)

    def _windows_of_blocks(self, blocks: Sequence[_Sized]) -> Iterator[Sequence[_Sized]]:
        """Consecutive runs of at most a window's bytes and commands; at least one block each."""
        first, num_bytes = 0, 0
        for i, block in enumerate(blocks):
            block_bytes = _record_bytes(block)
            full = num_bytes + block_bytes > self._settings.window_bytes or i - first == MAX_PIPELINE_COMMANDS // 2
            if i > first and full:
                yield blocks[first:i]
                first, num_bytes = i, 0
            num_bytes += block_bytes
        if first < len(blocks):
            yield blocks[first:]

    def _windows_of_addresses(self, names: RecordNames, addresses: Sequence[Address]) -> Iterator[Sequence[Address]]:
        """Runs whose `verb name` commands fit a window. A lookup of 100,000 tokens is one run: 0.8 MB."""
        step = max(self._settings.window_bytes // (len(names.name(addresses[0])) + COMMAND_BYTES), 1)
        for first in range(0, len(addresses), step):
            yield addresses[first : first + step]

    def _windows_of_commands(self, commands: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
        """Runs of small commands with small replies, of at most a window's bytes."""
        if not commands:
            return
        step = max(self._settings.window_bytes // max(map(len, commands)), 1)
        for first in range(0, len(commands), step):
            yield commands[first : first + step]

    def _refresh(self, connection: RespConnection, deadline_s: float) -> None:
        """Ask for the server's state when that is due."""
        if self._account.claim_refresh(self.server):
            connection.send([_INFO], 1, deadline_s)
            self._refreshed(connection.read_reply(deadline_s))

    def _refreshed(self, reply: Reply) -> None:
        """A server that does not tell is none the worse."""
        if isinstance(reply, bytes):
            self._account.refresh(self.server, parse_info(reply, self._settings.db))

    def _check_deadline(self, deadline_s: float) -> None:
        if self._clock() >= deadline_s:
            raise TimeoutError("the deadline has passed")

    def _redirect(self, reply: ErrorReply) -> Redirect | None:
        """Where the reply sends the command, if it does and somebody follows."""
        redirect = parse_redirect(reply)
        if redirect is None or self._on_redirect is None:
            return None
        self._account.error_reply(reply.code)
        return self._on_redirect(redirect)

    def _refused(self, direction: str, reply: ErrorReply) -> BlockStatus:
        """The status of a block that the server answered with an error. Full is a drop: nothing is wrong with it."""
        if reply.code == "READONLY":
            self._pool.renew()  # it became a replica: who dials anew may find the master
        hint = "; a node of a Cluster is reached by redis+cluster://" if reply.code in ("MOVED", "ASK") else ""
        self._account.error_reply(reply.code)
        self._account.failed(self.server, direction, 1, reply.code, f"{reply}{hint}")
        return BlockStatus.DROPPED if direction == WRITING and reply.code == "OOM" else BlockStatus.ERROR

    def _failed(self, direction: str, fault: Exception, num_blocks: int) -> BlockStatus:
        """The status of `num_blocks` that were to be answered when `fault` ended the connection."""
        if isinstance(fault, RefusedError):
            self._account.error_reply(fault.reply.code)
        self._account.failed(self.server, direction, num_blocks, type(fault).__name__, str(fault))
        return BlockStatus.TIMEOUT if isinstance(fault, TimeoutError) else BlockStatus.ERROR


def parse_redirect(reply: ErrorReply) -> Redirect | None:
    """`MOVED 3999 host:port` or `ASK 3999 host:port`; the host may be empty (the one that was asked) or IPv6."""
    slot, _, place = reply.text.partition(" ")
    host, _, port = place.rpartition(":")
    if reply.code not in ("MOVED", "ASK") or not (slot.isdigit() and port.isdigit()):
        return None
    return Redirect(int(slot), host.strip("[]"), int(port), reply.code == "ASK")


def _get_commands(reads: Sequence[BlockRead], names: Sequence[RecordNames], *, is_asking: bool) -> bytes:
    """GET for each read. One join when all are of one domain, as they are in a load."""
    if not is_asking and all(one is names[0] for one in names[: len(reads)]):
        return names[0].commands("GET", [read.address for read in reads])
    first = _ASKING if is_asking else b""
    return b"".join(first + one.command(b"GET", read.address) for read, one in zip(reads, names, strict=False))


def _in_sends(indices: Sequence[int], writes: Sequence[BlockWrite]) -> Iterator[list[tuple[int, BlockWrite]]]:
    """Writes, with their indices, that go out at once: while a server takes them, the next ones' sums are computed."""
    few: list[tuple[int, BlockWrite]] = []
    nbytes = 0
    for i, write in zip(indices, writes, strict=True):
        few.append((i, write))
        nbytes += write.source.nbytes
        if nbytes >= SEND_BYTES:
            yield few
            few, nbytes = [], 0
    if few:
        yield few


def _record_bytes(block: BlockRead | BlockWrite) -> int:
    payload = block.destination if isinstance(block, BlockRead) else block.source
    return header_bytes(block.name.num_tokens) + payload.nbytes
