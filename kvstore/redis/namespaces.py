"""What lies in a Redis beside the blocks at hand: which domains, which records, and how to be rid of some of them.

For commands that people give, not for the engine's way: SCAN on every server, never KEYS, so that nobody else waits.
Knows names and the heads of records. Whatever is not provably a record of the domain in question is left alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from pagetier.kvstore.block import Address, BlockName, Part
from pagetier.kvstore.errors import TierUnavailable
from pagetier.kvstore.record import MAGIC, REDIS_IDENTITIES, parse_header, redis_namespace
from pagetier.kvstore.redis.names import RecordNames, parse_identities
from pagetier.kvstore.redis.node import FAULTS, Node
from pagetier.kvstore.redis.resp import ErrorReply, encode_command
from pagetier.kvstore.redis.topology import Topology

DESCRIBE_BYTES = 1024  # of a record: a header of up to 202 tokens
SCAN_COUNT = 1000  # of names looked at by one SCAN: some 0.3 ms of the server's time
PAYLOAD_AT, DOMAIN_AT, ROOT_AT, HEAD_BYTES = 16, 64, 96, 128  # of a record (proto/FORMAT.md, "Record")

_NAME = re.compile(rb"pgt1:([0-9a-f]{16}):\{([0-9a-f]{64})\}:(\d+)\.(\d+)-(\d+)\.(\d+)-(\d+)")


@dataclass(frozen=True, slots=True)
class Namespace:
    """Records of one domain, or of several that start alike. `domain`: None when no identity is stored for it."""

    prefix: str  # 16 hex digits
    domain: bytes | None
    num_records: int


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """`ttl_s`: until it expires, None for never."""

    address: Address
    nbytes: int
    ttl_s: float | None


@dataclass(frozen=True, slots=True)
class Purge:
    """What a purge did. `num_foreign`: values under names like ours that are no records of the domain, left alone."""

    num_removed: int
    num_foreign: int


class Namespaces:
    """Over the servers of one tier. Every method raises TierUnavailable when one of them does not answer: half a list
    would be a lie, half a purge is said to be one."""

    def __init__(self, topology: Topology, clock: Callable[[], float]) -> None:
        self._topology, self._clock = topology, clock

    def list_all(self, deadline_s: float) -> list[Namespace]:
        """All that hold records, the largest first."""
        counts: Counter[str] = Counter()
        for _, names in self._pages(b"pgt1:*", deadline_s):
            counts.update(match[1].decode() for match in map(_NAME.fullmatch, names) if match)
        known = {redis_namespace(domain): domain for domain in self._domains(deadline_s)}
        return [
            Namespace(prefix, known.get(f"pgt1:{prefix}:"), count)
            for prefix, count in sorted(counts.items(), key=lambda found: (-found[1], found[0]))
        ]

    def records(self, domain: bytes, deadline_s: float) -> Iterator[StoredRecord]:
        """Every record of a domain, in no order; one that was there throughout is found, perhaps twice."""
        for node, names in self._pages(f"{redis_namespace(domain)}*".encode(), deadline_s):
            found = self._of_domain(node, names, domain, deadline_s)
            mine = [name for name, head in found if head is not None]
            lengths = self._ask(node, [encode_command(b"STRLEN", name) for name in mine], deadline_s)
            ttls = self._ask(node, [encode_command(b"PTTL", name) for name in mine], deadline_s)
            for name, length, ttl_ms in zip(mine, lengths, ttls, strict=True):
                address = parse_name(name)
                if address is not None and isinstance(length, int) and isinstance(ttl_ms, int) and ttl_ms != -2:
                    yield StoredRecord(address, length, ttl_ms / 1e3 if ttl_ms >= 0 else None)

    def purge(
        self,
        domain: bytes,
        deadline_s: float,
        *,
        keys: Collection[bytes] | None = None,
        root: bytes | None = None,
    ) -> Purge:
        """Remove a domain's records: all, those of `keys`, or those of one `root` (a tenant's salt). The identity
        stays: a server that runs may put records under it again."""
        num_removed = num_foreign = 0
        for node, names in self._pages(f"{redis_namespace(domain)}*".encode(), deadline_s):
            found = self._of_domain(node, names, domain, deadline_s)
            num_foreign += sum(head is None for _, head in found)
            doomed = [
                name
                for name, head in found
                if head is not None
                and (keys is None or _key_of(name) in keys)
                and (root is None or head[ROOT_AT:] == root)
            ]
            commands = [encode_command(b"UNLINK", name) for name in doomed]
            num_removed += sum(reply for reply in self._ask(node, commands, deadline_s) if isinstance(reply, int))
        return Purge(num_removed, num_foreign)

    def describe(
        self, domain: bytes, addresses: Sequence[Address], deadline_s: float
    ) -> list[tuple[int, BlockName | None] | None]:
        """Payload bytes and, where its tokens are few, the name of each record; None for one that is not there."""
        found: list[tuple[int, BlockName | None] | None] = [None] * len(addresses)
        names, last = RecordNames(domain), b"%d" % (DESCRIBE_BYTES - 1)
        try:
            shares = self._topology.shares(addresses, deadline_s) if addresses else []
        except FAULTS as fault:
            raise TierUnavailable("redis", "describe", str(fault)) from fault
        for node, indices in shares:
            if node is None:
                raise TierUnavailable("redis", "describe", "nobody owns the slots of some blocks")
            commands = [names.command(b"GETRANGE", addresses[i], b"0", last) for i in indices]
            for i, head in zip(indices, self._ask(node, commands, deadline_s), strict=True):
                if isinstance(head, bytes) and len(head) >= HEAD_BYTES and _is_of(head[:HEAD_BYTES], domain):
                    header = parse_header(head)
                    nbytes = int.from_bytes(head[PAYLOAD_AT : PAYLOAD_AT + 8], "little")
                    found[i] = (nbytes, None if header is None else header.name)
        return found

    # -- inside -------------------------------------------------------------------------------------------------------

    def _of_domain(
        self, node: Node, names: Sequence[bytes], domain: bytes, deadline_s: float
    ) -> list[tuple[bytes, bytes | None]]:
        """Names that look like records', each with the head of its value; None for what is no record of `domain`. The
        name alone proves little: it has a quarter of the domain."""
        likely = [name for name in names if _NAME.fullmatch(name)]
        last = b"%d" % (HEAD_BYTES - 1)
        heads = self._ask(node, [encode_command(b"GETRANGE", name, b"0", last) for name in likely], deadline_s)
        return [
            (name, head if isinstance(head, bytes) and _is_of(head, domain) else None)
            for name, head in zip(likely, heads, strict=True)
            if head != b""  # it went meanwhile
        ]

    def _pages(self, pattern: bytes, deadline_s: float) -> Iterator[tuple[Node, list[bytes]]]:
        """Names like `pattern`, page by page, on every server."""
        count = b"%d" % SCAN_COUNT
        try:
            masters = self._topology.masters(deadline_s)
        except FAULTS as fault:
            raise TierUnavailable("redis", "scan", str(fault)) from fault
        for node in masters:
            cursor = b"0"
            while True:
                command = encode_command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", count)
                (reply,) = self._ask(node, [command], deadline_s)
                match reply:
                    case [bytes() as cursor, [*names]]:
                        yield node, [name for name in names if isinstance(name, bytes)]
                    case _:
                        raise TierUnavailable("redis", "scan", f"{node.server} answered {str(reply)[:64]}")
                if cursor == b"0":
                    break

    def _domains(self, deadline_s: float) -> Collection[bytes]:
        name = REDIS_IDENTITIES.encode()
        try:
            node = self._topology.share_of(name, deadline_s)
            return parse_identities(node.ask(encode_command(b"HGETALL", name), deadline_s)) if node else ()
        except FAULTS as fault:
            raise TierUnavailable("redis", "identities", str(fault)) from fault

    def _ask(self, node: Node, commands: Sequence[bytes], deadline_s: float) -> list[object]:
        """Replies; WRONGTYPE is one, other errors and silence are failures."""
        try:
            replies = list[object](node.ask_all(commands, deadline_s)) if commands else []
        except FAULTS as fault:
            raise TierUnavailable("redis", "scan", f"{node.server}: {fault}") from fault
        for reply in replies:
            if isinstance(reply, ErrorReply) and reply.code != "WRONGTYPE":
                raise TierUnavailable("redis", "scan", f"{node.server}: {reply}")
        return replies


def parse_name(name: bytes) -> Address | None:
    """The address in a record's name; None for a name that no record has."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    group, first_layer, end_layer, first_head, end_head = (int(digits) for digits in match.groups()[2:])
    return Address(bytes.fromhex(match[2].decode()), Part(group, first_layer, end_layer, first_head, end_head))


def _key_of(name: bytes) -> bytes:
    address = parse_name(name)
    return b"" if address is None else address.key


def _is_of(head: bytes, domain: bytes) -> bool:
    return len(head) == HEAD_BYTES and head.startswith(MAGIC) and head[DOMAIN_AT:ROOT_AT] == domain
