"""W5: what a way to preempt comes to, and the rows that compare them. Knows no clock."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pagetier.benchmarks.report import Row

LOW_PRIORITY = 10  # of requests that urgent ones push out


@dataclass(frozen=True, slots=True)
class Outcome:
    """New tokens a second, and what was preempted by which way."""

    speed: float
    recomputes: int
    swaps: int
    recomputed_tokens: int

    @property
    def how(self) -> str:
        return f"{self.recomputes} by recompute, {self.swaps} by swap, {self.recomputed_tokens} tokens computed again"


def compared(name: str, found: Mapping[str, Sequence[Outcome]], target: float | None, note: str) -> Iterator[Row]:
    """Hybrid over recompute, and over the better of the pure modes: medians of the runs' ratios."""
    speeds = {mode: [outcome.speed for outcome in outcomes] for mode, outcomes in found.items()}
    num_runs = len(speeds["hybrid"])
    over = statistics.median(h / r for h, r in zip(speeds["hybrid"], speeds["recompute"], strict=True))
    pure = [max(r, s) for r, s in zip(speeds["recompute"], speeds["swap"], strict=True)]
    best = statistics.median(h / p for h, p in zip(speeds["hybrid"], pure, strict=True))
    wanted = None if target is None else f">= {target}"
    yield Row(f"{name}_hybrid_vs_recompute", over, "ratio", wanted, runs=num_runs, note=note)
    yield Row(f"{name}_hybrid_vs_better", best, "ratio", ">= 0.9", runs=num_runs, note=note)
