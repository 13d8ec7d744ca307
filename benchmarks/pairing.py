"""Two sides measured in one run: A, B, A, B, ...; the median of the ratios of neighbours.

A machine shared with others drifts by minutes, not by seconds: neighbours see the same weather, so their ratio holds
where a ratio of two means would not.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagetier.benchmarks.report import num_cores

BUSY_SHARE = 0.15  # of all cores, above which a machine does not count as idle
SAMPLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Pairs:
    """Paired measurements: `ours[i]` and `theirs[i]` were taken one right after the other."""

    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Ours over theirs, pair by pair."""
        return tuple(a / b for a, b in zip(self.ours, self.theirs, strict=True))

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def measure_pairs(
    ours: Callable[[], float], theirs: Callable[[], float], num_pairs: int, max_s: float = math.inf
) -> Pairs:
    """Call both in turn, `num_pairs` times; each answers with its own figure (the same unit, above zero). After the
    first pair none is begun that would likely end later than `max_s` seconds after the first one began."""
    if num_pairs < 1:
        raise ValueError(f"num_pairs must be at least 1, not {num_pairs}")
    start_s, pairs = time.monotonic(), [(ours(), theirs())]
    while len(pairs) < num_pairs and (time.monotonic() - start_s) * (len(pairs) + 1) / len(pairs) <= max_s:
        pairs.append((ours(), theirs()))
    return Pairs(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of `values` do not exceed (nearest rank)."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    rank = math.ceil(share * len(ordered) - 1e-9)  # 0.07 * 100 is a little above 7
    return ordered[min(max(rank, 1), len(ordered)) - 1]


def busy_share(sample_s: float = SAMPLE_S) -> float:
    """The share of all cores that was busy during `sample_s` seconds; 0.0 where /proc/stat does not tell."""
    try:
        busy_before, all_before = _cpu_ticks()
        time.sleep(sample_s)
        busy_after, all_after = _cpu_ticks()
    except OSError:
        return 0.0
    return (busy_after - busy_before) / max(1, all_after - all_before)


def _cpu_ticks() -> tuple[int, int]:
    """(busy, all) clock ticks since boot, summed over cores; iowait counts as idle, steal as busy."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def wait_until_idle(timeout_s: float, *, probe: Callable[[], float] = busy_share) -> str:
    """Wait at most `timeout_s` for an idle machine; "" once it is, else a note that says that it was not."""
    give_up_s = time.monotonic() + timeout_s
    while (share := probe()) > BUSY_SHARE:
        if time.monotonic() >= give_up_s:
            load = os.getloadavg()[0]
            return f"machine not idle: {share:.0%} of {num_cores()} cores busy before the run, load {load:.1f}"
    return ""
