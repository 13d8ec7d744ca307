"""Which waiting requests leave their turn to others, since they miss blocks that a tier keeps, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable

from pagetier.engine.forks import Forks
from pagetier.engine.request import Request
from pagetier.engine.tables import BlockTables
from pagetier.engine.withheld import Withheld

MAX_PASSED = 8  # looks at such requests in a step; each matches a prompt


class Turns:
    """Owner: core thread.

    Whoever is let past may be saved in turn, by a tier that is slow rather than hung, so that there are always blocks
    missing and never for long enough to complain of. So a request is passed over for `timeout_s` in all; then it blocks
    the line, nothing more is saved, and each transfer ends or comes of age.
    """

    def __init__(
        self,
        withheld: Withheld,
        tables: BlockTables,
        forks: Forks,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._withheld, self._tables, self._forks = withheld, tables, forks
        self._timeout_s, self._clock = timeout_s, clock

    def lacks_withheld(self, request: Request) -> bool:
        """Whether a waiting request has no room without what tiers keep, whoever else gave blocks up."""
        return self._withheld.are_any and self._withheld.are_missed(request.num_tokens, self._sharable(request))

    def is_passed_over(self, request: Request) -> bool:
        """Whether a waiting request leaves its turn to others now."""
        if not self.lacks_withheld(request):
            return False
        now_s = self._clock()
        if request.passed_since_s is None:
            request.passed_since_s = now_s
        return now_s - request.passed_since_s < self._timeout_s

    def complaint(self, request: Request) -> str:
        """One line for a waiting request that has missed them for too long; "" while there is hope."""
        if not self._withheld.are_any:
            return ""
        return self._withheld.complaint(request.num_tokens, self._sharable(request))

    def _sharable(self, request: Request) -> set[int]:
        """Blocks that a waiting request takes as they are."""
        blocks = {node.block for node in self._tables.match(request).nodes}
        fork = self._forks.fork_of(request)
        return blocks if fork is None else blocks.union(fork.source.block_ids[: fork.num_full])
