"""Pictures of every benchmark that has an own one, and of one that has none, from whatever rows there are."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagetier.benchmarks.cli import BENCHES
from pagetier.benchmarks.cpu.comparison import RIVALS
from pagetier.benchmarks.cpu.picture import TASKS
from pagetier.benchmarks.policies.caches import CACHES
from pagetier.benchmarks.policies.traces import TRACES
from pagetier.benchmarks.preemption.choices import COUNTS
from pagetier.benchmarks.preemption.memory import ALLOCATIONS
from pagetier.benchmarks.preemption.planning import POLICIES
from pagetier.benchmarks.preemption.reuse import WORKLOADS
from pagetier.benchmarks.report import Report, Row
from pagetier.engine.config import PREEMPTION_MODES

pytest.importorskip("matplotlib", reason="the bench extra is not installed")


def cpu_rows() -> Iterator[Row]:
    for rival in RIVALS:
        for task in TASKS:
            yield Row(f"{task}_vs_{rival.name}", 1.5, "ratio", rival.targets.get(task))
            yield Row(f"{task}_{rival.name}", 300.0, "tok/s")
    yield Row("decode_1_vs_weight_read", 0.7, "ratio", ">= 0.80")
    yield Row("memory_beyond_weights_and_pool", 340.0, "MiB", "<= 500")
    yield Row("batch_invariance_bfloat16", 0.0, "rows", "== 0")


def preemption_rows() -> Iterator[Row]:
    for allocation in ALLOCATIONS:
        yield Row(f"w1_filled_share_{allocation}", 0.5, "ratio", ">= 0.96" if allocation == "paged" else None)
        yield Row(f"w1_requests_per_s_{allocation}", 3.0, "1/s")
    yield Row("w1_rate_vs_contiguous_max", 1.8, "ratio", ">= 2")
    for other in ("static", "window", "static_real"):
        yield Row(f"w2_iteration_vs_{other}", 3.0, "ratio", ">= 2")
    for workload in WORKLOADS:
        for policy in ("lpm", "fcfs"):
            yield Row(f"w3_{workload}_hits_vs_optimal_{policy}", 0.97, "ratio", ">= 0.96")
    for name in ("w5_crowd_30", "w5_crowd_40", "w5_urgent_40", "w5_chats_60", "w5_pool_40"):
        for mode in PREEMPTION_MODES:
            yield Row(f"{name}_{mode}", 100.0, "tok/s")
        yield Row(f"{name}_hybrid_vs_recompute", 1.0, "ratio", ">= 1.3")
        yield Row(f"{name}_hybrid_vs_better", 1.0, "ratio", ">= 0.9")
    for link in ("w5_urgent_link_25gb", "w5_link_25gb", "w5_link_third_of_break_even"):
        yield Row(f"{link}_hybrid_vs_recompute", 1.1, "ratio", ">= 0.9")
    for n in COUNTS:
        yield Row(f"w6_blocks_saved_n{n}", 0.2, "ratio", ">= 0.163")
    for policy in POLICIES:
        yield Row(f"plan_10000_waiting_{policy}", 11.0, "ms", "<= 10")
    yield Row("urgent_ttft_full_vs_idle", 1.3, "ratio", "<= 2")


def tiers_rows() -> Iterator[Row]:
    for name in ("nvme_write", "redis_put", "host_read"):
        yield Row(f"{name}_vs_limit_2MiB", 0.7, "ratio", ">= 0.80")
        yield Row(f"{name}_pagetier_2MiB", 0.7, "GB/s")
        yield Row(f"{name}_limit_2MiB", 1.0, "GB/s")
    yield Row("put_vs_lmcache_fs", 2.0, "ratio", "> 1")
    yield Row("put_pagetier_fs", 2.0, "GB/s")
    yield Row("put_lmcache_fs", 1.0, "GB/s")


def restart_rows() -> Iterator[Row]:
    for case in ("restart_nvme_8000", "restart_redis_8000"):
        yield Row(f"{case}_vs_bytes", 1.4, "ratio", "<= 1.3")
        yield Row(f"{case}_first_token", 0.3, "s")
        yield Row(f"{case}_recompute", 9.0, "s")


def policies_rows() -> Iterator[Row]:
    for trace in TRACES:
        for name in (*CACHES, "all"):
            yield Row(f"{trace}_{name}", 0.5, "share")


def service_rows() -> Iterator[Row]:
    yield Row("shared_vs_in_process_host", 0.6, "ratio", ">= 0.70")
    yield Row("shared_load_host", 5.0, "GB/s")
    yield Row("crowd_wrong_blocks", 0.0, "blocks", "== 0")


ROWS = {
    "cpu": cpu_rows,
    "policies": policies_rows,
    "preemption": preemption_rows,
    "restart": restart_rows,
    "service": service_rows,  # by unit, as whatever has no picture of its own
    "tiers": tiers_rows,
}


def report(name: str, *rows: Row) -> Report:
    return Report(name, "abc", "2026-01-01T00:00:00+00:00", "a machine", f"pagetier bench {name}", rows)


@pytest.mark.parametrize("missing", ["nothing", "all", "even", "odd", "values"])
@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_picture_is_drawn_from_whatever_rows_there_are(name: str, missing: str, tmp_path: Path) -> None:
    rows = tuple(ROWS[name]())
    unmeasured = tuple(Row(row.name, None, row.unit, row.target, note="no disk") for row in rows)
    left = {"nothing": rows, "all": (), "even": rows[1::2], "odd": rows[::2], "values": unmeasured}[missing]
    path = BENCHES[name].draw(report(name, *left), tmp_path)
    assert path.name == f"{name}.png" and path.read_bytes().startswith(b"\x89PNG")


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    rows = tuple(restart_rows())
    first, again = (BENCHES["restart"].draw(report("restart", *rows), tmp_path / side) for side in "ab")
    assert first.read_bytes() == again.read_bytes()


def test_every_picture_of_its_own_is_tried_here() -> None:
    own = {name for name, bench in BENCHES.items() if hasattr(importlib.import_module(bench.module), "draw")}
    assert own - {"profile"} <= set(ROWS), "profile is drawn in test_rig.py, from steps that it has timed"
