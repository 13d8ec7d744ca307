"""Claim: whatever is interleaved, crashes or fails, the store never lies: no run of its simulation breaks a promise.

`pagetier.kvstore.sim` plays a whole life of a store per seed: several processes over one disk, one Redis and one clock.
A failing seed is printed with the fewest events that still show the failure; `--seed` plays it again, exactly.
What is unfair: the rates are of a small geometry, in Python, and say nothing of the store's own speed.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pagetier.benchmarks.report import Row, num_cores
from pagetier.kvstore.sim.run import Finding, Played, play_range, play_seed, shrink

QUICK_SEEDS, FULL_SEEDS = 20_000, 100_000
CHUNK_SEEDS = 100
MAX_SHOWN = 5  # failing seeds


def run(full: bool, say: Callable[[str], None]) -> Sequence[Row]:
    """As many seeds as CI plays, with `full` as many as before a release."""
    return run_seeds(FULL_SEEDS if full else QUICK_SEEDS, say)


def run_seeds(num_seeds: int, say: Callable[[str], None]) -> Sequence[Row]:
    """Seeds 0 up to `num_seeds`, over all cores."""
    begun_s = time.perf_counter()
    findings: list[Finding] = []
    num_played = num_events = num_operations = 0
    for played in _with_bar(_played(num_seeds), num_seeds):
        num_played += 1
        num_events += played.num_events
        num_operations += played.num_operations
        if played.finding is not None:
            findings.append(played.finding)
    took_s = time.perf_counter() - begun_s
    for finding in sorted(findings, key=lambda found: found.seed)[:MAX_SHOWN]:
        _show(shrink(finding), say)
    cores = num_cores()
    return [
        Row("violations", len(findings), "seeds", "== 0", runs=num_played),
        Row("seeds_per_s", num_played / took_s, "1/s", runs=num_played, note=f"{cores} cores, {took_s:.0f} s"),
        Row("events_per_seed", num_events / num_played, "events", runs=num_played),
        Row("operations_per_seed", num_operations / num_played, "file and socket operations", runs=num_played),
    ]


def run_seed(seed: int, say: Callable[[str], None]) -> Sequence[Row]:
    """One seed again, as it was."""
    played = play_seed(seed)
    if played.finding is not None:
        for line in played.finding.lines():
            say(line)
        _show(shrink(played.finding), say)
    return [
        Row("violations", int(played.finding is not None), "seeds", "== 0", note=f"seed {seed}"),
        Row("events_per_seed", played.num_events, "events"),
        Row("operations_per_seed", played.num_operations, "file and socket operations"),
    ]


def _show(finding: Finding, say: Callable[[str], None]) -> None:
    say("made small:")
    for line in finding.lines():
        say(line)
    say(f"again: pagetier bench sim --seed {finding.seed}")


def _played(num_seeds: int) -> Iterator[Played]:
    chunks = [(first, min(first + CHUNK_SEEDS, num_seeds)) for first in range(0, num_seeds, CHUNK_SEEDS)]
    cores = min(num_cores(), len(chunks))
    if cores == 1:
        for chunk in chunks:
            yield from _play_chunk(chunk)
        return
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        for played in pool.imap_unordered(_play_chunk, chunks):
            yield from played


def _play_chunk(chunk: tuple[int, int]) -> list[Played]:
    return play_range(*chunk)


def _with_bar(played: Iterator[Played], total: int) -> Iterator[Played]:
    columns = (TextColumn("seeds"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("seeds", total=total)
        for done in played:
            bar.advance(task)
            yield done
