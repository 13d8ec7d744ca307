"""The rows of `pagetier bench preemption`, at sizes that say nothing about speed."""

from __future__ import annotations

import random

import pytest

from pagetier.benchmarks.preemption.baselines import oracle, power_of_two, reserving, static_batches, window_batches
from pagetier.benchmarks.preemption.batching import batching_rows
from pagetier.benchmarks.preemption.choices import choice_rows
from pagetier.benchmarks.preemption.memory import ALLOCATIONS, engine
from pagetier.benchmarks.preemption.modes import LINKS, link_row, mode_rows
from pagetier.benchmarks.preemption.planning import POLICIES, planning_row, urgent_row
from pagetier.benchmarks.preemption.pressure import play, urgent
from pagetier.benchmarks.preemption.reuse import WORKLOADS, hits, optimal_hits
from pagetier.benchmarks.preemption.virtual import (
    NOMINAL,
    Arrival,
    VirtualEngine,
    chat_lengths,
    chats,
    random_ids,
    serve,
)
from pagetier.engine.config import PREEMPTION_MODES, EngineConfig


@pytest.mark.parametrize("policy", POLICIES)
def test_planning_is_timed_under_every_policy(policy: str) -> None:
    row = planning_row(policy, 3, "a note")
    assert row.name == f"plan_10000_waiting_{policy}" and row.note.endswith("; a note")
    assert row.value is not None and row.value > 0 and row.runs == 3


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_every_allocation_serves_all_and_pages_are_full(allocation: str) -> None:
    served = serve(engine(NOMINAL, allocation), chats(24, None, seed=1))
    assert len(served.per_token_s) == 24 and 0 < served.filled_share <= 1
    assert allocation != "paged" or served.filled_share > 0.85, "all but last blocks and prompts under way"


def test_reservations_are_contiguous_and_given_back() -> None:
    config = EngineConfig(
        num_blocks=64,
        max_model_len=512,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
        pipeline_depth=1,
    )
    rig = VirtualEngine(config, NOMINAL, reserving(oracle))
    draw = random.Random(0)
    for i in range(7):
        rig.add(str(i), Arrival(0.0, random_ids(draw, 100), 60))
    rig.core.step()
    tables = [request.block_ids for request in rig.core.scheduler.queues.running]
    assert len(tables) == 6, "ten blocks each: the seventh waits"
    assert all(table == list(range(table[0], table[0] + 10)) for table in tables)
    while rig.core.has_work():
        rig.core.step()
        rig.core.check()
    assert rig.core.scheduler.pool.num_referenced == 0
    rig.core.close()


def test_power_of_two_knows_the_output_to_a_factor_of_two() -> None:
    rig = VirtualEngine(EngineConfig(num_blocks=64, max_model_len=512), NOMINAL)
    for num_new in (1, 2, 3, 60, 64, 65):
        rig.add(str(num_new), Arrival(0.0, (100,) * 10, num_new))
        request = rig.core.scheduler._requests[str(num_new)]
        assert num_new <= power_of_two(request) - 10 < 2 * num_new
    rig.core.close()


def test_batches_begin_when_they_are_due() -> None:
    static, window = static_batches(4), window_batches(4, 1.0)
    assert static([0.0] * 6, 0.0, False) == 0 and static([0.0] * 6, 0.0, True) == 4
    assert window([0.0] * 3, 0.5, True) == 0 and window([0.0] * 3, 1.0, True) == 3 and window([0.0] * 5, 0.0, True) == 4


def test_batching_rows_have_values() -> None:
    rows = list(batching_rows(NOMINAL, 24, ""))
    assert all(row.value is not None and row.value > 0 for row in rows)


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_order_hits_more_than_an_unbounded_cache(name: str) -> None:
    prompts = WORKLOADS[name](random.Random(7), 1)
    best = optimal_hits(prompts)
    assert 0 < hits(NOMINAL, prompts, "lpm") <= best + 16 * len(prompts)


def test_optimal_hits_are_counted_by_hand() -> None:
    assert optimal_hits([(1, 2, 3), (1, 2, 3), (1, 2, 4), (5,)]) == 2 + 2


def test_choices_share_their_prompt() -> None:
    rows = {row.name: row for row in choice_rows(4, "")}
    assert all(row.value is not None and 0 < row.value < 2 for row in rows.values())


def test_lengths_have_the_papers_means() -> None:
    for count in (64, 500):
        prompts, outputs = zip(*chat_lengths(count, 3), strict=True)
        assert abs(sum(prompts) / count - 161) < 5 and abs(sum(outputs) / count - 338) < 7


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_a_slow_link_is_left_alone_and_a_quick_one_used(mode: str) -> None:
    """Urgent requests in a small pool: `hybrid` does what is quicker, over either link."""
    arrivals = urgent(NOMINAL, 6)
    for bytes_per_s in (5e6, 5e9):
        found = play(NOMINAL, arrivals, mode, 0.4, bytes_per_s).outcome
        if mode != "recompute":
            assert found.recomputes + found.swaps > 0
        if mode == "hybrid":
            assert (found.swaps > 0) == (bytes_per_s == 5e9), found.how


@pytest.mark.slow
def test_modes_are_compared_on_the_default_model() -> None:
    rows = {row.name: row for row in [*mode_rows(0.5, 1, ""), link_row(LINKS[0], "")]}
    assert {f"w5_pool_50_{mode}" for mode in ("recompute", "swap", "hybrid")} < rows.keys()
    assert all(row.value is not None and row.value > 0 for row in rows.values())


@pytest.mark.slow
def test_an_urgent_request_is_timed() -> None:
    row = urgent_row(1, "")
    assert row.value is not None and row.value > 0
