"""Reading every record that lies in a Redis, for its own sake.

Values are asked for a few at a time, and every question has a deadline of its own: a silent server is told soon, and a
large one takes as long as it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pagetier.kvstore.block import Address
from pagetier.kvstore.checked import Checked, Verdict, judge
from pagetier.kvstore.errors import TierUnavailable
from pagetier.kvstore.record import (
    RecordStatus,
    header_bytes,
    parse_header,
    redis_name,
    verify,
)
from pagetier.kvstore.redis.namespaces import parse_name
from pagetier.kvstore.redis.node import FAULTS, Node
from pagetier.kvstore.redis.resp import ErrorReply, encode_command
from pagetier.kvstore.redis.topology import Topology

ANSWER_S = 10.0  # for one question
SCAN_COUNT = 1000
WINDOW_BYTES = 16 << 20  # of values that are asked for at once


class RedisAudit:
    """Over the servers of one tier. Raises TierUnavailable when one of them does not answer."""

    def __init__(self, topology: Topology, clock: Callable[[], float]) -> None:
        self._topology, self._clock = topology, clock
        self.num_removed = 0

    def check(self, mac_key: bytes | None = None, *, repair: bool = False) -> Iterator[Checked]:
        """Every value under a name like a record's. repair: damaged ones are removed, since Redis has no other place
        for them."""
        for node, names in self._pages():
            for window, values in self._values(node, names):
                damaged = []
                for name, value in zip(window, values, strict=True):
                    if value is None:
                        continue  # it went meanwhile
                    checked = _checked(name, value, mac_key)
                    if checked.verdict is Verdict.DAMAGED:
                        damaged.append(name)
                    yield checked
                if repair and damaged:
                    replies = self._ask(node, [encode_command(b"UNLINK", name) for name in damaged])
                    self.num_removed += sum(reply for reply in replies if isinstance(reply, int))

    def num_names(self) -> int:
        """How many names like records' there are now."""
        return sum(len(names) for _, names in self._pages())

    def _pages(self) -> Iterator[tuple[Node, list[bytes]]]:
        try:
            masters = list(self._topology.masters(self._clock() + ANSWER_S))
        except FAULTS as fault:
            raise TierUnavailable("redis", "verify", str(fault)) from fault
        count = b"%d" % SCAN_COUNT
        for node in masters:
            cursor = b"0"
            while True:
                (reply,) = self._ask(node, [encode_command(b"SCAN", cursor, b"MATCH", b"pgt1:*:{*", b"COUNT", count)])
                if not isinstance(reply, list) or len(reply) != 2 or not isinstance(reply[0], bytes):
                    raise TierUnavailable("redis", "verify", f"{node.server} answered {str(reply)[:64]}")
                cursor, names = reply
                yield node, [name for name in names if isinstance(name, bytes) and parse_name(name) is not None]
                if cursor == b"0":
                    break

    def _values(self, node: Node, names: Sequence[bytes]) -> Iterator[tuple[Sequence[bytes], list[bytes | None]]]:
        """Names and their values, some WINDOW_BYTES at a time; None for what is no plain value (any more)."""
        lengths = self._ask(node, [encode_command(b"STRLEN", name) for name in names])
        first, nbytes = 0, 0
        for i, length in enumerate([*lengths, WINDOW_BYTES]):
            nbytes += length if isinstance(length, int) else 0
            if i > first and (i == len(names) or nbytes > WINDOW_BYTES):
                window = names[first:i]
                replies = self._ask(node, [encode_command(b"GET", name) for name in window])
                yield window, [reply if isinstance(reply, bytes) else None for reply in replies]
                first, nbytes = i, length if isinstance(length, int) else 0

    def _ask(self, node: Node, commands: Sequence[bytes]) -> list[object]:
        """Replies; an error reply to one value is one, silence is a failure."""
        try:
            replies = list[object](node.ask_all(commands, self._clock() + ANSWER_S)) if commands else []
        except FAULTS as fault:
            raise TierUnavailable("redis", "verify", f"{node.server}: {fault}") from fault
        for reply in replies:
            if isinstance(reply, ErrorReply) and reply.code != "WRONGTYPE":
                raise TierUnavailable("redis", "verify", f"{node.server}: {reply}")
        return replies


def _checked(name: bytes, value: bytes, mac_key: bytes | None) -> Checked:
    """A value against itself and against its name."""
    header, status = parse_header(value), RecordStatus.GARBAGE
    if header is not None:
        cut = header_bytes(header.name.num_tokens)
        payload = memoryview(value)[cut:]
        expected = redis_name(header.domain, Address(header.name.key, header.part)).encode()
        status = RecordStatus.MISMATCH
        if expected == name and header.payload_bytes == payload.nbytes:
            status = verify(
                value[:cut], payload, header.domain, header.name, header.part, header.coding, mac_key=mac_key
            )
    verdict, reason = judge(status, header, mac_key is not None)
    where = name.decode(errors="replace")
    if header is None:
        return Checked(verdict, where, len(value), reason=reason)
    return Checked(verdict, where, len(value), header.name.key, header.domain, reason)
