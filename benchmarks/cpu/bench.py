"""`pagetier bench cpu`: all rows, in an order that lets the rows that matter most run before a quick run's time ends.

The default model in bf16 throughout. Our side is the engine as `serve` runs it, by its parts, in this process.
"""

from __future__ import annotations

import datetime
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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

__all__ = ("PARTS", "draw", "run", "run_part")  # what `pagetier bench` asks a benchmark for
OWN = "own"


@dataclass(frozen=True, slots=True)
class Measuring:
    """What rows are measured with. Full: five measurements a row, else one to three. note: how idle the machine was."""

    rig: Rig
    limits: Limits
    full: bool
    note: str
    say: Callable[[str], None]

    @property
    def num_pairs(self) -> int:
        return 5 if self.full else 3


def run(full: bool, say: Callable[[str], None]) -> Iterator[Row]:
    """Quick: one to three measurements a row, peers of the last full run. Full: five, peers beside us."""
    return _run((OWN, *(rival.name for rival in RIVALS)), full, say)


def run_part(part: str, full: bool, say: Callable[[str], None]) -> Iterator[Row]:
    """Our own rows alone or some of them, or those against one peer, or one workload's."""
    return _run((part,), full, say)


def _run(parts: Sequence[str], full: bool, say: Callable[[str], None]) -> Iterator[Row]:
    note = wait_until_idle(30.0 if full else 0.0) or f"load {os.getloadavg()[0]:.1f} before the run"
    try:
        limits = Limits(LimitsProgram(kernels_dir()), len(os.sched_getaffinity(0)))
        with open_rig(Weights.load(DTYPE)) as rig:
            rig.generate(WORKLOADS[2].requests(seed=0)[:4])  # warm
            measuring = Measuring(rig, limits, full, note, say)
            for part in parts:
                yield from part_rows(part, measuring)
    except (BuildError, UnsupportedError, LimitsError) as error:
        raise ConfigError(f"this benchmark is of the compiled CPU core: {error}") from error


def part_rows(part: str, measuring: Measuring) -> Iterator[Row]:
    """The rows of one of `PARTS`, each as soon as it is measured."""
    if part == OWN:
        for name in OWN_PARTS:
            yield from part_rows(name, measuring)
    elif part in OWN_PARTS:
        measuring.say(part.removeprefix(f"{OWN}."))
        yield from OWN_PARTS[part](measuring)
    else:
        yield from peer_rows(*RIVAL_PARTS[part], measuring)


def share_rows(measuring: Measuring) -> Iterator[Row]:
    """Of the machine's limits, but for attention."""
    rig, limits, note = measuring.rig, measuring.limits, measuring.note
    yield from decode_rows(rig, limits, measuring.num_pairs, 128 if measuring.full else 48, note)
    yield gemm_row(rig, limits, measuring.num_pairs, note)


def overhead_rows(measuring: Measuring) -> Iterator[Row]:
    """Of what is not arithmetic."""
    full, note = measuring.full, measuring.note
    yield from plan_rows(300 if full else 150, note)
    yield non_kernel_row(measuring.rig, 128 if full else 48, note)
    yield memory_row(measuring.rig.weights, note)
    yield start_row(5 if full else 2, note)


def neighbour_rows(measuring: Measuring) -> Iterator[Row]:
    full = measuring.full
    yield neighbours_row(measuring.rig, measuring.num_pairs if full else 2, 400 if full else 150, measuring.note)


def invariance_rows(measuring: Measuring) -> Iterator[Row]:
    full, note = measuring.full, measuring.note
    yield invariance_row(measuring.rig.weights, 64 if full else 24, FULL if full else QUICK, note)
    if full:
        yield invariance_row(Weights.load("float32"), 64, FULL, note)


def speed_rows(measuring: Measuring) -> Iterator[Row]:
    """Our tokens per second of each workload."""
    for workload in WORKLOADS:
        runs = 5 if measuring.full else 1
        speeds = [workload.num_counted / measuring.rig.generate(workload.requests(seed))[1] for seed in range(runs)]
        name, middle = f"{workload.name}_pagetier", statistics.median(speeds)
        yield Row(name, middle, "tok/s", None, middle, percentile(speeds, 0.01), runs, measuring.note)


def start_row(runs: int, note: str) -> Row:
    name = f"{START}_pagetier"
    try:
        seconds = [first_token_s(DTYPE) for _ in range(runs)]
    except ChildError as error:
        return Row(name, None, "s", note=str(error))
    return Row(name, statistics.median(seconds), "s", runs=runs, note=note)


def peer_rows(rival: Rival, workloads: Sequence[str], measuring: Measuring) -> Iterator[Row]:
    """Measured in a full run; in a quick one those of the last full run on this CPU model."""
    if measuring.full:
        return compare(rival, workloads, measuring.rig, measuring.num_pairs, measuring.note, measuring.say)
    missing = rows_not_measured(rival, workloads, "not in a quick run")
    return iter(past_rows(results_folder() / "cpu.csv").rows(missing))


def past_rows(path: Path) -> PastRuns:
    return PastRuns(path, cpu_model(), datetime.datetime.now(datetime.UTC))


OWN_PARTS: dict[str, Callable[[Measuring], Iterator[Row]]] = {
    f"{OWN}.speeds": speed_rows,
    f"{OWN}.shares": share_rows,
    f"{OWN}.attention": lambda m: attention_rows(m.rig.weights, m.limits, m.num_pairs, m.note),
    f"{OWN}.overhead": overhead_rows,
    f"{OWN}.neighbours": neighbour_rows,
    f"{OWN}.invariance": invariance_rows,
}
RIVAL_PARTS = {rival.name: (rival, tuple(rival.targets)) for rival in RIVALS} | {
    f"{rival.name}.{workload}": (rival, (workload,)) for rival in RIVALS for workload in rival.targets
}
PARTS = (OWN, *OWN_PARTS, *RIVAL_PARTS)
