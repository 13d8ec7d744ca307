"""How the engine's loop waits: only while nothing can be computed, and then it does not spin."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import pytest

from pagetier.engine.interpreter import MIN_COLLECTED, calm_the_collector
from pagetier.engine.server import wire
from pagetier.engine.server.engine_process import STALL_POLL_MS, EngineLink, EngineLoop, ServedEngine
from pagetier.engine.server.wire import Ready


class Waiting:
    """A core with work. A step brings nothing: it waits for a tier, or has launched what the next will collect."""

    def __init__(self, waits_for_store: bool) -> None:
        self.waits_for_store = waits_for_store
        self.num_steps = 0

    def has_work(self) -> bool:
        return self.num_steps < 4

    def stats(self) -> dict[str, Any]:
        return {}

    def step(self) -> list[Any]:
        self.num_steps += 1
        return []


class Silent:
    """A link on which nothing comes; how long the loop was ready to wait each time."""

    def __init__(self) -> None:
        self.waits_ms: list[int] = []

    def watch(self, fd: int) -> None: ...

    def unwatch(self, fd: int) -> None: ...

    def send(self, message: object) -> None: ...

    def take(self) -> None: ...

    def wait(self, timeout_ms: int) -> list[int]:
        self.waits_ms.append(timeout_ms)
        if len(self.waits_ms) == 4:
            self.end()
        return []

    def end(self) -> None: ...


@pytest.mark.parametrize("waits_for_store", [True, False])
def test_it_waits_between_steps_exactly_while_the_core_waits_for_a_tier(waits_for_store: bool) -> None:
    core, link = Waiting(waits_for_store), Silent()
    engine = ServedEngine(cast(Any, core), cast(Ready, None), close=lambda _: None, set_weights_version=str.encode)
    loop = EngineLoop(engine, cast(EngineLink, link), shutdown_timeout_s=0.0, lifeline=None)
    link.end = loop.begin_drain  # type: ignore[method-assign]
    loop.run()
    loop.close()
    assert link.waits_ms == [0, *[STALL_POLL_MS if waits_for_store else 0] * 3]


class Watched(Silent):
    """Somebody asks for figures all the time."""

    def __init__(self) -> None:
        super().__init__()
        self._queries: list[wire.StatsQuery] = []

    def wait(self, timeout_ms: int) -> list[int]:
        self._queries.append(wire.StatsQuery(1))
        return super().wait(timeout_ms)

    def take(self) -> wire.StatsQuery | None:  # type: ignore[override]
        return self._queries.pop() if self._queries else None


class Ring:
    """Refers to itself, so that only the collector ends it."""

    def __init__(self) -> None:
        self.own = self


@pytest.mark.parametrize("kind", [Silent, Watched])
@pytest.mark.parametrize("num_steps", [0, 4])
def test_what_goes_in_circles_goes_once_there_is_nothing_to_do(num_steps: int, kind: type[Silent]) -> None:
    """And not while there is: a walk through all waiting requests would be the longest part of a step."""
    core, link = Waiting(waits_for_store=False), kind()
    core.num_steps = 4 - num_steps
    engine = ServedEngine(cast(Any, core), cast(Ready, None), close=lambda _: None, set_weights_version=str.encode)
    loop = EngineLoop(engine, cast(EngineLink, link), shutdown_timeout_s=0.0, lifeline=None)
    thresholds = gc.get_threshold()
    try:
        calm_the_collector()
        kept = [Ring() for _ in range(MIN_COLLECTED)]
        dead = weakref.ref(kept.pop(0))
        seen: list[bool] = []

        def end() -> None:
            seen.append(dead() is None)
            loop.begin_drain()

        link.end = end  # type: ignore[method-assign]
        loop.run()
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        loop.close()
    assert seen == [num_steps == 0]
