"""The picture of `bench preemption`: a small panel for each comparison, targets as black lines.

`real` is on the machine, the others in virtual time. A panel whose rows are not there says so: parts run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagetier.benchmarks.plot import SERIES, bound_of, clear_axes, new_figure, number, save, write_above, write_below
from pagetier.benchmarks.preemption.choices import COUNTS
from pagetier.benchmarks.preemption.memory import ALLOCATIONS
from pagetier.benchmarks.preemption.planning import POLICIES
from pagetier.benchmarks.preemption.pressure import SHARES
from pagetier.benchmarks.preemption.reuse import WORKLOADS
from pagetier.benchmarks.report import Report, Row
from pagetier.engine.config import PREEMPTION_MODES

Rows = Mapping[str, Row]  # those that have a value, by name
OURS, OTHERS = SERIES[0], "#999999"
ALLOCATION_LABELS = dict(zip(ALLOCATIONS, ("pages", "whole\nlength", "power\nof two", "oracle"), strict=True))
MODE_COLOURS = dict(zip(PREEMPTION_MODES, (OTHERS, SERIES[1], SERIES[0]), strict=True))


def draw(report: Report, folder: Path) -> Path:
    """`folder`/preemption.png. Rows without a value are left out."""
    rows = {row.name: row for row in report.rows if row.value is not None}
    picture = new_figure(report, 9.6)
    grid = picture.subplots(4, 3)
    for axes, draw_panel in zip(grid.flat, PANELS, strict=True):
        draw_panel(axes, rows)
        if not axes.has_data():
            axes.set_axis_off()
            axes.text(0.5, 0.5, "no rows", fontsize=8, color="#999999", ha="center", transform=axes.transAxes)
    return save(picture, report, folder)


def _filled_share(axes: Any, rows: Rows) -> None:
    clear_axes(axes, "W1: share of memory that\nholds tokens, by allocation")
    names = {f"w1_filled_share_{name}": label for name, label in ALLOCATION_LABELS.items()}
    _bars(axes, rows, names)


def _request_rate(axes: Any, rows: Rows) -> None:
    clear_axes(axes, "W1: requests/s at equal latency\na token, by allocation")
    names = {f"w1_requests_per_s_{name}": label for name, label in ALLOCATION_LABELS.items()}
    base = rows.get("w1_requests_per_s_contiguous_max")
    bound = bound_of(rows.get("w1_rate_vs_contiguous_max"))
    wanted = None if base is None or bound is None else bound * (base.value or 0.0)
    _bars(axes, rows, names, {"w1_requests_per_s_paged": wanted})


def _batching(axes: Any, rows: Rows) -> None:
    clear_axes(axes, "W2: tokens/s of iterations over\nthose of other ways to batch")
    names = {
        "w2_iteration_vs_static": "static",
        "w2_iteration_vs_window": "window",
        "w2_iteration_vs_static_real": "static,\nreal",
    }
    _bars(axes, rows, {name: label for name, label in names.items() if name in rows}, colour=OURS)


def _reuse(axes: Any, rows: Rows) -> None:
    """Dots: all lie near 1, where bars that begin at 0 would show nothing."""
    clear_axes(axes, "W3: hit tokens, share of the\nbest possible")
    labels = {name: name.replace("_", "\n") for name in WORKLOADS}
    for policy, colour, marker in (("lpm", OURS, "o"), ("fcfs", SERIES[1], "s")):
        known = {at: rows.get(f"w3_{name}_hits_vs_optimal_{policy}") for at, name in enumerate(labels)}
        values = {at: row.value for at, row in known.items() if row is not None}
        if values:
            axes.plot(list(values), list(values.values()), marker, color=colour, label=policy)
        for bound in {bound_of(row) for row in known.values()} - {None}:
            axes.axhline(bound, color="black", linewidth=1)
    if axes.has_data():
        axes.set_xticks(range(len(labels)), list(labels.values()))
        axes.set_xlim(-0.5, len(labels) - 0.5)
        axes.set_ylim(min(0.94, axes.get_ylim()[0]), 1.001)
        axes.legend(fontsize=7, frameon=False, loc="lower right", ncols=2)


def _choices(axes: Any, rows: Rows) -> None:
    clear_axes(axes, "W6: blocks saved, share,\nby choices of one prompt")
    _bars(axes, rows, {f"w6_blocks_saved_n{n}": f"n = {n}" for n in COUNTS}, colour=OURS)


def _links(axes: Any, rows: Rows) -> None:
    clear_axes(axes, "W5: tokens/s of hybrid over\nrecompute, by link, pool of 40 %")
    speeds = {"25gb": "25 GB/s", "third_of_break_even": "slow"}
    names = {f"w5_urgent_link_{name}_hybrid_vs_recompute": label for name, label in speeds.items()}
    real = {f"w5_link_{name}_hybrid_vs_recompute": f"{label},\nreal" for name, label in speeds.items()}
    known = {name: label for name, label in {**names, **real}.items() if name in rows}
    _bars(axes, rows, known, colour=OURS)


def _modes(name: str, title: str) -> Callable[[Any, Rows], None]:
    """Tokens a second of each way to preempt, a group for each pool, and how many times recompute's hybrid has. The
    targets of hybrid are ratios; drawn is what they make of the other modes."""

    def draw_panel(axes: Any, rows: Rows) -> None:
        clear_axes(axes, title)
        pools = [f"{share:.0%}".rstrip("%") for share in SHARES]
        pools = [pool for pool in pools if any(f"{name}_{pool}_{mode}" in rows for mode in PREEMPTION_MODES)]
        for index, (mode, colour) in enumerate(MODE_COLOURS.items()):
            known = {at: rows.get(f"{name}_{pool}_{mode}") for at, pool in enumerate(pools)}
            values = {at + 0.27 * (index - 1): row.value for at, row in known.items() if row is not None}
            axes.bar(list(values), list(values.values()), width=0.25, color=colour, label=mode)
        for at, pool in enumerate(pools):
            for bound in _hybrid_bounds(rows, f"{name}_{pool}"):
                axes.plot([at + 0.14, at + 0.4], [bound] * 2, color="black")
        if pools:
            ratios = [rows.get(f"{name}_{pool}_hybrid_vs_recompute") for pool in pools]
            times = ["" if ratio is None else f"\n{ratio.value:.2f}x" for ratio in ratios]
            axes.set_xticks(range(len(pools)), [f"{pool} %{more}" for pool, more in zip(pools, times, strict=True)])
            axes.set_xlim(-0.6, max(len(pools), 2) - 0.4)
            axes.margins(y=0.3)
            axes.legend(fontsize=7, frameon=False, ncols=3, loc="upper center", columnspacing=1, handlelength=1)

    return draw_panel


def _hybrid_bounds(rows: Rows, name: str) -> list[float]:
    speeds = {mode: rows[f"{name}_{mode}"].value or 0.0 for mode in PREEMPTION_MODES if f"{name}_{mode}" in rows}
    over, better = (bound_of(rows.get(f"{name}_hybrid_vs_{other}")) for other in ("recompute", "better"))
    bounds = [over * speeds["recompute"]] if over is not None and "recompute" in speeds else []
    others = [speed for mode, speed in speeds.items() if mode != "hybrid"]
    return [*bounds, better * max(others)] if better is not None and others else bounds


def _planning(axes: Any, rows: Rows) -> None:
    clear_axes(axes, "planning with 10,000 waiting,\np99, ms, by policy")
    _bars(axes, rows, {f"plan_10000_waiting_{policy}": policy for policy in POLICIES}, colour=OURS)


def _urgent(axes: Any, rows: Rows) -> None:
    clear_axes(axes, "urgent request in a full pool:\nTTFT over that on an idle engine")
    _bars(axes, rows, {"urgent_ttft_full_vs_idle": "real"}, colour=OURS)


def _bars(
    axes: Any, rows: Rows, labels: Mapping[str, str], bounds: Mapping[str, float | None] | None = None, colour: str = ""
) -> None:
    """A bar a row, the first one ours and the others not where no colour is given; a bound is the row's own target
    where none is given."""
    known = [name for name in labels if name in rows]
    if not known:
        return
    values = [rows[name].value or 0.0 for name in known]
    wanted = [(bounds or {}).get(name, bound_of(rows[name])) for name in known]
    top = max(*values, *(bound or 0.0 for bound in wanted))
    for at, (name, value, bound) in enumerate(zip(known, values, wanted, strict=True)):
        axes.bar(at, value, width=0.7, color=colour or (OURS if name == next(iter(labels)) else OTHERS))
        if bound is not None:
            axes.plot([at - 0.45, at + 0.45], [bound] * 2, color="black")
        if bound is not None and 0.2 * top < value <= bound < value + 0.15 * top:  # the line would cross the figure
            write_below(axes, at, value, number(value), "white")
        else:
            write_above(axes, at, value, number(value))
    axes.set_xticks(range(len(known)), [labels[name] for name in known])
    axes.set_xlim(-0.6, max(len(known), 2) - 0.4)
    axes.margins(y=0.12)


PANELS: Sequence[Callable[[Any, Rows], None]] = (
    _filled_share,
    _request_rate,
    _batching,
    _reuse,
    _choices,
    _links,
    _modes("w5_crowd", "W5: tokens/s by pool, prompts of\n2,000 to 4,000 tokens at once"),
    _modes("w5_urgent", "W5: the same, half of them\nurgent and one by one"),
    _modes("w5_chats", "W5: ShareGPT's lengths\nat once"),
    _modes("w5_pool", "W5: tokens/s, half urgent,\nreal"),
    _planning,
    _urgent,
)
