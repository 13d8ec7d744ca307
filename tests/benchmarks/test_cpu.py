"""The rows of `bench cpu`, with engines and machines that answer at once: names, targets, counts and what is noted."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pagetier.benchmarks.cpu.bench import OWN_PARTS, PARTS, RIVAL_PARTS
from pagetier.benchmarks.cpu.comparison import (
    RIVALS,
    START,
    WORKLOADS,
    Generate,
    Rival,
    rows_not_measured,
    speed_rows,
    speeds,
)
from pagetier.benchmarks.cpu.invariance import FULL, Arrangement, prompts, steps
from pagetier.benchmarks.cpu.overhead import Crowd, plan_rows
from pagetier.benchmarks.cpu.past_runs import PastRuns
from pagetier.benchmarks.cpu.shares import held_batch
from pagetier.benchmarks.report import Report, Row
from pagetier.benchmarks.static_rows import StaticRows
from pagetier.benchmarks.workload import Request, Workload, decode, mixed

NOW = datetime.datetime(2026, 6, 30, tzinfo=datetime.UTC)


def test_mixed_requests_are_those_of_the_recipe() -> None:
    workload = mixed()
    assert sum(prompt for prompt, _ in workload.lengths) == 8_801
    assert workload.num_counted == 14_947
    assert len(workload.requests(0)) == 64


def test_prompts_repeat_by_seed_and_share_nothing() -> None:
    workload = decode(4, 8)
    assert workload.requests(1) == workload.requests(1) != workload.requests(2)
    assert len({tuple(request.prompt_ids[:3]) for request in workload.requests(1)}) == 4
    assert (workload.name, workload.num_counted) == ("decode_4", 32)
    assert Workload("x", ((7, 1), (5, 1)), counts_prompt=True).num_counted == 12


def side(seen: list[list[Request]], seconds: float) -> Generate:
    def generate(requests: Sequence[Request]) -> tuple[list[list[int]], float]:
        seen.append(list(requests))
        return [[1] * request.num_new for request in requests], seconds

    return generate


def test_both_sides_get_the_same_prompts_and_ours_over_theirs_is_the_ratio() -> None:
    ours: list[list[Request]] = []
    theirs: list[list[Request]] = []
    pairs = speeds(WORKLOADS[2], side(ours, 1.0), side(theirs, 2.0), 3)
    assert ours == theirs
    assert ours[0] != ours[1]
    ratio, speed = speed_rows(WORKLOADS[2], RIVALS[0], pairs, "a note")
    assert (ratio.name, ratio.value, ratio.target, ratio.runs) == ("decode_16_vs_vllm", 2.0, ">= 1.8", 3)
    assert (speed.name, speed.value, speed.unit) == ("decode_16_vllm", 16 * 128 / 2.0, "tok/s")


@pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.name)
def test_a_missing_rival_gives_its_rows_without_values(rival: Rival) -> None:
    rows = rows_not_measured(rival, tuple(rival.targets), "not installed")
    assert {row.name for row in rows} >= {f"{START}_vs_{rival.name}", f"decode_16_vs_{rival.name}"}
    assert all(row.value is None and not row.ok and row.note == "not installed" for row in rows)


def test_every_part_that_is_named_is_one_that_runs() -> None:
    assert set(PARTS) == {"own", *OWN_PARTS, *RIVAL_PARTS}
    for rival in RIVALS:
        assert RIVAL_PARTS[rival.name] == (rival, tuple(rival.targets))
    assert RIVAL_PARTS["vllm.mixed_64"] == (RIVALS[0], ("mixed_64",))


def report(days_ago: int, hardware: str, command: str, *rows: Row) -> Report:
    date = (NOW - datetime.timedelta(days=days_ago)).isoformat(timespec="seconds")
    return Report("cpu", "abc", date, hardware, command, rows)


def test_a_quick_run_takes_the_last_full_runs_peers(tmp_path: Path) -> None:
    full = "pagetier bench cpu --full"
    reports = [
        report(40, "CPU A, 2 cores, 24 GiB", full, Row("old", 1.0, "ratio")),
        report(20, "CPU A, 2 cores, 24 GiB", full, Row("x", 2.0, "ratio", note="vllm 1"), Row("y", 1.0, "s")),
        report(10, "CPU A, 2 cores, 24 GiB", full, Row("x", 1.5, "ratio", ">= 1.8"), Row("z", None, "s", note="gone")),
        report(5, "CPU B, 2 cores, 24 GiB", full, Row("x", 9.0, "ratio"), Row("b", 9.0, "ratio")),
        report(1, "CPU A, 2 cores, 24 GiB", "pagetier bench cpu --quick", Row("x", 8.0, "ratio")),
    ]  # fmt: skip
    for one in reports:
        path = one.append_csv(tmp_path)
    missing = [Row(name, None, "ratio", ">= 1.8", note="quick") for name in ("x", "y", "z", "b", "old")]
    rows = {row.name: row for row in PastRuns(path, "CPU A", NOW).rows(missing)}
    assert rows["x"].value == 1.5
    assert not rows["x"].ok
    assert rows["x"].note == "of the full run of 2026-06-20 at abc on CPU A, 2 cores, 24 GiB"
    assert (rows["y"].value, rows["y"].unit) == (1.0, "s")
    for name in ("z", "b", "old"):
        assert rows[name].value is None
        assert "no full run on CPU A" in rows[name].note


def test_without_results_a_quick_run_says_so(tmp_path: Path) -> None:
    (row,) = PastRuns(tmp_path / "cpu.csv", "CPU A", NOW).rows([Row("x", None, "s", note="quick")])
    assert row.value is None
    assert "--full" in row.note


def test_a_crowd_decodes_in_every_seat_with_the_others_waiting() -> None:
    crowd = Crowd(num_running=8, num_waiting=20)
    for _ in range(40):
        start_s = time.perf_counter()
        times = crowd.step()
        assert 0 < times.plan_commit_s + times.build_s <= time.perf_counter() - start_s
        crowd.core.check()
    assert (len(crowd.core.scheduler.queues.running), len(crowd.core.scheduler.queues.waiting)) == (8, 20)
    assert min(request.num_output_tokens for request in crowd.core.scheduler.queues.running) >= 40
    crowd.core.close()


def test_planning_is_judged_by_its_p99() -> None:
    planned, built = plan_rows(20, "a note", num_running=4, num_waiting=5)
    assert planned.name == "plan_commit_4_running_5_waiting"
    assert (planned.target, planned.unit, planned.runs, planned.value) == ("<= 5", "ms", 20, planned.p99)
    assert built.target is None


def test_a_held_batch_reads_its_whole_context() -> None:
    batch = held_batch(100, num_blocks=50, block_size=16)
    assert batch.block_tables[0].shape == (1, 7)
    assert len(set(batch.block_tables[0][0].tolist())) == 7
    assert (batch.positions[0], batch.seq_lens[0]) == (99, 100)
    assert batch.slot_mapping[0][0] == batch.block_tables[0][0, 6] * 16 + 3


@pytest.mark.parametrize("arrangement", FULL, ids=str)
def test_an_arrangement_computes_every_token_once(arrangement: Arrangement) -> None:
    static = StaticRows(2048, arrangement.block_size, np.random.default_rng(0))
    rows = [static.add(ids) for ids in prompts(40, 1000)]
    widest = most = 0
    for work in steps(rows, arrangement):
        widest, most = max(widest, len(work)), max(most, *(num_new for _, num_new in work))
        assert sum(num_new for _, num_new in work) <= 512
        static.batch(work)
    assert all(row.num_computed == len(row.token_ids) for row in rows)
    assert most <= arrangement.chunk
    assert widest > 1 or arrangement.rows == 1
