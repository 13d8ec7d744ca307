"""Least-recently-used order over chains: who leaves first when a tier is full.

Owns order and pin counts; knows neither bytes nor tiers. Keys are any hashable; each has a parent key, present or not.
Invariants, tested by `check()`: a present parent is hotter than each of its present children, so that eviction takes
chain suffixes and never leaves a hole; a pinned key is not evicted. Not thread-safe: the owner's lock guards it.

Per-block S3-FIFO was simulated instead: it leaves 0 usable tokens of a 6,250-block prompt in 11,650 slots.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class _Node(Generic[K]):
    __slots__ = ("colder", "hotter", "key", "parent", "pins")

    def __init__(self, key: K, parent: K) -> None:
        self.key, self.parent, self.pins = key, parent, 0
        self.colder: _Node[K] | None = None
        self.hotter: _Node[K] | None = None


class ChainLRU(Generic[K]):
    """An order from coldest to hottest, kept in a linked list. All operations but `touch` and `evict` are O(1)."""

    def __init__(self) -> None:
        self._nodes: dict[K, _Node[K]] = {}
        self._num_children: dict[K, int] = {}  # of present children, by parent key, present or not
        self._coldest: _Node[K] | None = None
        self._hottest: _Node[K] | None = None
        self._num_pinned = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: K) -> bool:
        return key in self._nodes

    def __iter__(self) -> Iterator[K]:
        """Keys from coldest to hottest."""
        node = self._coldest
        while node is not None:
            yield node.key
            node = node.hotter

    @property
    def num_pinned(self) -> int:
        """Keys with at least one pin."""
        return self._num_pinned

    def add(self, key: K, parent: K) -> None:
        """Insert a new key just below its parent, or hottest of all when the parent is absent.

        Below the parent rather than on top: a block is as recent as the use of its chain, which `touch` reports; so an
        insertion costs O(1) and not a walk up thousands of ancestors.
        """
        assert key not in self._nodes, f"{key!r} is already in the LRU"
        node = _Node(key, parent)
        self._nodes[key] = node
        self._num_children[parent] = self._num_children.get(parent, 0) + 1
        above = self._nodes.get(parent)
        if self._num_children.get(key, 0):  # fills a hole: its children may be hotter than its parent
            self._link_below(node, None)
            self._renew_ancestors(node)
        else:
            self._link_below(node, above if above is not node else None)

    def touch(self, keys: Sequence[K]) -> None:
        """Renew a chain, head first; absent keys are skipped. Ancestors are renewed too: their child was used."""
        i = len(keys) - 1
        while i >= 0:
            low = self._nodes.get(keys[i])
            if low is not None:
                high = low
                # Neighbours in a chain are mostly neighbours in the order: move them as one.
                while i > 0 and (above := self._parent_above(high)) is not None and above.key == keys[i - 1]:
                    high = above
                    i -= 1
                self._renew(low, high)
                if i == 0 or keys[i - 1] != high.parent:
                    self._renew_ancestors(high)
            i -= 1

    def remove(self, key: K) -> bool:
        """Forget a key, pinned or not; whether it was there. Its children stay, as orphans."""
        node = self._nodes.pop(key, None)
        if node is None:
            return False
        self._unlink(node)
        left = self._num_children[node.parent] - 1
        if left:
            self._num_children[node.parent] = left
        else:
            del self._num_children[node.parent]
        if node.pins:
            self._num_pinned -= 1
        return True

    def evict(self, num_keys: int) -> list[K]:
        """Remove and return up to `num_keys` unpinned keys, coldest first, children before parents."""
        taken: list[K] = []
        node = self._coldest
        while node is not None and len(taken) < num_keys:
            hotter = node.hotter
            if not node.pins and not self._num_children.get(node.key, 0):
                taken.append(node.key)
                self.remove(node.key)
            node = hotter
        return taken

    def pin(self, key: K) -> bool:
        """Hold a present key against eviction; whether it was free before. Does not renew it: a lookup is not a use."""
        node = self._nodes[key]
        node.pins += 1
        if node.pins == 1:
            self._num_pinned += 1
        return node.pins == 1

    def unpin(self, key: K) -> bool:
        """Undo one `pin`; whether that freed the key. Nothing when the key was removed meanwhile."""
        node = self._nodes.get(key)
        if node is None or not node.pins:
            return False
        node.pins -= 1
        if node.pins:
            return False
        self._num_pinned -= 1
        return True

    def is_pinned(self, key: K) -> bool:
        node = self._nodes.get(key)
        return node is not None and node.pins > 0

    def check(self) -> None:
        """Raise AssertionError when the list, the counts or the parent rule are broken. O(n)."""
        rank = {key: i for i, key in enumerate(self)}
        assert len(rank) == len(self._nodes), f"list has {len(rank)} keys, index {len(self._nodes)}"
        children: dict[K, int] = {}
        for key, node in self._nodes.items():
            children[node.parent] = children.get(node.parent, 0) + 1
            if node.parent in rank and node.parent != key:
                assert rank[node.parent] > rank[key], f"parent {node.parent!r} is colder than its child {key!r}"
        assert children == self._num_children, "child counts differ from the keys present"
        pinned = sum(1 for node in self._nodes.values() if node.pins)
        assert pinned == self._num_pinned, f"{pinned} keys pinned, counted {self._num_pinned}"

    def _parent_above(self, node: _Node[K]) -> _Node[K] | None:
        """The next hotter node if it is the parent."""
        above = node.hotter
        return above if above is not None and above.key == node.parent else None

    def _renew(self, low: _Node[K], high: _Node[K]) -> None:
        """Move the run from `low` up to `high` to the hot end, in its order."""
        if high.hotter is None or self._hottest is None:
            return
        if low.colder is None:
            self._coldest = high.hotter
        else:
            low.colder.hotter = high.hotter
        high.hotter.colder = low.colder
        low.colder, self._hottest.hotter = self._hottest, low
        high.hotter, self._hottest = None, high

    def _renew_ancestors(self, node: _Node[K]) -> None:
        low = self._nodes.get(node.parent)
        while low is not None and low is not node:
            high = low
            while (above := self._parent_above(high)) is not None:
                high = above
            self._renew(low, high)
            low = self._nodes.get(high.parent)

    def _link_below(self, node: _Node[K], above: _Node[K] | None) -> None:
        """Put `node` next colder than `above`; None: hottest."""
        colder = self._hottest if above is None else above.colder
        node.colder, node.hotter = colder, above
        if colder is None:
            self._coldest = node
        else:
            colder.hotter = node
        if above is None:
            self._hottest = node
        else:
            above.colder = node

    def _unlink(self, node: _Node[K]) -> None:
        if node.colder is None:
            self._coldest = node.hotter
        else:
            node.colder.hotter = node.hotter
        if node.hotter is None:
            self._hottest = node.colder
        else:
            node.hotter.colder = node.colder
        node.colder = node.hotter = None
