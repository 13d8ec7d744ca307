"""The picture of `bench tiers`: for each tier, direction and record size our bytes per second beside the limit's."""

from __future__ import annotations

from pathlib import Path

from pagetier.benchmarks.report import Report, Target


def draw(report: Report, folder: Path) -> Path:
    """`folder`/tiers.png. Rows without a value are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shares = [row for row in report.rows if row.unit == "ratio" and row.value]
    values = {row.name: row.value or 0.0 for row in report.rows}
    picture = Figure(figsize=(10, 1.6 + 0.5 * len(shares)), layout="constrained")
    FigureCanvasAgg(picture)
    picture.suptitle(f"{report.bench} · {report.commit} · {report.hardware}", fontsize=9)
    axes = picture.subplots()
    for place, row in enumerate(shares):
        ours, limit = (values.get(row.name.replace("vs_limit", side), 0.0) for side in ("pagetier", "limit"))
        axes.barh(place - 0.2, ours, height=0.36, color="#4c72b0" if row.ok else "#c44e52")
        axes.barh(place + 0.2, limit, height=0.36, color="#bbbbbb")
        axes.text(ours, place - 0.2, f" {row.value:.2f} of the limit", va="center", fontsize=7)
        if row.target is not None:
            axes.plot([limit * Target.parse(row.target).bound] * 2, [place - 0.4, place + 0.02], color="black")
    axes.set_yticks(range(len(shares)), [row.name.replace("_vs_limit", "") for row in shares], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("GB/s; grey: the limit measured beside it, black: the target", fontsize=8)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report.bench}.png"
    picture.savefig(path, dpi=120)
    return path
