"""Runs of the simulation: one seed, a range of them, and a failing one made small."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pagetier.kvstore.sim.events import Events
from pagetier.kvstore.sim.machine import Violation
from pagetier.kvstore.sim.process import Assembly
from pagetier.kvstore.sim.scenario import Event, Scenario, draw

_PRODUCT = "pagetier.kvstore"
_FINISH = Event("finish", 0)
_SEEDS_PER_COLLECTION = 50  # collecting garbage after every run costs a tenth of the time


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken promise: what, in which run, and how many of its events it took to show."""

    what: str
    scenario: Scenario
    num_events: int

    @property
    def seed(self) -> int:
        return self.scenario.settings.seed

    def lines(self) -> list[str]:
        """For people: what, the settings, the events."""
        events = [*self.scenario.events, _FINISH][: self.num_events]
        shown = [f"  {rank:3} {event.kind} ({event.seed})" for rank, event in enumerate(events, 1)]
        return [f"seed {self.seed}: {self.what}", f"  {self.scenario.settings}", *shown]


@dataclass(frozen=True, slots=True)
class Played:
    """A run that is over. num_operations: of processes on files and sockets. now_ns: the clock at its end; with the
    former a fingerprint of all that was interleaved.
    """

    finding: Finding | None
    num_events: int
    num_operations: int
    now_ns: int


def play_seed(seed: int, assembly: Assembly | None = None) -> Played:
    return play(draw(seed), assembly)


def play(scenario: Scenario, assembly: Assembly | None = None) -> Played:
    """Play a scenario up to its end or its first broken promise. Equal scenarios play equally, in any process."""
    with _errors_logged() as errors:
        events = Events(scenario.settings, assembly or Assembly())
        machine, finding, rank = events.machine, None, 0
        for rank, event in enumerate((*scenario.events, _FINISH), 1):
            machine.scheduler.rng = random.Random(event.seed)
            what = _broken_by(events, event, errors)
            if what is not None:
                finding = Finding(what, scenario, rank)
                break
        events.close()
    return Played(finding, rank, machine.num_operations, machine.disk.now_ns)


def _broken_by(events: Events, event: Event, errors: Sequence[str]) -> str | None:
    try:
        events.do(event.kind)
    except Violation as violation:
        return str(violation)
    except Exception as error:
        # whatever the store raises at its caller, its own assertions included, is a finding
        return f"{type(error).__name__}: {error}"
    return f"the store logged an error: {errors[0]}" if errors else None


def play_range(first: int, end: int) -> list[Played]:
    """Seeds `first` up to before `end`."""
    gc.disable()
    try:
        played = []
        for seed in range(first, end):
            played.append(play_seed(seed))
            if seed % _SEEDS_PER_COLLECTION == 0:
                gc.collect()
        return played
    finally:
        gc.enable()


def shrink(finding: Finding, assembly: Assembly | None = None) -> Finding:
    """The same kind of finding from as few events as leaving some out gives."""
    best = _cut(finding)
    size = len(best.scenario.events) // 2
    while size:
        at = 0
        while at < len(best.scenario.events):
            events = best.scenario.events
            fewer = replace(best.scenario, events=(*events[:at], *events[at + size :]))
            found = play(fewer, assembly).finding
            if found is not None and _kind(found.what) == _kind(finding.what):
                best = _cut(found)
            else:
                at += size
        size //= 2
    return best


def _cut(finding: Finding) -> Finding:
    """Without the events behind the one that showed it."""
    return replace(finding, scenario=replace(finding.scenario, events=finding.scenario.events[: finding.num_events]))


def _kind(what: str) -> str:
    """What is the same in all findings of one bug, more or less."""
    return "".join(letter for letter in what.partition(",")[0] if not letter.isdigit())


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        what = record.getMessage()
        self.found.append(f"{what}: {record.exc_info[1]!r}" if record.exc_info else what)


@contextmanager
def _errors_logged() -> Iterator[Sequence[str]]:
    """What the store logs as errors: its own bugs, which it survives and we do not."""
    logger, handler = logging.getLogger(_PRODUCT), _Errors()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        yield handler.found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
