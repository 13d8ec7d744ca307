"""How the engine's loop waits: only while nothing can be computed, and then it does not spin."""

from __future__ import annotations

from typing import Any, cast

import pytest

from pagetier.engine.server.engine_process import STALL_POLL_MS, EngineLink, EngineLoop, ServedEngine
from pagetier.engine.server.wire import Ready


class Waiting:
    """A core with work. A step brings nothing: it waits for a tier, or has launched what the next will collect."""

    def __init__(self, waits_for_store: bool) -> None:
        self.waits_for_store = waits_for_store
        self.num_steps = 0

    def has_work(self) -> bool:
        return self.num_steps < 4

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
