"""Paired measurement: order, ratio, percentile, and the wait for an idle machine."""

from __future__ import annotations

import statistics
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetier.benchmarks.pairing import busy_share, measure_pairs, percentile, wait_until_idle


def test_sides_alternate() -> None:
    order: list[str] = []
    ticks = count(1)

    def side(name: str) -> float:
        order.append(name)
        return float(next(ticks))

    pairs = measure_pairs(lambda: side("a"), lambda: side("b"), 3)
    assert "".join(order) == "ababab"
    assert pairs.ours == (1.0, 3.0, 5.0)
    assert pairs.theirs == (2.0, 4.0, 6.0)


def test_ratio_is_the_median_of_neighbours_and_survives_a_drift() -> None:
    weather = iter([1.0, 1.0, 0.1, 0.1, 0.5, 0.5])  # the machine slows down tenfold in the middle pair
    pairs = measure_pairs(lambda: 20 * next(weather), lambda: 10 * next(weather), 3)
    assert pairs.ratio == pytest.approx(2.0)


def test_pairs_that_take_too_long_are_fewer_but_never_none() -> None:
    assert len(measure_pairs(lambda: 1.0, lambda: 1.0, 3, max_s=60.0).ours) == 3
    assert len(measure_pairs(lambda: 1.0, lambda: 1.0, 3, max_s=0.0).ours) == 1


def test_no_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="num_pairs"):
        measure_pairs(lambda: 1.0, lambda: 1.0, 0)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=200), st.integers(0, 100))
def test_percentile_is_the_nearest_rank(values: list[float], percent: int) -> None:
    found = percentile(values, percent / 100)
    at_most = sum(value <= found for value in values)
    below = sum(value < found for value in values)
    assert found in values
    assert 100 * at_most >= percent * len(values)
    assert percent == 0 or 100 * below < percent * len(values)


@given(st.lists(st.integers(), min_size=1).filter(lambda values: len(values) % 2 == 1))
def test_half_is_the_median(values: list[int]) -> None:
    assert percentile(values, 0.5) == statistics.median(values)


def test_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_idle_machine_is_not_waited_for() -> None:
    assert wait_until_idle(0.0, probe=lambda: 0.01) == ""


def test_busy_machine_is_waited_for_then_named() -> None:
    shares = iter([0.9, 0.8, 0.0])
    assert wait_until_idle(60.0, probe=lambda: next(shares)) == ""
    assert "not idle: 70%" in wait_until_idle(0.0, probe=lambda: 0.7)


def test_busy_share_is_a_share() -> None:
    assert 0.0 <= busy_share(0.05) <= 1.0
