"""The picture of `bench tiers`: for each tier, direction and record size our bytes per second beside the limit's, and
beside LMCache's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagetier.benchmarks.plot import (
    LIMIT,
    MET,
    MISSED,
    bound_of,
    clear_axes,
    new_figure,
    save,
    write_right,
    write_within,
)
from pagetier.benchmarks.report import Report, Row

KINDS = {"_vs_limit": "the limit measured beside it", "_vs_lmcache": "LMCache"}


def draw(report: Report, folder: Path) -> Path:
    """`folder`/tiers.png: a panel for each medium, as their speeds lie far apart. Rows without a value are left out."""
    values = {row.name: row.value for row in report.rows if row.value}
    panels: dict[str, list[Row]] = {}
    for row in report.rows:
        if row.name in values and (kind := kind_of(row)):
            medium = row.name.partition("_")[0] if kind == "_vs_limit" else kind
            panels.setdefault(medium, []).append(row)
    picture = new_figure(report, 1.2 + sum(0.5 + 0.42 * len(rows) for rows in panels.values()))
    ratios = [1 + len(rows) for rows in panels.values()]
    grid = picture.subplots(max(1, len(panels)), 1, squeeze=False, height_ratios=ratios or [1])
    for axes, rows in zip(grid[:, 0], panels.values(), strict=False):
        _draw_medium(axes, rows, values)
    grid[-1, 0].set_xlabel("GB/s (and ours over grey; black: target; orange: missed)", fontsize=8)
    return save(picture, report, folder)


def kind_of(row: Row) -> str | None:
    """What the row holds our speed against, if it does."""
    return next((kind for kind in KINDS if kind in row.name), None)


def _draw_medium(axes: Any, rows: list[Row], values: dict[str, float]) -> None:
    kind = kind_of(rows[0]) or ""
    medium = rows[0].name.partition("_")[0] if kind == "_vs_limit" else "360 KiB values"
    clear_axes(axes, f"{medium}; grey: {KINDS[kind]}")
    sides = ("_pagetier", kind.replace("_vs", ""))
    rates = [[values.get(row.name.replace(kind, side), 0.0) for side in sides] for row in rows]
    for place, (row, (ours, theirs)) in enumerate(zip(rows, rates, strict=True)):
        axes.barh(place - 0.19, ours, height=0.36, color=MET if row.ok else MISSED)
        axes.barh(place + 0.19, theirs, height=0.36, color=LIMIT)
        share = bound_of(row)
        if share is not None:
            axes.plot([theirs * share] * 2, [place - 0.4, place + 0.02], color="black")
        text = f"{ours:.2f} ({row.value:.2f})"
        if not row.ok and ours > 0.12 * max(map(max, rates)):  # the line of its target stands behind its end
            write_within(axes, place - 0.19, text)
        else:
            write_right(axes, ours, place - 0.19, text)
        write_right(axes, theirs, place + 0.19, f"{theirs:.2f}", "#555555")
    axes.set_yticks(range(len(rows)), [row.name.replace(kind, "") for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.margins(x=0.18)
