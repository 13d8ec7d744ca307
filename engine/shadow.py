"""The shadow check (`--kv-verify shadow:N`): one in N loaded blocks is computed anew and compared with what was loaded.

A checksum proves that a record is what somebody wrote; this proves that it is what this engine would have computed. A
chosen block is computed from the blocks before it into a scratch block, so its answer depends on all of them too: one
that differs puts the whole load in doubt. Owns the choice, what is under way and the counts; knows neither bytes nor
tiers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagetier.engine.config import EngineConfig
from pagetier.engine.plan import PlannedRow, StepPlan
from pagetier.engine.request import Request
from pagetier.kvstore.block import BlockName

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ShadowCheck:
    """What is under way for one request's load of blocks [first, first + len(tiers)). Indices are the request's."""

    first: int
    tiers: tuple[str, ...]
    waiting: deque[int]  # chosen blocks that no step computes yet
    num_under_way: int = 0
    differing: list[int] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return not self.waiting and not self.num_under_way


def is_chosen(name: BlockName, one_in: int) -> bool:
    """Whether a block is checked whenever it is loaded: by its key, a hash, so each is with chance 1 / one_in, and
    every process chooses the same ones. one_in 0: none is.
    """
    return one_in > 0 and int.from_bytes(name.key[:8], "little") % one_in == 0


class ShadowChecks:
    """Checks under way, by request. Owner: core thread.

    allocate: fresh blocks, or None. quarantine: takes blocks out of the tiers. take_loaded: a request goes on with the
    blocks that these tiers served, in order. checked, differing, skipped: blocks since start; skipped were chosen, but
    there was no scratch block.
    """

    def __init__(
        self,
        config: EngineConfig,
        allocate: Callable[[int], list[int] | None],
        quarantine: Callable[[Sequence[BlockName]], None],
        take_loaded: Callable[[Request, tuple[str, ...]], None],
    ) -> None:
        self.checked = self.differing = self.skipped = 0
        self._one_in, self._block_size = config.shadow_one_in, config.block_size
        self._allocate, self._quarantine, self._take_loaded = allocate, quarantine, take_loaded
        self._checks: dict[Request, ShadowCheck] = {}

    def begin(self, request: Request, first: int, tiers: tuple[str, ...]) -> bool:
        """A load of blocks from `first` on ended; whether some of them are to be checked before they are used."""
        if not self._one_in:
            return False
        chosen = deque(i for i in range(first, first + len(tiers)) if is_chosen(request.names[i], self._one_in))
        if chosen:
            self._checks[request] = ShadowCheck(first, tiers, chosen)
        return bool(chosen)

    def checks(self, request: Request) -> bool:
        """Whether a check of what the request loaded is under way."""
        return request in self._checks

    def forget(self, request: Request) -> None:
        """The request ended or starts over; rows under way go on unseen."""
        self._checks.pop(request, None)

    def plan(self, plan: StepPlan, budget: int) -> None:
        """Add rows that compute chosen blocks anew, each into a scratch block that is free again after the step, within
        `budget` tokens. A check for which there is no block ends at once: nobody gives one up for it.
        """
        for request, check in self._checks.items():
            while check.waiting and budget >= self._block_size:
                scratch = self._allocate(1)
                if scratch is None:
                    self.skipped += len(check.waiting)
                    check.waiting.clear()
                    break
                start = check.waiting.popleft() * self._block_size
                row = PlannedRow(request, start, start + self._block_size, -1, request.epoch, -1, scratch[0])
                plan.shadow_rows.append(len(plan.rows))
                plan.add(row)
                plan.release_after += scratch
                budget -= self._block_size
                request.num_in_flight += 1
                check.num_under_way += 1
        for request in [request for request, check in self._checks.items() if check.is_over]:
            self._end(request)

    def take(self, row: PlannedRow, differs: bool) -> None:
        """A row's block was computed and compared."""
        if row.epoch != row.request.epoch:
            return  # it started over meanwhile
        check = self._checks[row.request]
        check.num_under_way -= 1
        self.checked += 1
        if differs:
            self.differing += 1
            check.differing.append(row.start // self._block_size)
        if check.is_over:
            self._end(row.request)

    def _end(self, request: Request) -> None:
        """What was loaded may be used, or none of it when a block differs: the cause may lie in any before that one, so
        they leave the tiers with it.
        """
        check = self._checks.pop(request)
        if not check.differing:
            self._take_loaded(request, check.tiers)
            return
        suspects = request.names[check.first : min(check.differing) + 1]
        logger.warning(
            "loaded block %s is not what this engine computes; the tiers (%s) lose it and the %d loaded before it",
            suspects[-1].key.hex()[:16],
            ", ".join(dict.fromkeys(check.tiers)),
            len(suspects) - 1,
        )
        self._quarantine(suspects)
        self._take_loaded(request, ())

    def as_dict(self) -> dict[str, int]:
        """The `verify` entry of `GET /stats`. shadow_one_in 0: no block is chosen."""
        return {
            "shadow_one_in": self._one_in,
            "checked": self.checked,
            "differing": self.differing,
            "skipped": self.skipped,
        }

    def check(self, loading: list[Request]) -> None:
        """Raise AssertionError when a check belongs to nobody who waits for it, or waits for nothing."""
        for request, check in self._checks.items():
            assert request in loading, f"{request.request_id} has a check and does not wait for it"
            assert not check.is_over, f"{request.request_id}: its check is over and still known"
            assert request.num_in_flight == check.num_under_way, f"{request.request_id}: rows under way"
