"""`pagetier bench tiers`: bytes per second of each lower tier through the store, as shares of the medium's limit.

A limit is measured beside ours, in turn, in the same run: these machines drift, disks and memory most of all. See
`media.py` for what is compared and what is unfair.
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from pagetier.benchmarks.limits.program import LimitsError
from pagetier.benchmarks.pairing import Pairs, measure_pairs, percentile, wait_until_idle
from pagetier.benchmarks.report import Row
from pagetier.benchmarks.tiers import lmcache
from pagetier.benchmarks.tiers.blocks import PAYLOADS, Blocks
from pagetier.benchmarks.tiers.media import HostMedium, Medium, NvmeMedium, RedisMedium
from pagetier.benchmarks.tiers.picture import draw
from pagetier.kvstore.errors import PagetierError

QUICK_BYTES, FULL_BYTES = 384 << 20, 1 << 30
IDLE_S = 300.0

__all__ = ("PARTS", "draw", "run", "run_part")  # what `pagetier bench` asks a benchmark for


@dataclass(frozen=True, slots=True)
class Comparison:
    """A tier, its two directions as words of its own, and the share of the limit that each is to reach."""

    name: str
    open: Callable[[Blocks], AbstractContextManager[Medium]]
    put: tuple[str, str | None]
    load: tuple[str, str | None]


COMPARISONS = (
    Comparison("nvme", NvmeMedium.open, ("write", ">= 0.80"), ("read", ">= 0.90")),
    Comparison("redis", RedisMedium.open, ("put", ">= 0.80"), ("load", ">= 0.85")),
    Comparison("host", HostMedium.open, ("write", None), ("read", ">= 0.65")),
)
PARTS = (*(comparison.name for comparison in COMPARISONS), "lmcache")


def run(full: bool, say: Callable[[str], None]) -> list[Row]:
    """Quick: three pairs of 384 MiB. Full: five of 1 GiB, and LMCache."""
    rows = _run(COMPARISONS, full, say)
    return [*rows, *run_part("lmcache", full, say)] if full else rows


def run_part(part: str, full: bool, say: Callable[[str], None]) -> list[Row]:
    """The rows of one tier, or those of LMCache."""
    if part == "lmcache":
        return lmcache.run(5 if full else 3, say, wait_until_idle(IDLE_S if full else 0.0))
    return _run([comparison for comparison in COMPARISONS if comparison.name == part], full, say)


def _run(comparisons: Sequence[Comparison], full: bool, say: Callable[[str], None]) -> list[Row]:
    if full:
        say(f"waiting for an idle machine, {IDLE_S:.0f} s at most")
    note = wait_until_idle(IDLE_S if full else 0.0)
    total_bytes, num_pairs = (FULL_BYTES, 5) if full else (QUICK_BYTES, 3)
    rows: list[Row] = []
    for size, payload_bytes in PAYLOADS.items():
        blocks = Blocks.random(payload_bytes, total_bytes)
        for comparison in comparisons:
            say(f"{comparison.name}, {size} records: {num_pairs} pairs of {total_bytes >> 20} MiB")
            rows += compare(comparison, size, blocks, num_pairs, note)
    return rows


def compare(comparison: Comparison, size: str, blocks: Blocks, num_pairs: int, note: str) -> list[Row]:
    """All rows of one tier and record size; without values where the medium cannot be had."""
    names = [f"{comparison.name}_{word}_vs_limit_{size}" for word, _ in (comparison.put, comparison.load)]
    targets = [target for _, target in (comparison.put, comparison.load)]
    puts: list[Pairs] = []
    loads: list[Pairs] = []
    try:
        with comparison.open(blocks) as medium:
            for _ in range(num_pairs):  # put, load, put, load: a load reads what was just put
                puts.append(measure_pairs(medium.put, medium.limit_put, 1))
                loads.append(measure_pairs(medium.load, medium.limit_load, 1))
            how = f"limit: {medium.how}{'; ' if note else ''}{note}"
    except (PagetierError, LimitsError, OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        return [Row(name, None, "ratio", target, note=str(error)) for name, target in zip(names, targets, strict=True)]
    judged = zip(names, targets, (_joined(puts), _joined(loads)), strict=True)
    return [row for name, target, pairs in judged for row in share_rows(name, target, pairs, how)]


def share_rows(name: str, target: str | None, pairs: Pairs, how: str) -> list[Row]:
    """The share, and both sides in GB/s."""
    runs, spread = len(pairs.ours), (percentile(pairs.ratios, 0.5), percentile(pairs.ratios, 0.99))
    rows = [Row(name, pairs.ratio, "ratio", target, *spread, runs, how)]
    for side, rates in (("pagetier", pairs.ours), ("limit", pairs.theirs)):
        rows.append(Row(name.replace("vs_limit", side), statistics.median(rates) / 1e9, "GB/s", runs=runs, note=how))
    return rows


def _joined(pairs: Sequence[Pairs]) -> Pairs:
    return Pairs(tuple(pair.ours[0] for pair in pairs), tuple(pair.theirs[0] for pair in pairs))
