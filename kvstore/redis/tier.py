"""The Redis tier: one value per record under a name of its own, with a TTL (proto/FORMAT.md, "Record", "Redis").

Owns how a call is split over servers and put together again; commands are node.py's, who owns what is topology.py's.
All names of a block share a slot and no command names two, so a server more or less changes nothing but where a block
lies. A server that fails takes its own blocks with it: hits end at the first of them.

A `put` that ran out of time may still be carried out by the server later: the record then appears whole or not at all.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pagetier.kvstore.block import Address, BlockStatus
from pagetier.kvstore.codec import NONE
from pagetier.kvstore.errors import ConfigError, TierUnavailable
from pagetier.kvstore.record import REDIS_IDENTITIES
from pagetier.kvstore.redis.account import Account
from pagetier.kvstore.redis.audit import RedisAudit
from pagetier.kvstore.redis.names import RecordNames, parse_identities
from pagetier.kvstore.redis.namespaces import Namespaces
from pagetier.kvstore.redis.node import FAULTS, READING, WRITING, Answer, Node, NodeSettings, Redirect, parse_redirect
from pagetier.kvstore.redis.resp import ErrorReply, encode_command
from pagetier.kvstore.redis.sockets import Sockets
from pagetier.kvstore.redis.topology import Means, make_topology
from pagetier.kvstore.redis.url import parse_redis_url
from pagetier.kvstore.tier import BlockRead, BlockWrite, Description, TierCounters

TTL_S = 86_400.0
CONNECT_TIMEOUT_S = 1.0
MAX_CONNECTIONS = 8  # to one server; more than the store has byte threads
MAX_PIPELINE_BYTES = 16 << 20  # what a server may have to queue for us at once
HOUSEKEEPING_S = 0.25  # touch, delete and the like have no deadline of their own; none of them is worth more
REFRESH_INTERVAL_S = 5.0
MAX_PASSES = 3  # a block that MOVED and is then ASKed for elsewhere takes three

_Sized = TypeVar("_Sized", BlockRead, BlockWrite)


@dataclass(frozen=True, slots=True)
class _Work(Generic[_Sized]):
    """A `get` or `put`: the blocks, and how a node is asked for some of them (blocks, names, deadline, with ASKING)."""

    direction: str
    blocks: Sequence[_Sized]
    names: Sequence[RecordNames]
    call: Callable[[Node, Sequence[_Sized], Sequence[RecordNames], float, bool], list[Answer]]


@dataclass(frozen=True, slots=True)
class _Share:
    """Blocks by index that one node is to be asked for, until when. Without a node `trouble` says why."""

    node: Node | None
    indices: Sequence[int]
    until_s: float
    is_asking: bool = False
    trouble: str = ""


class RedisTier:
    """Implements `tier.Tier` over Redis or Valkey: one server, behind Sentinels, or a Cluster."""

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
        codec: int = NONE,
        sockets: Sockets | None = None,
    ) -> None:
        """Connects to nothing: a server that is down at start is used as soon as it is up.

        `refresh_interval_s`: seconds between two INFO, which feed `counters`. `sockets`: the real ones by default;
        their clock is that of the caller's deadlines. Raises ConfigError for a URL or TTL that can never work.
        """
        if ttl_s < 0.001:
            raise ConfigError.bad_value("--kv-redis-ttl", ttl_s, "seconds, above zero")
        parsed, sockets, self._ttl_ms = parse_redis_url(url), sockets or Sockets(), int(ttl_s * 1000)
        self._clock = sockets.now_s
        self._account = Account(refresh_interval_s, self._clock)
        window_bytes, db = max_pipeline_bytes // 2, parsed.login.db
        settings = NodeSettings(self._ttl_ms, window_bytes, max_connections, db, mac_key, codec)
        self._topology = make_topology(Means(parsed, sockets, connect_timeout_s, settings, self._account))
        self._servers = f"all of {','.join(map(str, parsed.endpoints))}"  # together, for people
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
        """One round trip per server."""
        if not addresses:
            return 0
        for _ in range(MAX_PASSES - 1):
            count, trouble, has_moved = self._lookup(addresses, deadline_s)
            if not has_moved:
                break
        if trouble and not count:
            raise TierUnavailable(self.name, "lookup", trouble)
        return count

    def _lookup(self, addresses: Sequence[Address], deadline_s: float) -> tuple[int, str, bool]:
        """Leading addresses that are there, what ended them if that was no miss, and whether to ask anew."""
        count, trouble, has_moved, names = len(addresses), "", False, self._own_names
        for share in self._shares(READING, addresses, deadline_s):
            mine, error = 0, share.trouble
            if share.node is not None:
                try:
                    everything = len(share.indices) == len(addresses)
                    asked = addresses if everything else [addresses[i] for i in share.indices]
                    mine, reply = share.node.count_leading(names, asked, share.until_s)
                    error = str(reply or "")
                    has_moved |= reply is not None and self._has_moved(reply)
                except FAULTS as fault:
                    error = str(fault)
                    self._topology.suspect(share.node)
            if mine < len(share.indices) and share.indices[mine] < count:
                count, trouble = share.indices[mine], error
        return count, trouble, has_moved

    def _has_moved(self, reply: ErrorReply) -> bool:
        """Whether another node is to be asked, now that its slot's owner is known."""
        redirect = parse_redirect(reply)
        return redirect is not None and not redirect.is_asking and self._topology.target(redirect) is not None

    def get(self, reads: Sequence[BlockRead], deadline_s: float) -> list[BlockStatus]:
        names = self._names(reads)
        statuses = self._everywhere(_Work(READING, reads, names, Node.read), deadline_s)
        corrupt = [i for i, status in enumerate(statuses) if status is BlockStatus.CORRUPT]
        if corrupt:
            self._account.found_corrupt(len(corrupt))
            if self._clock() < deadline_s:  # else the next read does it
                self._remove([names[i] for i in corrupt], [reads[i].address for i in corrupt], deadline_s)
        return statuses

    def put(self, writes: Sequence[BlockWrite], deadline_s: float) -> list[BlockStatus]:
        return self._everywhere(_Work(WRITING, writes, self._names(writes), Node.write), deadline_s)

    def touch(self, addresses: Sequence[Address]) -> None:
        """Renews TTL and the servers' idea of recency, tail first; given up after HOUSEKEEPING_S."""
        names, ttl, tail_first = self._own_names, b"%d" % self._ttl_ms, list(reversed(addresses))
        for share in self._shares(WRITING, tail_first, self._clock() + HOUSEKEEPING_S):
            if share.node is not None:
                commands = [names.command(b"PEXPIRE", tail_first[i], ttl) for i in share.indices]
                share.node.integers(commands, share.until_s)

    def delete(self, addresses: Sequence[Address]) -> int:
        return self._remove([self._own_names] * len(addresses), addresses, self._clock() + HOUSEKEEPING_S)

    def _remove(self, names: Sequence[RecordNames], addresses: Sequence[Address], deadline_s: float) -> int:
        return sum(
            share.node.remove([names[i].name(addresses[i]) for i in share.indices], share.until_s)
            for share in self._shares(WRITING, addresses, deadline_s)
            if share.node is not None
        )

    def put_identity(self, domain: bytes, encoded: bytes) -> None:
        command = encode_command(b"HSET", REDIS_IDENTITIES.encode(), domain.hex().encode(), encoded)
        deadline_s = self._clock() + HOUSEKEEPING_S
        try:
            node = self._topology.share_of(REDIS_IDENTITIES.encode(), deadline_s)
        except FAULTS as fault:
            self._account.failed(self._servers, WRITING, 1, type(fault).__name__, str(fault))
            return
        if node is not None:
            node.integers([command], deadline_s)

    def identities(self) -> dict[bytes, bytes]:
        """Empty when the server does not answer."""
        deadline_s = self._clock() + HOUSEKEEPING_S
        try:
            node = self._topology.share_of(REDIS_IDENTITIES.encode(), deadline_s)
            reply = node.ask(encode_command(b"HGETALL", REDIS_IDENTITIES.encode()), deadline_s) if node else None
        except FAULTS as fault:
            self._account.failed(self._servers, READING, 1, type(fault).__name__, str(fault))
            return {}
        return parse_identities(reply)

    def describe(self, addresses: Sequence[Address], deadline_s: float) -> list[Description | None]:
        """As in `DescribingTier`: one round trip per server."""
        found = self.namespaces().describe(self._own_names.domain, addresses, deadline_s)
        return [None if one is None else Description(*one) for one in found]

    @property
    def domain(self) -> bytes:
        """The tier's own."""
        return self._own_names.domain

    def of_domain(self, domain: bytes) -> RedisTier:
        """The same tier as seen from another domain: one account, the same connections. Closing it closes them all."""
        other = copy.copy(self)
        other._own_names = RecordNames(domain)
        return other

    def namespaces(self) -> Namespaces:
        """What lies beside this tier's blocks, over the same connections."""
        return Namespaces(self._topology, self._clock)

    def audit(self) -> RedisAudit:
        """For reading every record of the servers, whosever it is."""
        return RedisAudit(self._topology, self._clock)

    def counters(self) -> TierCounters:
        """`blocks`, `nbytes`, `capacity_bytes` and `evictions` are the servers', whoever caused them, as of their last
        INFO and our own work since."""
        return self._account.counters()

    def error_replies(self) -> dict[str, int]:
        """Error replies by code (OOM, LOADING, READONLY, ...) since start. No I/O."""
        return self._account.error_replies()

    def check(self) -> None:
        self._topology.check()

    def close(self) -> None:
        """Close all connections; calls under way end as failed. Idempotent."""
        self._account.mute()
        self._topology.close()

    # -- over all servers ---------------------------------------------------------------------------------------------

    def _everywhere(self, work: _Work[_Sized], deadline_s: float) -> list[BlockStatus]:
        """A status per block; what a server sends elsewhere is done there, in another pass."""
        statuses: list[BlockStatus | None] = [None] * len(work.blocks)
        left, redirects = list(range(len(work.blocks))), dict[int, Redirect]()
        for _ in range(MAX_PASSES):
            asking = {i: redirect for i, redirect in redirects.items() if redirect.is_asking}
            redirects = {}
            for share in self._targets(work, left, asking, deadline_s):
                for i, answer in zip(share.indices, self._answers(work, share), strict=True):
                    if isinstance(answer, Redirect):
                        redirects[i] = answer
                    else:
                        statuses[i] = answer
            left = sorted(redirects)
            if not left:
                break
        return [BlockStatus.ERROR if status is None else status for status in statuses]

    def _targets(
        self, work: _Work[_Sized], left: Sequence[int], asking: dict[int, Redirect], deadline_s: float
    ) -> Iterator[_Share]:
        """Whom to ask for which of the blocks that are left."""
        plain = [i for i in left if i not in asking]
        for share in self._shares(work.direction, [work.blocks[i].address for i in plain], deadline_s):
            yield dataclasses.replace(share, indices=[plain[i] for i in share.indices])
        for redirect in dict.fromkeys(asking.values()):
            indices = [i for i in left if asking.get(i) == redirect]
            yield _Share(self._topology.target(redirect), indices, deadline_s, is_asking=True)

    def _answers(self, work: _Work[_Sized], share: _Share) -> Sequence[Answer]:
        if share.node is None:
            return [BlockStatus.ERROR] * len(share.indices)
        blocks, names = [work.blocks[i] for i in share.indices], [work.names[i] for i in share.indices]
        answers = work.call(share.node, blocks, names, share.until_s, share.is_asking)
        if BlockStatus.ERROR in answers or BlockStatus.TIMEOUT in answers:
            self._topology.suspect(share.node)
        return answers

    def _shares(self, direction: str, addresses: Sequence[Address], deadline_s: float) -> Iterator[_Share]:
        """Servers and their addresses, each with a deadline of its own: one that is silent takes only its share of
        what is left. What nobody answers for has failed: counted here."""
        if not addresses:
            return
        trouble = "nobody owns the slots of some blocks"
        try:
            shares = self._topology.shares(addresses, deadline_s)
        except FAULTS as fault:
            trouble, shares = str(fault), [(None, list(range(len(addresses))))]
        for done, (node, indices) in enumerate(shares):
            if node is None:
                self._account.failed(self._servers, direction, len(indices), trouble, trouble)
            start_s = self._clock()
            until_s = start_s + (deadline_s - start_s) / (len(shares) - done)
            yield _Share(node, indices, until_s, trouble=trouble)
        if all(node is not None for node, _ in shares):
            self._account.went_well(self._servers, direction)

    def _names(self, blocks: Sequence[BlockRead | BlockWrite]) -> list[RecordNames]:
        """The names of each block's domain."""
        own = self._own_names
        known = {own.domain: own}
        for domain in {block.domain or own.domain for block in blocks} - known.keys():
            known[domain] = RecordNames(domain)
        return [known[block.domain or own.domain] for block in blocks]
