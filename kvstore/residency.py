"""How blocks fare in a tier: how long they live, how long they lie idle before they go, how soon they are used again.
 vLLM's three histograms, over all blocks instead of a sample.

Owns counts only. A run of blocks with one story is one observation, so that a chain of thousands costs microseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

# Seconds: from "the next request" over "the next turn of a chat" to "the next day".
BUCKETS_S = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600, 4 * 3600, 24 * 3600)


@dataclass(slots=True)
class Histogram:
    """Counts by bucket: `counts[i]` are those at most `bounds[i]` and above the one before; the last is the rest."""

    bounds: Sequence[float] = BUCKETS_S
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """`count` times the same value."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for the engine's stats."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.total}


@dataclass(slots=True)
class Residency:
    """lifetime: from entering the index to leaving it. idle_before_evict: from the last use to leaving it. reuse_gap:
    between two uses by requests, entering counted as one.
    """

    lifetime: Histogram = field(default_factory=Histogram)
    idle_before_evict: Histogram = field(default_factory=Histogram)
    reuse_gap: Histogram = field(default_factory=Histogram)

    def reused(self, gaps_s: Iterable[float]) -> None:
        """Blocks of a chain were used again, so long after they were last."""
        run, length = 0.0, 0
        for gap_s in gaps_s:
            if gap_s != run:
                if length:
                    self.reuse_gap.observe(run, length)
                run, length = gap_s, 0
            length += 1
        if length:
            self.reuse_gap.observe(run, length)

    def evicted(self, lifetime_s: float, idle_s: float) -> None:
        """A block left."""
        self.lifetime.observe(lifetime_s)
        self.idle_before_evict.observe(idle_s)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for the engine's stats."""
        return {
            "lifetime": self.lifetime.as_dict(),
            "idle_before_evict": self.idle_before_evict.as_dict(),
            "reuse_gap": self.reuse_gap.as_dict(),
        }
