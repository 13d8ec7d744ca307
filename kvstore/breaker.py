"""A circuit breaker: after errors or slowness a tier is left alone for a while, then tried with one call.

Counts outcomes; knows no tier. Thread-safe. States: closed (all calls pass), open (none does), half-open (one probe is
under way). Every change of state is one log line.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

logger = logging.getLogger(__name__)


class BreakerState(StrEnum):
    CLOSED = "closed"
    HALF_OPEN = "half-open"
    OPEN = "open"


class Outcome(StrEnum):
    """What a call says about its tier."""

    GOOD = "good"
    SLOW = "slow"  # answered, but later than was worth waiting for
    FAILED = "failed"
    NEUTRAL = "neutral"  # says nothing, such as a time-out of a budget that others had used up


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When to open and how long to stay so.

    max_failures: FAILED in a row that open it; 3, so that one lost packet does not. window, min_calls, bad_share: it
    also opens when more than this share of the last `window` calls, `min_calls` at least, were FAILED or SLOW.
    cool_s: from open to the first probe, doubled up to max_cool_s by each probe that fails.
    """

    max_failures: int = 3
    window: int = 16
    min_calls: int = 8
    bad_share: float = 0.5
    cool_s: float = 1.0
    max_cool_s: float = 30.0


class Breaker:
    """Ask `acquire` before a call, tell `record` after it."""

    def __init__(
        self,
        name: str,
        consequence: str,
        policy: BreakerPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name` ("redis reads") and `consequence` (what users notice while it is open) go into the log lines."""
        self._name, self._consequence = name, consequence
        self._policy, self._clock = policy or BreakerPolicy(), clock
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED  # guarded by self._lock, as all below
        self.num_recoveries = 0  # times it closed again
        self._era = 0  # counts changes of state; outcomes of an earlier era are ignored
        self._recent: deque[bool] = deque(maxlen=self._policy.window)  # True: bad
        self._failures = 0
        self._cool_s = self._policy.cool_s
        self._probe_at_s = 0.0

    @property
    def state(self) -> BreakerState:
        return self._state

    def would_allow(self) -> bool:
        """Whether `acquire` would pass now. Takes no probe."""
        with self._lock:
            return self._passes()

    def acquire(self) -> int | None:
        """Permission for one call, to be given to `record`; None when the tier is to be left alone."""
        with self._lock:
            if not self._passes():
                return None
            if self._state is BreakerState.OPEN:
                self._change(BreakerState.HALF_OPEN)
                logger.info("%s: half-open, trying one call", self._name)
            return self._era

    def record(self, permit: int, outcome: Outcome, reason: str = "") -> None:
        """Account for a call's outcome; `reason` is logged when it opens the breaker."""
        with self._lock:
            if permit != self._era:
                return
            if self._state is BreakerState.HALF_OPEN:
                self._end_probe(outcome, reason)
            elif outcome is not Outcome.NEUTRAL:
                self._failures = self._failures + 1 if outcome is Outcome.FAILED else 0
                self._recent.append(outcome is not Outcome.GOOD)
                num_bad = sum(self._recent)
                many = len(self._recent) >= self._policy.min_calls
                if self._failures >= self._policy.max_failures:
                    self._open(f"{self._failures} failures in a row, last: {reason or outcome}")
                elif many and num_bad > self._policy.bad_share * len(self._recent):
                    self._open(f"{num_bad} of {len(self._recent)} calls failed or were slow, last: {reason or outcome}")

    def _passes(self) -> bool:
        if self._state is BreakerState.OPEN:
            return self._clock() >= self._probe_at_s
        return self._state is BreakerState.CLOSED

    def _end_probe(self, outcome: Outcome, reason: str) -> None:
        if outcome is Outcome.GOOD:
            self._change(BreakerState.CLOSED)
            self.num_recoveries += 1
            self._cool_s = self._policy.cool_s
            logger.warning("%s: closed again, in use", self._name)
        elif outcome is Outcome.NEUTRAL:
            self._change(BreakerState.OPEN)  # no verdict: the next call may probe at once
        else:
            self._cool_s = min(self._cool_s * 2, self._policy.max_cool_s)
            self._open(f"the probe failed: {reason or outcome}")

    def _open(self, why: str) -> None:
        self._change(BreakerState.OPEN)
        self._probe_at_s = self._clock() + self._cool_s
        logger.warning(
            "%s: breaker open (%s); %s; next try in %.0f s", self._name, why, self._consequence, self._cool_s
        )

    def _change(self, state: BreakerState) -> None:
        self._state = state
        self._era += 1
        self._failures = 0
        self._recent.clear()
