"""The picture of `bench cpu`: how many times as fast as each peer, and the machine's limits and other bounds beside
their targets.

Against peers the ratios of pairs taken in turn are drawn, not the two speeds: recorded speeds may be of several days
and machines, which say nothing of each other.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pagetier.benchmarks.cpu.comparison import RIVALS, START, WORKLOADS
from pagetier.benchmarks.plot import (
    MET,
    MISSED,
    SERIES,
    bound_of,
    clear_axes,
    new_figure,
    number,
    save,
    write_above,
    write_below,
)
from pagetier.benchmarks.report import Report, Row, Target

TASKS = (*(workload.name for workload in WORKLOADS), START)
LABELS = {
    "prefill_2000": "prefill,\n2,000 tokens",
    "decode_1": "decode,\nbatch 1",
    "decode_16": "decode,\nbatch 16",
    "mixed_64": "64 mixed\nrequests",
    START: "start to\nfirst token",
}


def draw(report: Report, folder: Path) -> Path:
    """`folder`/cpu.png. Rows without a value are left out."""
    against = {f"{task}_vs_{rival.name}" for task in TASKS for rival in RIVALS}
    others = [row for row in report.rows if row.name not in against and margin(row) is not None]
    picture = new_figure(report, 4.4 + 0.26 * len(others))
    above, below = picture.subfigures(2, 1, height_ratios=(3.4, 0.8 + 0.26 * len(others)))
    _draw_peers(above.subplots(), report)
    machines = ", ".join(dict.fromkeys(short_machine(report.machine(row.name)) for row in others))
    _draw_margins(below.subplots(), others, machines)
    return save(picture, report, folder)


def _draw_peers(axes: Any, report: Report) -> None:
    clear_axes(axes, "times as fast as each peer (black: target)")
    rows = {row.name: row for row in report.rows if row.value}
    for index, rival in enumerate(RIVALS):
        known = {place: f"{task}_vs_{rival.name}" for place, task in enumerate(TASKS)}
        known = {place: name for place, name in known.items() if name in rows}
        if not known:
            continue
        places = [place + 0.27 * (index - 1) for place in known]
        speeds = [_times_as_fast(name, rows[name].value or math.nan) for name in known.values()]
        machines = dict.fromkeys(short_machine(report.machine(name)) for name in known.values())
        label = f"{rival.name} ({', '.join(machines)})"
        axes.bar(places, [speed - 1 for speed in speeds], 0.25, bottom=1, color=SERIES[index], label=label)
        for at, speed, name in zip(places, speeds, known.values(), strict=True):
            bound = _times_as_fast(name, bound_of(rows[name]) or math.nan)
            axes.plot([at - 0.125, at + 0.125], [bound] * 2, color="black")
            write = write_above if speed < 1 else write_below  # at the line of 1, where no target is in the way
            write(axes, at, 1.0, number(speed))
    axes.axhline(1.0, color="#555555", linewidth=0.8)
    axes.set_xticks(range(len(TASKS)), [LABELS.get(task, task) for task in TASKS], fontsize=8)
    axes.set_xlim(-0.5, len(TASKS) - 0.5)
    axes.margins(y=0.12)
    axes.set_yscale("log")
    _write_plainly(axes.yaxis)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, ncols=len(RIVALS), loc="lower right", bbox_to_anchor=(1, 0.98))


def _times_as_fast(name: str, ratio: float) -> float:
    """Speeds are ours over theirs already; of the start, seconds are."""
    return 1 / ratio if name.startswith(START) else ratio


def short_machine(hardware: str) -> str:
    """Only the CPU's model, without the marks of a trade name."""
    return hardware.partition(",")[0].replace("(R)", "").replace("(TM)", "")


def _draw_margins(axes: Any, rows: list[Row], machines: str) -> None:
    """Each row's value over its bound, or the other way round where less is better: at 1 it just meets its target."""
    clear_axes(axes, f"margin to the target (at 1 it is just met; orange: missed; {machines})")
    margins = [margin(row) or math.nan for row in rows]
    colours = [MET if row.ok else MISSED for row in rows]
    bars = axes.barh(range(len(rows)), [value - 1 for value in margins], height=0.7, left=1, color=colours)
    axes.bar_label(bars, [number(row.value or 0.0) for row in rows], fontsize=8, padding=3)
    axes.set_yticks(range(len(rows)), [f"{row.name}, {row.unit} {row.target}" for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.axvline(1.0, color="black")
    _write_plainly(axes.xaxis)


def _write_plainly(axis: Any) -> None:
    """Of a logarithmic axis: 0.5, 1, 2 instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def margin(row: Row) -> float | None:
    """None where the value or the bound is none to divide by."""
    target = Target.parse(row.target) if row.target is not None else None
    if target is None or not row.value or not target.bound or math.isnan(row.value):
        return None
    return row.value / target.bound if target.comparison.startswith(">") else target.bound / row.value
