"""`pagetier bench policies`: which eviction policy leaves most usable prefix tokens in a host of 4 GiB.

Usable are blocks from the head of a prompt on up to the first that is missing: what lies behind is of no use to
anybody. The product's default is held against the best of the others; it stays unless one clearly wins. A simulation:
no bytes, no clock, the same figures for a seed on every machine. Sequences are counted after the first fifth, when
every cache is full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pagetier.benchmarks.plot import LIMIT, SERIES, clear_axes, new_figure, save
from pagetier.benchmarks.policies.caches import CACHES, Cache
from pagetier.benchmarks.policies.traces import TRACES, Chain
from pagetier.benchmarks.report import Report, Row

HOST_BLOCKS = (4 << 30) // (360 << 10)  # of the default model in bf16
DEFAULT = "lru"


def run(full: bool, say: Callable[[str], None]) -> list[Row]:
    """Quick: 1,500 requests a trace, one seed. Full: 10,000, three seeds."""
    num_requests, seeds = (10_000, range(3)) if full else (1_500, range(1))
    rows = []
    shares: dict[str, list[float]] = {name: [] for name in CACHES}
    for trace, make in TRACES.items():
        say(f"{trace}: {num_requests} requests")
        chains = [list(make(num_requests, seed)) for seed in seeds]
        for name, new in CACHES.items():
            share = sum(usable_share(new(HOST_BLOCKS), chain) for chain in chains) / len(chains)
            shares[name].append(share)
            rows.append(Row(f"{trace}_{name}", share, "share", runs=len(chains)))
        known = sum(usable_share(Everything(), chain) for chain in chains) / len(chains)
        rows.append(Row(f"{trace}_all", known, "share", runs=len(chains), note="a host without end"))
    means = {name: sum(values) / len(values) for name, values in shares.items()}
    best = max(means, key=means.__getitem__)
    note = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items()) + f" over all traces; best: {best}"
    return [*rows, Row("default_vs_best", means[DEFAULT] / means[best], "ratio", ">= 0.95", note=note)]


def usable_share(cache: Cache, chains: Sequence[Chain]) -> float:
    """Leading blocks found over blocks asked for."""
    found = asked = 0
    for number, chain in enumerate(chains):
        hit = cache.serve(chain)
        if number >= len(chains) // 5:
            found, asked = found + hit, asked + len(chain)
    return found / asked


class Everything:
    """A host that never evicts: what there is to be found at all."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def serve(self, chain: Sequence[int]) -> int:
        found = next((i for i, key in enumerate(chain) if key not in self._known), len(chain))
        self._known.update(chain)
        return found

    def check(self) -> None:
        """Nothing can be wrong."""


def draw(report: Report, folder: Path) -> Path:
    """`folder`/policies.png: a group of bars a trace, beside what there was to be found."""
    values = {row.name: row.value for row in report.rows if row.value is not None}
    picture = new_figure(report, 3.6)
    axes = picture.subplots()
    clear_axes(axes, "usable prefix tokens, share of those asked for")
    for place, name in enumerate((*CACHES, "all")):
        known = {at: values[f"{trace}_{name}"] for at, trace in enumerate(TRACES) if f"{trace}_{name}" in values}
        at = [group + 0.18 * (place - 2) for group in known]
        label, colour = ("nothing evicted", LIMIT) if name == "all" else (name, SERIES[place])
        bars = axes.bar(at, list(known.values()), width=0.16, label=label, color=colour)
        axes.bar_label(bars, [f"{value:.2f}" for value in known.values()], fontsize=6)
    axes.set_xticks(range(len(TRACES)), list(TRACES))
    axes.set_xlim(-0.5, len(TRACES) - 0.5)
    axes.legend(fontsize=8, frameon=False, ncols=5, loc="lower center", bbox_to_anchor=(0.5, -0.22))
    return save(picture, report, folder)
