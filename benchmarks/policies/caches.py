"""Eviction policies over chains, each a host tier without bytes: LRU as the product has it, and three others made
chain-aware by the same rule, so that what differs is the order alone.

The rule: a block is admitted only beside its parent, and what a policy wants to evict is taken from the tail: if a
victim has children, its deepest descendant goes in its place. Blocks of the request being served are not evicted.
Sources: S3-FIFO (Yang et al., SOSP 2023), ARC (Megiddo and Modha, FAST 2003), W-TinyLFU (Einziger et al., TOS 2017).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pagetier.kvstore.lru import ChainLRU

NO_PARENT = -1


class Cache(Protocol):
    """A bounded set of blocks. `serve` answers with the leading blocks of a chain that were there, uses them and
    stores the rest as far as the policy admits it."""

    def serve(self, chain: Sequence[int]) -> int: ...

    def check(self) -> None: ...


class LruCache:
    """The product's own order."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._lru = capacity, ChainLRU[int]()

    def serve(self, chain: Sequence[int]) -> int:
        found = num_leading(chain, self._lru)
        self._lru.touch(chain[:found])
        for key in chain:
            if key in self._lru:
                self._lru.pin(key)
        for i in range(found, len(chain)):
            if len(self._lru) >= self._capacity and not self._lru.evict(1):
                break
            if chain[i] not in self._lru:
                self._lru.add(chain[i], chain[i - 1] if i else NO_PARENT)
                self._lru.pin(chain[i])
        self._lru.touch(chain)
        for key in chain:
            self._lru.unpin(key)
        return found

    def check(self) -> None:
        self._lru.check()
        assert len(self._lru) <= self._capacity, f"{len(self._lru)} blocks of {self._capacity}"


class ChainCache:
    """What the other policies share: who is whose child, and the rule of the module. A policy says where a new block
    goes (`_admit`), what a use does (`_use`), whom it would evict (`_victims`), and forgets one (`_drop`)."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._parent: dict[int, int] = {}
        self._children: dict[int, set[int]] = {}
        self._serving: set[int] = set()

    def serve(self, chain: Sequence[int]) -> int:
        found = num_leading(chain, self._parent)
        self._serving = set(chain)
        for key in reversed(chain[:found]):  # tail first: a parent is never colder than its child
            self._use(key)
        end = found
        while end < len(chain) and (len(self._parent) < self._capacity or self._make_room(chain[end])):
            parent = chain[end - 1] if end else NO_PARENT
            self._parent[chain[end]] = parent
            self._children.setdefault(parent, set()).add(chain[end])
            end += 1
        for key in reversed(chain[found:end]):
            self._admit(key)
        return found

    def check(self) -> None:
        assert len(self._parent) <= self._capacity, f"{len(self._parent)} blocks of {self._capacity}"
        for key, parent in self._parent.items():
            assert parent == NO_PARENT or parent in self._parent, f"{key} is there without its parent {parent}"

    def _make_room(self, key: int) -> bool:
        """Evict one block for `key`; False when the policy would rather not store it."""
        for candidate in self._victims(key):
            leaf = candidate
            while leaf not in self._serving and (children := self._children.get(leaf)):
                leaf = next((child for child in children if child not in self._serving), candidate)
            if leaf in self._serving:
                continue
            self._drop(leaf)
            parent = self._parent.pop(leaf)
            self._children[parent].discard(leaf)
            if not self._children[parent]:
                del self._children[parent]
            return True
        return False

    def _admit(self, key: int) -> None:
        raise NotImplementedError

    def _use(self, key: int) -> None:
        raise NotImplementedError

    def _victims(self, key: int) -> Iterable[int]:
        raise NotImplementedError

    def _drop(self, key: int) -> None:
        raise NotImplementedError


class S3FifoCache(ChainCache):
    """A small queue of a tenth for the new, a main one for what was used there, a ghost of what went unused."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small: OrderedDict[int, int] = OrderedDict()  # key -> uses, at most 3
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghost: OrderedDict[int, None] = OrderedDict()

    def _admit(self, key: int) -> None:
        (self._main if key in self._ghost else self._small)[key] = 0
        self._ghost.pop(key, None)

    def _use(self, key: int) -> None:
        queue = self._small if key in self._small else self._main
        queue[key] = min(3, queue[key] + 1)

    def _victims(self, key: int) -> Iterable[int]:
        for _ in range(8 * self._capacity if self._small or self._main else 0):
            if len(self._small) > self._capacity // 10 or not self._main:
                oldest, uses = next(iter(self._small.items()))
                if uses > 1:
                    del self._small[oldest]
                    self._main[oldest] = 0
                    continue
                self._small.move_to_end(oldest)  # if it stays, because a descendant or nobody goes
            else:
                oldest, uses = next(iter(self._main.items()))
                self._main.move_to_end(oldest)
                if uses:
                    self._main[oldest] = uses - 1
                    continue
            yield oldest

    def _drop(self, key: int) -> None:
        if self._small.pop(key, None) is not None:
            remember(self._ghost, key, self._capacity)
        else:
            self._main.pop(key)


