"""Pictures of a report: what all of them look like, and the one of benchmarks that have no own: a horizontal bar per
row of each unit, targets as a line. matplotlib loads on use.

Colours are those of Okabe and Ito, which the colour-blind tell apart. The same rows give the same bytes.
"""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path
from typing import Any

from pagetier.benchmarks.report import Report, Row, Target
from pagetier.kvstore.errors import ConfigError

SERIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
MET, MISSED, LIMIT = "#0072B2", "#D55E00", "#BBBBBB"
WIDTH_INCHES = 9.0  # of a page
DOTS_PER_INCH = 150
NUM_COLOURS = 64  # enough for smooth text in a few colours; a picture lies in the repository and should be small


def require_matplotlib() -> None:
    """Raises ConfigError, before anything is measured, when there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'pagetier[bench]'")


def new_figure(report: Report, height_inches: float) -> Any:
    """A matplotlib figure as wide as a page, with the report's title."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    FigureCanvasAgg(picture)
    title = textwrap.fill(f"pagetier bench {report.bench} · {report.commit} · {report.hardware}", 120)
    picture.suptitle(title, fontsize=8, color="#555555")
    return picture


def save(picture: Any, report: Report, folder: Path) -> Path:
    """Write `folder`/<bench>.png; the file. Without a date, or matplotlib's version."""
    from PIL import Image  # matplotlib needs it, too

    picture.set_dpi(DOTS_PER_INCH)
    picture.canvas.draw()
    size, pixels = picture.canvas.get_width_height(), bytes(picture.canvas.buffer_rgba())
    drawn = Image.frombytes("RGBA", size, pixels).convert("RGB")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report.bench}.png"
    drawn.quantize(NUM_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


def clear_axes(axes: Any, title: str = "") -> None:
    """No frame but the axis lines that are read; small print."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    if title:
        axes.set_title(title, fontsize=9, loc="left")


def bound_of(row: Row | None) -> float | None:
    return None if row is None or row.target is None else Target.parse(row.target).bound


def number(value: float) -> str:
    """Three figures, as far as they say something: 0.335, 1.16, 24.5, 1,246."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def draw(report: Report, folder: Path) -> Path:
    """Write `folder`/<bench>.png; the file. Rows without a value, or at 0, which no bar shows, are left out."""
    by_unit: dict[str, list[Row]] = {}
    for row in report.rows:
        if row.value:
            by_unit.setdefault(row.unit, []).append(row)
    height = 0.7 + sum(0.6 + 0.24 * len(rows) for rows in by_unit.values())
    picture = new_figure(report, height)
    ratios = [1 + len(rows) for rows in by_unit.values()]
    grid = picture.subplots(max(1, len(by_unit)), 1, squeeze=False, height_ratios=ratios or [1])
    for axes, (unit, rows) in zip(grid[:, 0], by_unit.items(), strict=False):
        clear_axes(axes)
        draw_bars(axes, rows)
        axes.set_xlabel(unit, fontsize=8)
    return save(picture, report, folder)


def draw_bars(axes: Any, rows: list[Row]) -> None:
    """A bar per row with its value, in the colour of a target that is met or missed, and the target as a line."""
    for place, row in enumerate(rows):
        value, bound = row.value or 0.0, bound_of(row)
        axes.barh(place, value, height=0.7, color=MET if row.ok else MISSED)
        if bound is not None:
            axes.plot([bound] * 2, [place - 0.45, place + 0.45], color="black")
        write_right(axes, value, place, number(value))
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.1)


def write_right(axes: Any, value: float, place: float, text: str, colour: str = "black") -> None:
    """`text` behind the end of a horizontal bar, to be read across the line of a target."""
    written = axes.annotate(text, (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    written.set(color=colour, path_effects=_halo())


def write_within(axes: Any, place: float, text: str) -> None:
    """`text` at the foot of a horizontal bar that is long enough."""
    axes.annotate(text, (0, place), (4, 0), textcoords="offset points", va="center", fontsize=8, color="white")


def write_above(axes: Any, place: float, value: float, text: str) -> None:
    """The same of an upright bar."""
    written = axes.annotate(text, (place, value), (0, 2), textcoords="offset points", ha="center", va="bottom")
    written.set(fontsize=8, path_effects=_halo())


def write_below(axes: Any, place: float, value: float, text: str, colour: str = "black") -> None:
    """`text` below the line at `value`: within an upright bar, or where it stands."""
    axes.annotate(
        text, (place, value), (0, -3), textcoords="offset points", ha="center", va="top", fontsize=8, color=colour
    )


def _halo() -> list[Any]:
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2.5, foreground="white")]
