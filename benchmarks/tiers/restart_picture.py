"""The picture of `bench restart`: the first token after a restart beside computing the prompt again, and beside what
the bytes and one step take."""

from __future__ import annotations

from pathlib import Path

from pagetier.benchmarks.plot import LIMIT, MET, clear_axes, draw_bars, new_figure, number, save, write_right
from pagetier.benchmarks.report import Report


def draw(report: Report, folder: Path) -> Path:
    """`folder`/restart.png. Rows without a value are left out."""
    rows = {row.name: row for row in report.rows if row.value}
    cases = dict.fromkeys(name.removesuffix("_vs_bytes") for name in rows if name.endswith("_vs_bytes"))
    picture = new_figure(report, 1.3 + 0.5 * max(1, len(cases)))
    left, right = picture.subplots(1, 2)
    clear_axes(left, "seconds to the first token")
    for place, case in enumerate(cases):
        for shift, what, colour, label in (
            (-0.19, "first_token", MET, "after a restart"),
            (0.19, "recompute", LIMIT, "computed again"),
        ):
            row = rows.get(f"{case}_{what}")
            if row is not None and row.value:
                left.barh(place + shift, row.value, height=0.36, color=colour)
                write_right(left, row.value, place + shift, f"{number(row.value)} {label}")
    left.set_yticks(range(len(cases)), [case.removeprefix("restart_") for case in cases], fontsize=8)
    left.set_ylim(max(1, len(cases)) - 0.4, -0.6)
    left.margins(x=0.5)
    clear_axes(right, "the same over bytes / bandwidth + a step")
    draw_bars(right, [rows[f"{case}_vs_bytes"] for case in cases])
    right.set_yticks(range(len(cases)), [""] * len(cases))
    right.set_xlabel("ratio (black: target; orange: missed)", fontsize=8)
    left.set_xlabel("s", fontsize=8)
    return save(picture, report, folder)
