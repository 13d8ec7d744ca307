"""The rows of `pagetier bench preemption`, at sizes that say nothing about speed."""

from __future__ import annotations

import pytest

from pagetier.benchmarks import preemption


@pytest.mark.parametrize("policy", preemption.POLICIES)
def test_planning_is_timed_under_every_policy(policy: str) -> None:
    row = preemption.planning_row(policy, 3, "a note")
    assert row.name == f"plan_10000_waiting_{policy}" and row.note == "a note"
    assert row.value is not None and row.value > 0 and row.runs == 3


@pytest.mark.slow
def test_modes_are_compared_on_the_default_model() -> None:
    rows = {row.name: row for row in preemption.mode_rows(0.5, 1, 3, "")}
    assert {f"pool_50_{mode}" for mode in ("recompute", "swap", "hybrid")} < rows.keys()
    assert all(row.value is not None and row.value > 0 for row in rows.values())


@pytest.mark.slow
def test_an_urgent_request_is_timed() -> None:
    row = preemption.urgent_row(1, "")
    assert row.value is not None and row.value > 0
