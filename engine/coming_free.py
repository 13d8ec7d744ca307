"""Blocks that come free without anybody giving up more: those that only launched steps and transfers still hold."""

from __future__ import annotations

from collections import Counter, deque

from pagetier.engine.block_pool import BlockPool
from pagetier.engine.plan import StepPlan
from pagetier.engine.transfers import Transfers


class ComingFree:
    """Owner: core thread. To count takes some 50 ns a block in transfer: asked only where blocks are short."""

    def __init__(self, pool: BlockPool, transfers: Transfers, launched: deque[StepPlan]) -> None:
        self._pool, self._transfers, self._launched = pool, transfers, launched

    def count(self) -> int:
        """Blocks whose last holders are steps under way or transfers that will end soon."""
        holders: Counter[int] = Counter()
        for step in self._launched:
            holders.update(step.release_after)
        for blocks in self._transfers.passing_blocks():
            holders.update(blocks)
        return sum(self._pool.references(block) == count for block, count in holders.items())

    @property
    def is_pending(self) -> bool:
        """Whether steps or transfers, be they stuck, hold any block at all."""
        return self._transfers.holds_blocks or any(step.release_after for step in self._launched)
