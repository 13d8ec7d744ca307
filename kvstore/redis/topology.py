"""Which server answers for a block: one, the one that Sentinels name, or the nodes of a Cluster by hash slot.

Sentinels and slots are asked over our own connections, so that a caller's deadline, the socket seam and its simulated
servers hold for them too; redis-py knows the hash. (Its own clients were tried: they have no deadline over several
servers and ask each new Cluster for its whole command table first.)
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pagetier.kvstore.block import Address
from pagetier.kvstore.errors import ProtocolError
from pagetier.kvstore.redis.account import Account
from pagetier.kvstore.redis.node import FAULTS, Node, NodeSettings, Redirect
from pagetier.kvstore.redis.pool import Dialer
from pagetier.kvstore.redis.resp import ErrorReply, Reply, RespConnection, encode_command
from pagetier.kvstore.redis.sockets import Endpoint, Sockets
from pagetier.kvstore.redis.url import Kind, RedisUrl
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

ASK_AGAIN_S = 0.5  # between two questions for the slots: a fail-over takes longer
_ROLE, _SLOTS = encode_command(b"ROLE"), encode_command(b"CLUSTER", b"SLOTS")

Share = tuple[Node | None, list[int]]  # who is to be asked, and for which; None: nobody owns their slots


class Topology(Protocol):
    """Thread-safe."""

    def shares(self, addresses: Sequence[Address], deadline_s: float) -> list[Share]:
        """Who answers for which of `addresses`, by index, in order. Raises one of FAULTS when that is not known."""

    def share_of(self, name: bytes, deadline_s: float) -> Node | None:
        """Who answers for a name that is no record's. Raises one of FAULTS."""

    def target(self, redirect: Redirect) -> Node | None:
        """Whom a redirect means; None where there is none to follow."""

    def masters(self, deadline_s: float) -> list[Node]:
        """Everyone who holds values, for work on all of them. Raises one of FAULTS."""

    def suspect(self, node: Node) -> None:
        """A call to it failed: who answers may have changed."""

    def check(self) -> None: ...

    def close(self) -> None:
        """Idempotent."""


@dataclass(frozen=True, slots=True)
class Means:
    """What a topology makes its nodes with."""

    url: RedisUrl
    sockets: Sockets
    connect_timeout_s: float
    settings: NodeSettings
    account: Account


def make_topology(means: Means) -> Topology:
    """Connects to nothing."""
    url = means.url
    dialer = Dialer(url.login, means.connect_timeout_s, means.sockets)
    if url.kind is Kind.CLUSTER:
        return Cluster(means, dialer)
    if url.kind is Kind.SENTINEL:
        server = f"{url.service} of {','.join(map(str, url.endpoints))}"
        return OneServer(means, server, Sentinels(means, dialer).dial)
    return OneServer(means, str(url.endpoints[0]), functools.partial(dialer.dial, url.endpoints[0]))


class OneServer:
    """The same node for everything. Implements `Topology`."""

    def __init__(self, means: Means, server: str, dial: Callable[[float], RespConnection]) -> None:
        self._node = Node(server, dial, means.settings, means.account, means.sockets.now_s)

    def shares(self, addresses: Sequence[Address], deadline_s: float) -> list[Share]:
        return [(self._node, list(range(len(addresses))))]

    def share_of(self, name: bytes, deadline_s: float) -> Node:
        return self._node

    def target(self, redirect: Redirect) -> None:
        return None

    def masters(self, deadline_s: float) -> list[Node]:
        return [self._node]

    def suspect(self, node: Node) -> None:
        """The next connection is dialed anew as it is."""

    def check(self) -> None:
        self._node.check()

    def close(self) -> None:
        self._node.close()


