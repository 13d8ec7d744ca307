"""Who waits for what another request is computing anyway: one prefill for many that share an uncached prefix.

A follower holds nothing while it waits. What its leader computes enters the prefix index block by block, so the
follower finds it there when its turn comes, and one whose leader died (ended, was preempted, failed) finds what had
been computed till then and computes the rest, or follows the next. A leader ranks before its followers and has all the
blocks that its prompt needs: it never waits for them.
"""

from __future__ import annotations

from collections.abc import Callable

from pagetier.engine.policies.base import Rank
from pagetier.engine.request import Following, Request, RequestState

LEADING = (RequestState.RUNNING, RequestState.LOADING)


def is_following(request: Request) -> bool:
    """Whether the request still has to wait for the one it follows. Takes a moment, however long the prompt."""
    following = request.following
    if following is None:
        return False
    leader = following.leader
    leads = leader.state in LEADING and leader.epoch == following.epoch
    if leads and leader.num_committed_tokens < following.num_tokens:
        return True
    request.following = None
    return False


class Leaders:
    """The prompt blocks that requests with seats are going to compute or load, by key. Owner: core thread."""

    def __init__(self, block_size: int, rank: Callable[[Request], Rank]) -> None:
        self._block_size, self._rank = block_size, rank
        self._by_key: dict[bytes, Request] = {}
        self._keys: dict[Request, list[bytes]] = {}
        self._ends: dict[Request, int] = {}

    def lead(self, request: Request, first: int) -> None:
        """The request, which has its blocks now, computes or loads its named blocks from `first` on."""
        keys = [name.key for name in request.names[first:]]
        if not keys:
            return
        self._keys[request] = keys
        self._ends[request] = len(request.names)
        for key in keys:
            self._by_key.setdefault(key, request)

    def advance(self, request: Request) -> None:
        """Newly computed blocks of the request were indexed. It leads no longer when those were the last."""
        if request.num_indexed_blocks >= self._ends.get(request, 1 << 60):
            self.resign(request)

    def resign(self, request: Request) -> None:
        """It has computed them all, or gives up. Nothing to do for one that does not lead."""
        self._ends.pop(request, None)
        for key in self._keys.pop(request, ()):
            if self._by_key.get(key) is request:
                del self._by_key[key]

    def follow(self, request: Request, num_device: int) -> bool:
        """Let a waiting request, of which the device has `num_device` blocks, wait for whoever computes the next one;
        whether anybody does."""
        if num_device >= len(request.names):
            return False
        leader = self._by_key.get(request.names[num_device].key)
        if leader is None or leader.num_committed_tokens > num_device * self._block_size:
            return False  # what it had computed has been evicted already
        if self._rank(leader) > self._rank(request):
            return False
        num_common = _num_common(request, leader, num_device + 1)
        request.following = Following(leader, leader.epoch, num_common * self._block_size)
        return True

    def check(self, seated: list[Request]) -> None:
        """Raise AssertionError when one leads that has no seat, or a key leads to one that does not lead."""
        assert self._keys.keys() <= set(seated), "a leader without a seat"
        assert set(self._by_key.values()) <= self._keys.keys(), "a key of nobody who leads"


def _num_common(a: Request, b: Request, known: int) -> int:
    """How many leading blocks the two have in common, at least `known`: a key depends on all before it."""
    low, high = known, min(len(a.names), len(b.names))
    while low < high:
        middle = (low + high + 1) // 2
        if a.names[middle - 1].key == b.names[middle - 1].key:
            low = middle
        else:
            high = middle - 1
    return low
