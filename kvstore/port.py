"""One tier as the store uses it: guarded by its breakers, with executors of its own, and never raising.

Each tier has its own threads, so that a silent one holds up nobody else's blocks; reads and writes have a breaker each,
because a full disk still reads and a replica that only saves must notice a dead server too.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pagetier.kvstore.block import Address, BlockName, BlockStatus, Part
from pagetier.kvstore.breaker import Breaker, BreakerState, Outcome
from pagetier.kvstore.config import StoreLimits
from pagetier.kvstore.errors import TierUnavailable
from pagetier.kvstore.events import EventLog
from pagetier.kvstore.executor import ExecutorFactory
from pagetier.kvstore.tier import BlockRead, BlockWrite, PinningTier, QuarantiningTier, Tier, TierCounters, TryingTier

logger = logging.getLogger(__name__)

NUM_READ_THREADS = 2  # one waits for the medium while the other verifies
NUM_LOOKUP_THREADS = 2  # for tiers whose lookup is I/O
MAX_QUEUED_TOUCHES = 32  # per tier; touches are best effort


class TierPort:
    """A tier, its two breakers and its executors. All methods may be called from any thread."""

    def __init__(
        self,
        tier: Tier,
        limits: StoreLimits,
        budget_s: float,
        make_executor: ExecutorFactory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier, self.name, self.at_once = tier, tier.name, tier.answers_at_once
        self.pinning = tier if isinstance(tier, PinningTier) else None
        self.num_lanes = NUM_READ_THREADS
        self._limits, self._clock = limits, clock
        # A time-out is held against a tier only if it was given a fair part of the budget.
        self._fair_s = min(limits.slow_s, budget_s * limits.lookup_share / 2)
        self.reads = Breaker(f"{self.name} reads", "hits get shorter, the rest is recomputed", clock=clock)
        self.writes = Breaker(f"{self.name} writes", "new blocks are not stored there", clock=clock)
        self.read_executor = make_executor(f"kv-{self.name}-read", NUM_READ_THREADS)
        self.write_executor = make_executor(f"kv-{self.name}-write", 1)  # one: a chain is written head first
        self.lookup_executor = (
            self.read_executor if self.at_once else make_executor(f"kv-{self.name}-find", NUM_LOOKUP_THREADS)
        )
        self._lock = threading.Lock()
        self.events: EventLog | None = None  # told what was stored
        self.num_warmed = 0  # blocks that warm-up brought; owner: its thread
        self._num_touches = 0  # guarded by self._lock, as the one below
        self._touch_era = 0  # moves on when a touch was slow: those that waited behind it are dropped

    def has(self, address: Address) -> bool:
        """Whether a tier that answers at once holds a record. No I/O; False for the others and while reads are held."""
        return self.at_once and self.reads.would_allow() and self._lookup([address], 0.0) == 1

    def find(self, addresses: Sequence[Address], deadline_s: float) -> int:
        """Leading addresses that are there; 0 while the breaker is open or when the tier fails.

        A lookup without I/O says nothing about the medium, so it is not recorded.
        """
        if self.at_once:
            return self._lookup(addresses, deadline_s) if self.reads.would_allow() else 0
        permit = self.reads.acquire()
        if permit is None:
            return 0
        start_s, outcome, reason, count = self._clock(), Outcome.NEUTRAL, "", 0
        try:
            count = max(0, min(len(addresses), self.tier.lookup(addresses, deadline_s)))
            outcome = self._judge([], self._clock() - start_s, deadline_s - start_s, 0)
        except TierUnavailable as error:
            fair = deadline_s - start_s >= self._fair_s
            outcome, reason = (Outcome.FAILED if fair else Outcome.NEUTRAL), str(error)
        except Exception as error:
            logger.exception("%s: lookup raised; counted as a miss", self.name)
            outcome, reason = Outcome.FAILED, str(error)
        finally:
            self.reads.record(permit, outcome, reason)
        return count

    def get(self, reads: Sequence[BlockRead], deadline_s: float) -> list[BlockStatus]:
        """The tier's statuses; ERROR for all while the breaker is open."""
        nbytes = sum(len(read.destination) for read in reads)
        get = functools.partial(self.tier.get, reads)
        return self._guarded(self.reads, BlockStatus.ERROR, get, len(reads), nbytes, deadline_s)

    def put(self, writes: Sequence[BlockWrite], deadline_s: float) -> list[BlockStatus]:
        """The tier's statuses; DROPPED for all while the breaker is open."""
        nbytes = sum(len(write.source) for write in writes)
        put = functools.partial(self.tier.put, writes)
        statuses = self._guarded(self.writes, BlockStatus.DROPPED, put, len(writes), nbytes, deadline_s)
        if self.events is not None:
            done = [w for w, status in zip(writes, statuses, strict=True) if status is BlockStatus.OK]
            self.events.stored(self.name, [w.name for w in done], done[0].domain if done else None)
        return statuses

    def probe_writes(self, read: BlockRead, deadline_s: float) -> None:
        """Find out whether writes work again, when that is due, after a block was read: where all is hits no put comes,
        and a tier that is well would stay degraded. With that block where EXISTS is the medium's own answer."""
        if self.writes.state is not BreakerState.OPEN or not self.writes.would_allow():
            return
        deadline_s = min(deadline_s, self._clock() + self._limits.slow_s)
        if isinstance(self.tier, TryingTier):
            tier = self.tier
            self._guarded(self.writes, BlockStatus.DROPPED, lambda until_s: [tier.try_write(until_s)], 1, 0, deadline_s)
        elif not self.at_once:
            self.put([BlockWrite(read.name, read.part, read.destination, read.domain)], deadline_s)

    def submit_touch(self, names: Sequence[BlockName], part: Part) -> None:
        """Touch a chain, later and best effort: dropped when many wait or the tier is held back."""
        if not names or not self.reads.would_allow():
            return
        with self._lock:
            if self._num_touches >= MAX_QUEUED_TOUCHES:
                return
            self._num_touches += 1
            era = self._touch_era
        self.write_executor.submit(functools.partial(self._touch, names, part, era))

    def quarantine(self, addresses: Sequence[Address]) -> None:
        """Take records out of use; a copy is kept where the tier can."""
        try:
            if isinstance(self.tier, QuarantiningTier):
                self.tier.quarantine(addresses, "shadow check")
            else:
                self.tier.delete(addresses)
        except Exception:
            logger.exception("%s: a tier must not raise; %d wrong blocks may still be there", self.name, len(addresses))

    def stats(self) -> dict[str, Any]:
        """The tier's entry of `GET /stats`, without hits."""
        return tier_stats(self.tier.counters(), self.state)

    @property
    def num_returns(self) -> int:
        """Times the tier came back, with a breaker closed again or the medium begun anew."""
        return self.reads.num_recoveries + self.writes.num_recoveries + self.tier.counters().restarts

    @property
    def state(self) -> BreakerState:
        """The worse of the two breakers; open while the tier is without its medium."""
        if self.tier.counters().is_down:
            return BreakerState.OPEN
        states = {self.reads.state, self.writes.state}
        for state in (BreakerState.OPEN, BreakerState.HALF_OPEN):
            if state in states:
                return state
        return BreakerState.CLOSED

    def _lookup(self, addresses: Sequence[Address], deadline_s: float) -> int:
        try:
            return max(0, min(len(addresses), self.tier.lookup(addresses, deadline_s)))
        except TierUnavailable:
            return 0
        except Exception:
            logger.exception("%s: lookup raised; counted as a miss", self.name)
            return 0

    def _guarded(
        self,
        breaker: Breaker,
        held: BlockStatus,
        call: Callable[[float], list[BlockStatus]],
        num_blocks: int,
        nbytes: int,
        deadline_s: float,
    ) -> list[BlockStatus]:
        permit = breaker.acquire()
        if permit is None:
            return [held] * num_blocks
        start_s, outcome, reason = self._clock(), Outcome.FAILED, ""
        statuses = [BlockStatus.ERROR] * num_blocks
        try:
            answer = call(deadline_s)
            if len(answer) == num_blocks:
                statuses = answer
            else:
                logger.error("%s answered %d statuses for %d blocks", self.name, len(answer), num_blocks)
            outcome = self._judge(statuses, self._clock() - start_s, deadline_s - start_s, nbytes)
            reason = next((str(s) for s in statuses if s in (BlockStatus.ERROR, BlockStatus.TIMEOUT)), "slow")
        except Exception as error:
            logger.exception("%s: a tier must not raise; its blocks count as failed", self.name)
            reason = str(error)
        finally:
            breaker.record(permit, outcome, reason)
        return statuses

    def _judge(self, statuses: Sequence[BlockStatus], took_s: float, given_s: float, nbytes: int) -> Outcome:
        if BlockStatus.ERROR in statuses:
            return Outcome.FAILED
        if BlockStatus.TIMEOUT in statuses:
            return Outcome.FAILED if given_s >= self._fair_s else Outcome.NEUTRAL
        slow_s = self._limits.slow_s + nbytes / self._limits.floor_bytes_per_s
        return Outcome.SLOW if took_s > slow_s else Outcome.GOOD

    def _touch(self, names: Sequence[BlockName], part: Part, era: int) -> None:
        with self._lock:
            self._num_touches -= 1
            if era != self._touch_era:
                return
        start_s = self._clock()
        self.tier.touch([Address(name.key, part) for name in names])
        if self._clock() - start_s >= self._limits.slow_s / 2:  # a silent tier would let each of them wait as long
            with self._lock:
                self._touch_era += 1


def tier_stats(counters: TierCounters, state: BreakerState) -> dict[str, Any]:
    """A tier's entry of `GET /stats`, without hits."""
    return {
        "blocks": counters.blocks,
        "bytes": counters.nbytes,
        "capacity_bytes": counters.capacity_bytes,
        "evictions": counters.evictions,
        "errors": counters.errors,
        "corrupt": counters.corrupt,
        "quarantined": counters.quarantined,
        "scrubbed_bytes": counters.scrubbed_bytes,
        "read_bytes": counters.bytes_read,
        "written_bytes": counters.bytes_written,
        "breaker": str(state),
    }
