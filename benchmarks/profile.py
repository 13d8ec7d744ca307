"""`pagetier bench profile`: where the time of a decode step and of a prefill step goes.

Two threads share a step. The core thread polls, plans, makes the batch's arrays, hands them over, waits, commits; the
runner's thread waits for a batch, checks it, runs the kernels, samples. With two steps in flight the core's work hides
behind the kernels, so that the rows of the runner's thread add up to a step's wall time, and those of the core's thread
do so too. `value` is milliseconds a step, the mean; no row has a target. The last rows are the engine's own model of a
prefill's time, fitted to the kernels of these steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pagetier.benchmarks.pairing import wait_until_idle
from pagetier.benchmarks.plot import new_figure, require_matplotlib, save
from pagetier.benchmarks.report import Report, Row
from pagetier.benchmarks.rig import Rig, Setup, Weights, open_rig
from pagetier.benchmarks.workload import Workload, decode
from pagetier.engine.batch import Batch, StepResult
from pagetier.engine.device_pool import DevicePool
from pagetier.engine.models.compiled import CompiledModel
from pagetier.engine.plan import build_batch
from pagetier.engine.prefill_model import PrefillFit
from pagetier.engine.runner.model_runner import Launched, ModelRunner
from pagetier.kernels.cpu.library import OpKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

CORE_PARTS = ("poll", "plan", "build_batch", "launch", "wait", "commit", "outside")
RUNNER_PARTS = ("idle", "checks", *(f"kernel_{kind.name.lower()}" for kind in OpKind), "call", "sampling")
PREFILL_STEPS = Workload("prefill_512", ((8 * 512, 1),), counts_prompt=True)  # eight steps of the default budget


@dataclass(slots=True)
class Clock:
    """Seconds by part since `reset`. Each part belongs to one thread: no two add to the same."""

    seconds: dict[str, float] = field(default_factory=dict)
    num_steps: int = 0

    def reset(self) -> None:
        self.seconds = dict.fromkeys((*CORE_PARTS, *RUNNER_PARTS), 0.0)
        self.num_steps = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start_s


class TimedRunner(ModelRunner):
    """A runner whose thread keeps `clock`. Times of a batch count once it is done."""

    def __init__(self, model: CompiledModel, pool: DevicePool, clock: Clock) -> None:
        self._clock = clock
        self._timed_model = _TimedModel(model)
        self._ended_s = time.perf_counter()
        super().__init__(self._timed_model, pool, threaded=True)

    def _outcome(self, launched: Launched) -> StepResult | BaseException:
        start_s, idle_since_s = time.perf_counter(), self._ended_s
        outcome = super()._outcome(launched)
        self._ended_s = end_s = time.perf_counter()
        seconds, model = self._clock.seconds, self._timed_model
        seconds["idle"] += start_s - idle_since_s
        seconds["checks"] += model.start_s - start_s
        seconds["call"] += model.end_s - model.start_s - float(model.kernels.sum()) / 1e9
        seconds["sampling"] += end_s - model.end_s
        for kind in OpKind:
            seconds[f"kernel_{kind.name.lower()}"] += float(model.kernels[kind]) / 1e9
        return outcome


class _TimedModel:
    """The model, with the times of its last forward. Called from the runner's thread alone."""

    def __init__(self, model: CompiledModel) -> None:
        self.config, self.device, self.numerics, self.close = model.config, model.device, model.numerics, model.close
        self.prefill_s, self.prepare = model.prefill_s, model.prepare
        self.is_batch_invariant = model.is_batch_invariant
        self.core_sampler = model.core_sampler
        self._model = model
        self.start_s = self.end_s = 0.0
        self.kernels = np.zeros_like(model.counters)

    def forward(self, token_ids: Tensor, batch: Batch, pool: Tensor) -> Tensor:
        before = self._model.counters.copy()
        self.start_s = time.perf_counter()
        logits = self._model.forward(token_ids, batch, pool)
        self.end_s = time.perf_counter()
        self.kernels = self._model.counters - before
        return logits


def run(full: bool, say: Callable[[str], None]) -> list[Row]:
    """Quick: 48 decode steps at 1, 16 and 32 rows, and eight prefill steps. Full: 256, and four times the prefill."""
    note = wait_until_idle(300.0 if full else 0.0) or f"load {os.getloadavg()[0]:.1f} before the run"
    clock = Clock()
    clock.reset()
    setup = Setup(make_runner=lambda model, pool: TimedRunner(model, pool, clock))
    rows: list[Row] = []
    with open_rig(Weights.load("bfloat16"), setup) as rig:
        steps_of(rig, decode(4, 8), clock, 4)  # warm
        for batch in (1, 16, 32):
            say(f"decode, {batch} rows")
            wanted = 256 if full else 48
            steps_of(rig, decode(batch, wanted + 8), clock, wanted)
            rows += part_rows(f"decode_{batch}", clock, note)
        say("prefill, 512 tokens a step")
        total: dict[str, float] = {}
        for _ in range(4 if full else 1):
            steps_of(rig, PREFILL_STEPS, clock, 6)
            total = {name: total.get(name, 0.0) + value for name, value in clock.seconds.items()}
        clock.seconds, clock.num_steps = total, clock.num_steps * (4 if full else 1)
        rows += part_rows("prefill_512", clock, note)
        rows += fit_rows(rig.model.prefill_model.fit)
    return rows