class Sentinels:
    """Dials whom the Sentinels call master, and makes sure that it knows."""

    def __init__(self, means: Means, dialer: Dialer) -> None:
        self._url, self._now_s, self._timeout_s = means.url, means.sockets.now_s, means.connect_timeout_s
        self._dialer = dialer
        self._asker = Dialer(means.url.sentinel_login, means.connect_timeout_s, means.sockets)
        self._command = encode_command(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", means.url.service.encode())
        self._order = list(means.url.endpoints)  # who answered last comes first; replaced as a whole

    def dial(self, deadline_s: float) -> RespConnection:
        """Raises what dialing raises, ConnectionError also when nobody knows a master or it is none any more."""
        deadline_s = min(deadline_s, self._now_s() + self._timeout_s)
        master = self._find_master(deadline_s)
        connection = self._dialer.dial(master, deadline_s)
        try:
            connection.send([_ROLE], 1, deadline_s)
            role = connection.read_reply(deadline_s)
            if not isinstance(role, list) or role[:1] != [b"master"]:
                raise ConnectionError(f"{master} is not the master of {self._url.service!r} (any more)")
        except BaseException:
            connection.close()
            raise
        return connection

    def _find_master(self, deadline_s: float) -> Endpoint:
        order, trouble = self._order, "no answer"
        for sentinel, until_s in _in_turn(order, deadline_s, self._now_s):
            try:
                with self._asker.dial(sentinel, until_s) as connection:
                    connection.send([self._command], 1, until_s)
                    reply = connection.read_reply(until_s)
            except FAULTS as fault:
                trouble = str(fault)
                continue
            master = _place(reply, sentinel)
            if master is not None:
                self._order = [sentinel, *(other for other in order if other != sentinel)]
                return master
            trouble = str(reply) if isinstance(reply, ErrorReply) else f"{sentinel} knows no {self._url.service!r}"
        raise ConnectionError(f"no Sentinel names a master of {self._url.service!r}: {trouble}")


class Cluster:
    """Nodes by hash slot, as of the last CLUSTER SLOTS and every MOVED since. Implements `Topology`.

    The slots are asked for when a node moved a block or failed, at most every ASK_AGAIN_S, by whoever comes next.
    """

    def __init__(self, means: Means, dialer: Dialer) -> None:
        self._means, self._dialer, self._now_s = means, dialer, means.sockets.now_s
        self._lock = threading.Lock()
        self._asking = threading.Lock()  # held by who asks; others go on with what is known
        self._nodes: dict[Endpoint, Node] = {}  # guarded by self._lock, as all below
        self._owners: list[Endpoint | None] = [None] * REDIS_CLUSTER_HASH_SLOTS  # read without the lock
        self._suspects: set[Endpoint] = set()
        self._is_known = False  # whether any node ever told
        self._is_stale = True
        self._ask_at_s = float("-inf")
        self._is_closed = False

    def shares(self, addresses: Sequence[Address], deadline_s: float) -> list[Share]:
        self._ask_if_stale(deadline_s)
        shares: defaultdict[Endpoint | None, list[int]] = defaultdict(list)
        owners = self._owners
        for i, address in enumerate(addresses):
            shares[owners[slot_of(address)]].append(i)
        return [(self._node(owner) if owner else None, share) for owner, share in shares.items()]

    def share_of(self, name: bytes, deadline_s: float) -> Node | None:
        self._ask_if_stale(deadline_s)
        owner = self._owners[key_slot(name)]
        return self._node(owner) if owner else None

    def target(self, redirect: Redirect) -> Node:
        return self._node(self._means.url.endpoints[0].at(redirect.host, redirect.port))

    def masters(self, deadline_s: float) -> list[Node]:
        self._ask_if_stale(deadline_s)
        return [self._node(owner) for owner in dict.fromkeys(self._owners) if owner is not None]

    def suspect(self, node: Node) -> None:
        with self._lock:
            self._is_stale = True
            self._suspects |= {endpoint for endpoint, known in self._nodes.items() if known is node}

    def check(self) -> None:
        with self._lock:
            nodes = list(self._nodes.values())
            assert not (self._is_closed and nodes), "closed with nodes"
        for node in nodes:
            node.check()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            nodes = list(self._nodes.values())
            self._nodes.clear()
        for node in nodes:
            node.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _node(self, endpoint: Endpoint) -> Node:
        with self._lock:
            if self._is_closed:
                raise ConnectionAbortedError("closed")
            node = self._nodes.get(endpoint)
            if node is None:
                means = self._means
                dial = functools.partial(self._dialer.dial, endpoint)
                redirected = functools.partial(self._redirected, endpoint)
                node = Node(str(endpoint), dial, means.settings, means.account, self._now_s, redirected)
                self._nodes[endpoint] = node
            return node

    def _redirected(self, by: Endpoint, redirect: Redirect) -> Redirect:
        """Learn from it, and fill in a host that is left out."""
        redirect = dataclasses.replace(redirect, host=redirect.host or by.host)
        if not redirect.is_asking and redirect.slot < REDIS_CLUSTER_HASH_SLOTS:
            with self._lock:
                self._owners[redirect.slot] = by.at(redirect.host, redirect.port)
                self._is_stale = True
        return redirect

    def _ask_if_stale(self, deadline_s: float) -> None:
        """Raises ConnectionError when no node ever told who owns what."""
        with self._lock:
            is_known = self._is_known
            is_due = not is_known or (self._is_stale and self._now_s() >= self._ask_at_s)
        # Who knows something goes on with it while another thread asks; who knows nothing waits.
        left_s = -1.0 if is_known else max(deadline_s - self._now_s(), 0.0)
        if is_due and self._asking.acquire(not is_known, left_s):
            try:
                if is_known or not self._is_known:
                    self._ask(deadline_s)
            finally:
                self._asking.release()
        if not self._is_known:
            raise ConnectionError("no node of the Cluster tells who owns what")

    def _ask(self, deadline_s: float) -> None:
        with self._lock:
            self._ask_at_s = self._now_s() + ASK_AGAIN_S
            suspects = set(self._suspects)
            known = [*self._nodes, *self._means.url.endpoints]
        order = sorted(dict.fromkeys(known), key=lambda endpoint: endpoint in suspects)
        deadline_s = min(deadline_s, self._now_s() + self._means.connect_timeout_s)
        for endpoint, until_s in _in_turn(order, deadline_s, self._now_s):
            try:
                owners = _parse_slots(self._node(endpoint).ask(_SLOTS, until_s), endpoint)
            except FAULTS:
                continue  # counted where a block is concerned
            if owners is not None:
                self._learn(owners)
                return

    def _learn(self, owners: Sequence[Endpoint | None]) -> None:
        with self._lock:
            self._owners[:] = owners
            self._is_known, self._is_stale = True, False
            self._suspects.clear()
            gone = {endpoint: self._nodes.pop(endpoint) for endpoint in self._nodes.keys() - set(owners)}
        for node in gone.values():
            self._means.account.forget(node.server)
            node.close()


def slot_of(address: Address) -> int:
    """The slot of a block, all its parts: the key is the hash tag of their names."""
    return key_slot(address.key.hex().encode())


def _in_turn(
    endpoints: Sequence[Endpoint], deadline_s: float, now_s: Callable[[], float]
) -> Iterator[tuple[Endpoint, float]]:
    """Each with a deadline of its own: one that is silent takes only its share of what is left."""
    for i, endpoint in enumerate(endpoints):
        start_s = now_s()
        yield endpoint, start_s + (deadline_s - start_s) / (len(endpoints) - i)


def _place(reply: Reply, like: Endpoint) -> Endpoint | None:
    """The endpoint in a Sentinel's `[host, port]`."""
    if isinstance(reply, list) and len(reply) == 2:
        host, port = reply
        if isinstance(host, bytes) and isinstance(port, bytes) and port.isdigit():
            return like.at(host.decode("ascii", "replace"), int(port))
    return None


def _parse_slots(reply: Reply, asked: Endpoint) -> list[Endpoint | None] | None:
    """Owners by slot from CLUSTER SLOTS: `[[first, last, [host, port, ...], replicas...], ...]`; None when the node
    knows none. A host that is null or empty is the one that was asked. Raises ProtocolError."""
    if not isinstance(reply, list):
        return None
    owners: list[Endpoint | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    for run in reply:
        match run:
            case [int(first), int(last), [bytes() | None as host, int(port), *_], *_] if (
                0 <= first <= last < len(owners)
            ):
                owner = asked.at(host.decode("ascii", "replace") if host else asked.host, port)
                owners[first : last + 1] = [owner] * (last + 1 - first)
            case _:
                raise ProtocolError(f"CLUSTER SLOTS: {str(run)[:64]}")
    return owners if any(owners) else None
