"""`pagetier bench policies`: which eviction policy leaves most usable prefix tokens in a host of 4 GiB.

Usable are blocks from the head of a prompt on up to the first that is missing: what lies behind is of no use to
anybody. The product's default is held against the best of the others; it stays unless one clearly wins. A simulation:
no bytes, no clock, the same figures for a seed on every machine. Sequences are counted after the first fifth, when
every cache is full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    values = {row.name: row.value or 0.0 for row in report.rows}
    picture = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(picture)
    picture.suptitle(f"{report.bench} · {report.commit}", fontsize=9)
    axes = picture.subplots()
    for place, name in enumerate((*CACHES, "all")):
        at = [group + 0.16 * (place - 2) for group in range(len(TRACES))]
        shares = [values.get(f"{trace}_{name}", 0.0) for trace in TRACES]
        axes.bar(at, shares, width=0.15, label=name, color="#bbbbbb" if name == "all" else f"C{place}")
    axes.set_xticks(range(len(TRACES)), list(TRACES))
    axes.set_ylabel("usable prefix tokens, share of those asked for", fontsize=8)
    axes.legend(fontsize=8)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report.bench}.png"
    picture.savefig(path, dpi=120)
    return path
