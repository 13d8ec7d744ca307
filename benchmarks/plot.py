"""Pictures of a report: one horizontal bar per row of each unit, targets as a line. matplotlib loads on use."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pagetier.benchmarks.report import Report, Row, Target
from pagetier.kvstore.errors import ConfigError


def require_matplotlib() -> None:
    """Raises ConfigError, before anything is measured, when there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'pagetier[bench]'")


def draw(report: Report, folder: Path) -> Path:
    """Write `folder`/<bench>.png; the file. Rows without a value are left out."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    by_unit: dict[str, list[Row]] = {}
    for row in report.rows:
        if row.value is not None:
            by_unit.setdefault(row.unit, []).append(row)
    height = 1.2 + sum(0.6 + 0.35 * len(rows) for rows in by_unit.values())
    picture = Figure(figsize=(9, height), layout="constrained")
    FigureCanvasAgg(picture)
    picture.suptitle(f"{report.bench} · {report.commit} · {report.hardware}", fontsize=9)
    ratios = [len(rows) for rows in by_unit.values()]
    grid = picture.subplots(max(1, len(by_unit)), 1, squeeze=False, height_ratios=ratios or [1])
    for axes, (unit, rows) in zip(grid[:, 0], by_unit.items(), strict=False):
        values = [row.value or 0.0 for row in rows]
        axes.barh(range(len(rows)), values, color=["#4c72b0" if row.ok else "#c44e52" for row in rows])
        axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(unit, fontsize=8)
        for place, row in enumerate(rows):
            if row.target is not None:
                axes.plot([Target.parse(row.target).bound] * 2, [place - 0.45, place + 0.45], color="black")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report.bench}.png"
    picture.savefig(path, dpi=120)
    return path
