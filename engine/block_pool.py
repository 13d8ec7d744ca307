"""Who holds which device block: reference counts, the free list, and eviction from the prefix index when it runs dry.

Every block is exactly one of: free, referenced, or cached (in the prefix index with no reference). A block in the free
list is touched by no launched step, no load and no save: whoever may touch a block holds a reference to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain

from pagetier.engine.prefix_index import PrefixIndex


class BlockPool:
    """Bookkeeping only; the bytes live with the runner. Owner: core thread.

    poison: told of blocks that nobody may read any more, before they are given out again (--paranoid).
    """

    def __init__(
        self, num_blocks: int, index: PrefixIndex, poison: Callable[[Sequence[int]], None] | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self.num_referenced = 0
        self._index, self._poison = index, poison
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # popped from the end: the most recently freed first

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + self._index.num_evictable

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Fresh blocks with one reference each, or None and no change. Evicts the coldest cached blocks if it must."""
        missing = num_blocks - len(self._free)
        if missing > 0:
            freed = self._index.evict(missing)
            if freed is None:
                return None
            self.num_evictions += len(freed)
            self._put_free(freed)
        blocks = [self._free.pop() for _ in range(num_blocks)]
        for block in blocks:
            self._references[block] = 1
        self.num_referenced += num_blocks
        return blocks

    def purge(self, root: bytes | None = None, keys: Collection[bytes] | None = None) -> int:
        """Forget cached blocks, as `PrefixIndex.purge` says; how many."""
        freed = self._index.purge(root, keys)
        self._put_free(freed)
        return len(freed)

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference to each block, which is referenced or cached."""
        for block in blocks:
            if self._references[block] == 0:
                self._index.activate(block)
                self.num_referenced += 1
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each; a block with none left stays cached if indexed, else it is free."""
        freed: list[int] = []
        for block in blocks:
            count = self._references[block]
            assert count > 0, f"block {block} released too often"
            self._references[block] = count - 1
            if count == 1:
                self.num_referenced -= 1
                if self._index.node_of(block) is not None:
                    self._index.deactivate(block)
                else:
                    freed.append(block)
        self._put_free(freed)

    def _put_free(self, blocks: list[int]) -> None:
        self._free.extend(blocks)
        if self._poison is not None and blocks:
            self._poison(blocks)

    def references(self, block: int) -> int:
        return self._references[block]

    def check(self, held: Iterable[Iterable[int]] = ()) -> None:
        """Raise AssertionError with ids when a block is in no state or in two, or has fewer references than it is named
        in `held`: each holder's blocks."""
        for block, count in Counter(chain.from_iterable(held)).items():
            assert self._references[block] >= count, f"block {block}: {count} holders"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        num_unreferenced = self._references.count(0)
        assert self.num_referenced == self.num_blocks - num_unreferenced, "num_referenced"
        cached = self._index.unreferenced_blocks()
        assert free.isdisjoint(cached), f"blocks {free & cached} are free and cached"
        idle = free | cached
        if len(idle) != num_unreferenced or any(map(self._references.__getitem__, idle)):
            unreferenced = {block for block, count in enumerate(self._references) if not count}
            raise AssertionError(f"blocks {unreferenced ^ idle} are lost or held by nobody")
        self._index.check()