def fit_rows(fit: PrefillFit | None) -> list[Row]:
    """Seconds(n new tokens after c) = step + n * token + n (c + n / 2) * pair."""
    assert fit is not None, "nothing was prefilled"
    return [
        Row("prefill_model_fixed", 1e3 * fit.per_step_s, "ms"),
        Row("prefill_model_1000_tokens", 1e6 * fit.per_token_s, "ms"),
        Row("prefill_model_million_pairs", 1e9 * fit.per_pair_s, "ms", note="of a new token and one it attends to"),
    ]


def steps_of(rig: Rig, workload: Workload, clock: Clock, num_steps: int) -> None:
    """Run the workload and leave `num_steps` steps on the clock, taken in its middle: neither the first two, while the
    pipeline fills, nor the last."""
    outputs = rig.add(workload.requests(seed=1))
    waits_for_tokens = not workload.counts_prompt
    for _ in range(2):
        step(rig, clock, outputs)
    while waits_for_tokens and min(map(len, outputs.values())) < 2:
        step(rig, clock, outputs)
    clock.reset()
    start_s = time.perf_counter()
    for _ in range(num_steps):
        step(rig, clock, outputs)
    elapsed_s, kept, clock.num_steps = time.perf_counter() - start_s, dict(clock.seconds), num_steps
    while rig.core.has_work():
        step(rig, clock, outputs)
    clock.seconds = kept
    clock.seconds["outside"] = elapsed_s - sum(kept[name] for name in CORE_PARTS)


def step(rig: Rig, clock: Clock, outputs: dict[str, list[int]]) -> None:
    """`EngineCore.step` with a clock between its parts."""
    scheduler, runner, config = rig.core.scheduler, rig.runner, rig.core.config
    with clock.part("poll"):
        scheduler.poll_transfers()
    with clock.part("plan"):
        plan = scheduler.plan()
    if plan is not None:
        with clock.part("build_batch"):
            batch = build_batch(plan, config.block_size, 1)
        with clock.part("launch"):
            runner.launch(batch)
    launched = scheduler.launched
    if launched and (plan is None or len(launched) >= config.pipeline_depth):
        with clock.part("wait"):
            result = runner.collect()
        with clock.part("commit"):
            for output in scheduler.commit(launched[0], result):
                outputs[output.request_id] += output.token_ids


def part_rows(name: str, clock: Clock, note: str) -> list[Row]:
    """Milliseconds a step, by thread and part; parts that took none are left out."""
    per_step = {part: 1e3 * value / clock.num_steps for part, value in clock.seconds.items()}
    rows = [
        Row(f"{name}_{thread}_{part}", per_step[part], "ms", runs=clock.num_steps)
        for thread, parts in (("core", CORE_PARTS), ("runner", RUNNER_PARTS))
        for part in parts
        if per_step[part] > 0
    ]
    total = sum(per_step[part] for part in CORE_PARTS)
    return [Row(f"{name}_step", total, "ms", runs=clock.num_steps, note=note), *rows]


def draw(report: Report, folder: Path) -> Path:
    """`folder`/profile.png: for each kind of step its share by part, a bar for each thread."""
    require_matplotlib()
    from matplotlib import colormaps

    values = {row.name: row.value or 0.0 for row in report.rows}
    kinds = [row.name.removesuffix("_step") for row in report.rows if row.name.endswith("_step")]
    picture = new_figure(report, 1.5 + 0.8 * len(kinds))
    axes = picture.subplots()
    places: list[tuple[str, str, Sequence[str]]] = [
        (kind, thread, parts) for kind in kinds for thread, parts in (("core", CORE_PARTS), ("runner", RUNNER_PARTS))
    ]
    labelled: set[str] = set()
    colours = colormaps["tab20"]
    for place, (kind, thread, parts) in enumerate(places):
        left = 0.0
        for index, part in enumerate(parts):
            width = values.get(f"{kind}_{thread}_{part}", 0.0) / max(values[f"{kind}_step"], 1e-9)
            colour = colours(index if thread == "core" else len(CORE_PARTS) + index)
            label = f"{thread} {part}" if width > 0.01 and f"{thread} {part}" not in labelled else None
            labelled |= {label} if label else set()
            hatch = "//" if thread == "core" else None
            axes.barh(place, width, left=left, color=colour, hatch=hatch, edgecolor="white", label=label)
            left += width
    axes.set_yticks(range(len(places)), [f"{kind} {thread}" for kind, thread, _ in places], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("share of a step's wall time", fontsize=8)
    axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    return save(picture, report, folder)
