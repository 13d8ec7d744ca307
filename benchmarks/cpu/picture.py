"""The picture of `bench cpu`: speeds beside those of the peers, and every judged row against its target."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pagetier.benchmarks.cpu.comparison import RIVALS, WORKLOADS
from pagetier.benchmarks.report import Report, Row, Target

SIDES = ("pagetier", *(rival.name for rival in RIVALS))


def draw(report: Report, folder: Path) -> Path:
    """`folder`/cpu.png. Rows without a value are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    judged = [row for row in report.rows if row.target is not None and row.value]
    picture = Figure(figsize=(10, 4.5 + 0.28 * len(judged)), layout="constrained")
    FigureCanvasAgg(picture)
    picture.suptitle(f"{report.bench} · {report.commit} · {report.hardware}", fontsize=9)
    above, below = picture.subplots(2, 1, height_ratios=(3, 1 + 0.28 * len(judged)))
    _draw_speeds(above, {row.name: row.value for row in report.rows if row.value})
    _draw_margins(below, judged)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report.bench}.png"
    picture.savefig(path, dpi=120)
    return path


def _draw_speeds(axes: Any, values: dict[str, float]) -> None:
    for index, side in enumerate(SIDES):
        bars = {place: values.get(f"{workload.name}_{side}") for place, workload in enumerate(WORKLOADS)}
        known = {place: value for place, value in bars.items() if value}
        if not known:
            continue
        places = [place + 0.2 * (index - 1.5) for place in known]
        drawn = axes.bar(places, list(known.values()), width=0.18, label=side, color=f"C{index}")
        axes.bar_label(drawn, [f"{value:.0f}" for value in known.values()], fontsize=7)
    axes.set_xticks(range(len(WORKLOADS)), [workload.name for workload in WORKLOADS], fontsize=8)
    axes.set_xlim(-0.5, len(WORKLOADS) - 0.5)
    axes.set_yscale("log")
    axes.set_ylabel("tokens per second", fontsize=8)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def _draw_margins(axes: Any, rows: list[Row]) -> None:
    """Each row's value over its bound, or the other way round where less is better: at 1 it just meets its target."""
    rows = [row for row in rows if _margin(row) is not None]
    margins = [_margin(row) or 0.0 for row in rows]
    axes.barh(
        range(len(rows)),
        [margin - 1 for margin in margins],
        left=1.0,
        color=["#4c72b0" if row.ok else "#c44e52" for row in rows],
    )
    axes.set_yticks(range(len(rows)), [f"{row.name} {row.target}" for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1.0, color="black")
    axes.set_xlabel("margin to the target", fontsize=8)


def _margin(row: Row) -> float | None:
    target = Target.parse(row.target or "")
    if not row.value or not target.bound or math.isnan(row.value):
        return None
    return row.value / target.bound if target.comparison.startswith(">") else target.bound / row.value