class ArcCache(ChainCache):
    """Two orders, of what was used once and more often; ghosts of both move the border between them."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once: OrderedDict[int, None] = OrderedDict()  # coldest first, as all
        self._often: OrderedDict[int, None] = OrderedDict()
        self._ghost_once: OrderedDict[int, None] = OrderedDict()
        self._ghost_often: OrderedDict[int, None] = OrderedDict()
        self._target = 0.0  # of blocks in `_once`

    def _admit(self, key: int) -> None:
        once, often = max(1, len(self._ghost_once)), max(1, len(self._ghost_often))
        if key in self._ghost_once:
            self._target = min(self._capacity, self._target + max(1.0, often / once))
            del self._ghost_once[key]
            self._often[key] = None
        elif key in self._ghost_often:
            self._target = max(0.0, self._target - max(1.0, once / often))
            del self._ghost_often[key]
            self._often[key] = None
        else:
            self._once[key] = None

    def _use(self, key: int) -> None:
        self._once.pop(key, None)
        self._often[key] = None
        self._often.move_to_end(key)

    def _victims(self, key: int) -> Iterable[int]:
        first, second = self._once, self._often
        if len(self._once) <= self._target:
            first, second = second, first
        yield from first
        yield from second

    def _drop(self, key: int) -> None:
        if key in self._once:
            del self._once[key]
            remember(self._ghost_once, key, self._capacity)
        else:
            del self._often[key]
            remember(self._ghost_often, key, self._capacity)


class TinyLfuCache(ChainCache):
    """A window of a hundredth by recency before a main part in which a newcomer must be asked for more often than the
    block it would replace. Counts are exact and halved every ten capacities of uses, absent blocks' too."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._window: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._counts: Counter[int] = Counter()
        self._num_uses = 0

    def serve(self, chain: Sequence[int]) -> int:
        self._counts.update(chain)
        self._num_uses += len(chain)
        if self._num_uses >= 10 * self._capacity:
            self._counts = Counter({key: count // 2 for key, count in self._counts.items() if count > 1})
            self._num_uses = 0
        return super().serve(chain)

    def _admit(self, key: int) -> None:
        self._window[key] = None
        if len(self._window) > max(1, self._capacity // 100):
            oldest, _ = self._window.popitem(last=False)
            self._main[oldest] = None

    def _use(self, key: int) -> None:
        queue = self._window if key in self._window else self._main
        queue.move_to_end(key)

    def _victims(self, key: int) -> Iterable[int]:
        for oldest in self._main:
            if oldest in self._serving:
                continue
            if self._counts[key] < self._counts[oldest]:
                return
            yield oldest
        yield from self._window

    def _drop(self, key: int) -> None:
        if key in self._window:
            del self._window[key]
        else:
            del self._main[key]


def num_leading(chain: Sequence[int], present: ChainLRU[int] | dict[int, int]) -> int:
    """How many of the chain's first blocks are there."""
    return next((i for i, key in enumerate(chain) if key not in present), len(chain))


def remember(ghost: OrderedDict[int, None], key: int, capacity: int) -> None:
    ghost[key] = None
    if len(ghost) > capacity:
        ghost.popitem(last=False)


CACHES: dict[str, Callable[[int], Cache]] = {
    "lru": LruCache,
    "s3fifo": S3FifoCache,
    "arc": ArcCache,
    "tinylfu": TinyLfuCache,
}
