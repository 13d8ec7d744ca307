"""`pagetier bench cpu`: all rows, in an order that lets the rows that matter most run before a quick run's time ends.

The default model in bf16 throughout. Our side is the engine as `serve` runs it, by its parts, in this process.
"""

from __future__ import annotations

import datetime
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from pagetier.benchmarks.cpu.child import ChildError, first_token_s
from pagetier.benchmarks.cpu.comparison import RIVALS, START, WORKLOADS, Rival, compare, rows_not_measured
from pagetier.benchmarks.cpu.invariance import FULL, QUICK, invariance_row
from pagetier.benchmarks.cpu.neighbours import neighbours_row
from pagetier.benchmarks.cpu.overhead import memory_row, non_kernel_row, plan_rows
from pagetier.benchmarks.cpu.past_runs import PastRuns
from pagetier.benchmarks.cpu.picture import draw
from pagetier.benchmarks.cpu.shares import Limits, attention_rows, decode_rows, gemm_row
from pagetier.benchmarks.limits.program import LimitsError, LimitsProgram
from pagetier.benchmarks.pairing import percentile, wait_until_idle
from pagetier.benchmarks.report import Row, cpu_model, results_folder
from pagetier.benchmarks.rig import Rig, Weights, open_rig
from pagetier.engine.models.compiled import UnsupportedError
from pagetier.kernels.cpu.build import BuildError
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.places import kernels_dir

DTYPE = "bfloat16"

OWN = "own"
PARTS = (OWN, *(rival.name for rival in RIVALS))

__all__ = ("PARTS", "draw", "run", "run_part")  # what `pagetier bench` asks a benchmark for


def run(full: bool, say: Callable[[str], None]) -> list[Row]:
    """Quick: one to three measurements a row, peers of the last full run. Full: five, peers beside us."""
    return _run(PARTS, full, say)


def run_part(part: str, full: bool, say: Callable[[str], None]) -> list[Row]:
    """Our own rows alone, or those against one peer."""
    return _run((part,), full, say)


def _run(parts: Sequence[str], full: bool, say: Callable[[str], None]) -> list[Row]:
    note = wait_until_idle(600.0 if full else 0.0) or f"load {os.getloadavg()[0]:.1f} before the run"
    try:
        limits = Limits(LimitsProgram(kernels_dir()), len(os.sched_getaffinity(0)))
        weights = Weights.load(DTYPE)
        with open_rig(weights) as rig:
            rows = own_rows(rig, limits, full, note, say) if OWN in parts else []
            rows += peer_rows(rig, [rival for rival in RIVALS if rival.name in parts], full, note, say)
    except (BuildError, UnsupportedError, LimitsError) as error:
        raise ConfigError(f"this benchmark is of the compiled CPU core: {error}") from error
    return rows


def own_rows(rig: Rig, limits: Limits, full: bool, note: str, say: Callable[[str], None]) -> list[Row]:
    """All rows that need no peer."""
    num_pairs, num_new = (5, 128) if full else (3, 48)
    rig.generate(WORKLOADS[2].requests(seed=0)[:4])  # warm
    say("speeds, and shares of the machine's limits")
    rows = speed_rows(rig, full, note)
    rows += decode_rows(rig, limits, num_pairs, num_new, note)
    rows.append(gemm_row(rig, limits, num_pairs, note))
    rows += attention_rows(rig.weights, limits, num_pairs, note)
    say("plan and commit, gaps between kernels, memory, start, neighbours")
    rows += plan_rows(300 if full else 150, note)
    rows.append(non_kernel_row(rig, 128 if full else 48, note))
    rows.append(memory_row(rig.weights, note))
    rows.append(start_row(5 if full else 2, note))
    rows.append(neighbours_row(rig, num_pairs if full else 2, 400 if full else 150, note))
    say("batch invariance")
    rows.append(invariance_row(rig.weights, 64 if full else 24, FULL if full else QUICK, note))
    if full:
        rows.append(invariance_row(Weights.load("float32"), 64, FULL, note))
    return rows


def speed_rows(rig: Rig, full: bool, note: str) -> list[Row]:
    """Our tokens per second of each workload."""
    rows = []
    for workload in WORKLOADS:
        runs = 5 if full else 1
        speeds = [workload.num_counted / rig.generate(workload.requests(seed))[1] for seed in range(runs)]
        name, middle = f"{workload.name}_pagetier", statistics.median(speeds)
        rows.append(Row(name, middle, "tok/s", None, middle, percentile(speeds, 0.01), runs, note))
    return rows


def start_row(runs: int, note: str) -> Row:
    name = f"{START}_pagetier"
    try:
        seconds = [first_token_s(DTYPE) for _ in range(runs)]
    except ChildError as error:
        return Row(name, None, "s", note=str(error))
    return Row(name, statistics.median(seconds), "s", runs=runs, note=note)


def peer_rows(rig: Rig, rivals: list[Rival], full: bool, note: str, say: Callable[[str], None]) -> list[Row]:
    """Measured in a full run; in a quick one those of the last full run on this CPU model."""
    if full:
        return [row for rival in rivals for row in compare(rival, rig, 5, note, say)]
    missing = [row for rival in rivals for row in rows_not_measured(rival, "not in a quick run")]
    return past_rows(results_folder() / "cpu.csv").rows(missing)


def past_rows(path: Path) -> PastRuns:
    return PastRuns(path, cpu_model(), datetime.datetime.now(datetime.UTC))
