"""The breaker opens on errors and on slowness, probes with one call, and says each change once."""

from __future__ import annotations

import logging

import pytest

from pagetier.kvstore.breaker import Breaker, BreakerPolicy, BreakerState, Outcome


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker("redis reads", "hits get shorter", BreakerPolicy(), clock)


def is_in(breaker: Breaker, state: BreakerState) -> bool:
    return breaker.state is state


def record(breaker: Breaker, *outcomes: Outcome) -> None:
    for outcome in outcomes:
        permit = breaker.acquire()
        assert permit is not None
        breaker.record(permit, outcome)


def test_three_failures_in_a_row_open_it(breaker: Breaker) -> None:
    record(breaker, Outcome.FAILED, Outcome.FAILED, Outcome.GOOD, Outcome.FAILED, Outcome.FAILED)
    assert is_in(breaker, BreakerState.CLOSED)
    record(breaker, Outcome.FAILED)
    assert is_in(breaker, BreakerState.OPEN)
    assert breaker.acquire() is None and not breaker.would_allow()


def test_slowness_alone_opens_it(breaker: Breaker) -> None:
    record(breaker, *[Outcome.SLOW] * 7)
    assert is_in(breaker, BreakerState.CLOSED)
    record(breaker, Outcome.SLOW)
    assert is_in(breaker, BreakerState.OPEN)


def test_half_bad_is_still_in_use_and_more_is_not(breaker: Breaker) -> None:
    record(breaker, *[Outcome.GOOD, Outcome.SLOW] * 20)
    assert is_in(breaker, BreakerState.CLOSED)
    record(breaker, Outcome.SLOW)
    assert is_in(breaker, BreakerState.OPEN)


def test_neutral_outcomes_say_nothing(breaker: Breaker) -> None:
    record(breaker, *[Outcome.NEUTRAL] * 100)
    record(breaker, Outcome.FAILED, Outcome.NEUTRAL, Outcome.FAILED)
    assert is_in(breaker, BreakerState.CLOSED)


def test_one_probe_at_a_time_and_its_success_closes(breaker: Breaker, clock: Clock) -> None:
    record(breaker, *[Outcome.FAILED] * 3)
    clock.now_s += 1.01
    assert breaker.would_allow()
    permit = breaker.acquire()
    assert permit is not None and is_in(breaker, BreakerState.HALF_OPEN)
    assert breaker.acquire() is None and not breaker.would_allow()
    breaker.record(permit, Outcome.GOOD)
    assert is_in(breaker, BreakerState.CLOSED)


def test_failed_probes_wait_longer_each_time_up_to_a_bound(breaker: Breaker, clock: Clock) -> None:
    record(breaker, *[Outcome.FAILED] * 3)
    cool_s = 1.0
    for _ in range(8):
        clock.now_s += cool_s - 0.01
        assert breaker.acquire() is None
        clock.now_s += 0.02
        record(breaker, Outcome.FAILED)
        cool_s = min(30.0, cool_s * 2)
    clock.now_s += 30.0
    record(breaker, Outcome.GOOD, *[Outcome.FAILED] * 3)
    clock.now_s += 1.01
    assert breaker.would_allow(), "a success resets the wait"


def test_a_probe_without_verdict_may_be_repeated_at_once(breaker: Breaker, clock: Clock) -> None:
    record(breaker, *[Outcome.FAILED] * 3)
    clock.now_s += 1.01
    record(breaker, Outcome.NEUTRAL, Outcome.GOOD)
    assert is_in(breaker, BreakerState.CLOSED)


def test_late_outcomes_of_an_earlier_era_are_ignored(breaker: Breaker, clock: Clock) -> None:
    late = breaker.acquire()
    assert late is not None
    record(breaker, *[Outcome.FAILED] * 3)
    breaker.record(late, Outcome.GOOD)
    assert is_in(breaker, BreakerState.OPEN)
    clock.now_s += 1.01
    probe = breaker.acquire()
    assert probe is not None
    breaker.record(late, Outcome.GOOD)
    assert is_in(breaker, BreakerState.HALF_OPEN)


def test_one_line_per_change(breaker: Breaker, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    record(breaker, *[Outcome.FAILED] * 3)
    for _ in range(50):
        breaker.acquire()
    clock.now_s += 1.01
    record(breaker, Outcome.GOOD)
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 3
    assert "open" in lines[0] and "hits get shorter" in lines[0]
    assert "half-open" in lines[1] and "closed" in lines[2]
