"""Does scheduling keep memory full, work done and urgent requests quick? `pagetier bench preemption`.

W1 and W2 compare allocation and batching, W3 reuse, W5 the ways to preempt, W6 the choices of one prompt. The parts
`planning`, `urgent`, `batching_real`, `modes` and `links` run on the machine; the others run the scheduler in virtual
time (`virtual.py`), with steps that take what a nominal model says, or, with `--full`, the compiled core's fit of its
own. What is unfair stands with each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pagetier.benchmarks.pairing import wait_until_idle
from pagetier.benchmarks.preemption.batching import batching_rows, real_row
from pagetier.benchmarks.preemption.choices import choice_rows
from pagetier.benchmarks.preemption.memory import memory_rows
from pagetier.benchmarks.preemption.modes import LINKS, link_row, mode_rows
from pagetier.benchmarks.preemption.picture import draw
from pagetier.benchmarks.preemption.planning import POLICIES, planning_row, urgent_row
from pagetier.benchmarks.preemption.pressure import pressure_rows
from pagetier.benchmarks.preemption.reuse import reuse_rows
from pagetier.benchmarks.preemption.virtual import NOMINAL, StepModel
from pagetier.benchmarks.report import Row

Say = Callable[[str], None]
__all__ = ("PARTS", "draw", "run", "run_part")  # what `pagetier bench` asks a benchmark for


def run(full: bool, say: Say) -> list[Row]:
    """Quick: one measurement a row at small sizes. Full: five."""
    return [row for part in PARTS for row in run_part(part, full, say)]


def run_part(part: str, full: bool, say: Say) -> list[Row]:
    """The rows of one part, each said as soon as it is there: a run that is cut off has lost none."""
    note, rows = wait_until_idle(600.0 if full else 0.0), []
    for row in _PARTS[part](full, say, note):
        say(f"  {row.name} {figure(row.value)} {row.unit} {row.note}")
        rows.append(row)
    return rows


def figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _planning(full: bool, say: Say, note: str) -> Iterator[Row]:
    say("planning with 10,000 waiting requests, by policy")
    for policy in POLICIES:
        yield planning_row(policy, 300 if full else 100, note)


def _urgent(full: bool, say: Say, note: str) -> Iterator[Row]:
    say("an urgent request in a full pool")
    yield urgent_row(5 if full else 2, note)


def _model(full: bool) -> StepModel:
    """Quick: the nominal one, so that rows are the same on every machine, however busy. Full: fitted here and now."""
    return StepModel.measured() if full else NOMINAL


def _memory(full: bool, say: Say, note: str) -> Iterator[Row]:
    say("W1: pages against contiguous reservations")
    return memory_rows(_model(full), 192 if full else 96, 5 if full else 3, note)


def _batching(full: bool, say: Say, note: str) -> Iterator[Row]:
    say("W2: iterations against batches")
    return batching_rows(_model(full), 384 if full else 96, note)


def _batching_real(full: bool, say: Say, note: str) -> Iterator[Row]:
    say("W2: the same on the machine")
    yield real_row(64 if full else 32, 5 if full else 1, note)


def _reuse(full: bool, say: Say, note: str) -> Iterator[Row]:
    say("W3: reuse, against an unbounded cache")
    return reuse_rows(_model(full), 4 if full else 2, note)


def _pressure(full: bool, say: Say, note: str) -> Iterator[Row]:
    say("W5: preemption modes in virtual time, by pool and link")
    return pressure_rows(_model(full), 24 if full else 12, note)


def _modes(full: bool, say: Say, note: str) -> Iterator[Row]:
    for share in (0.3, 0.4, 0.6) if full else (0.4,):
        say(f"W5: preemption modes, a pool of {share:.0%} of the demand")
        yield from mode_rows(share, 3 if full else 1, note)


def _links(full: bool, say: Say, note: str) -> Iterator[Row]:
    for link in LINKS:
        say(f"W5: copies at the speed of {link.name}")
        yield link_row(link, note)


def _choices(full: bool, say: Say, note: str) -> Iterator[Row]:
    say("W6: choices of one prompt")
    return choice_rows(128 if full else 64, note)


_PARTS: dict[str, Callable[[bool, Say, str], Iterator[Row]]] = {
    "planning": _planning,
    "urgent": _urgent,
    "memory": _memory,
    "batching": _batching,
    "batching_real": _batching_real,
    "reuse": _reuse,
    "pressure": _pressure,
    "modes": _modes,
    "links": _links,
    "choices": _choices,
}
PARTS = tuple(_PARTS)
