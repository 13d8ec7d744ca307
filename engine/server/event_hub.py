"""KV events in the API process: from the engine to whoever follows, each at its own pace.

Owns who follows, and asks the engine for events only while somebody does. owner: event loop thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pagetier.engine.server import wire
from pagetier.engine.server.engine_client import EngineClient
from pagetier.kvstore.event_forms import KvEvent, shown_event

logger = logging.getLogger(__name__)

MAX_WAITING = 4096  # events that a follower may be behind; the oldest are lost then, and it is told how many

Sink = Callable[[Sequence[KvEvent], int], None]


class EventHub:
    """Events of one engine."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._sinks: list[Sink] = []

    def add_sink(self, sink: Sink) -> Callable[[], None]:
        """Call `sink` with events, and with how many before them were lost, until what is returned is called."""
        self._sinks.append(sink)
        if len(self._sinks) == 1:
            self._client.follow_events(self._deliver)

        def remove() -> None:
            if sink in self._sinks:
                self._sinks.remove(sink)
                if not self._sinks:
                    self._client.follow_events(None)

        return remove

    @contextlib.contextmanager
    def followed(self) -> Iterator[asyncio.Queue[dict[str, Any]]]:
        """A queue of events as they are shown, for as long as it is entered."""
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        num_lost = 0

        def sink(events: Sequence[KvEvent], lost: int) -> None:
            nonlocal num_lost
            num_lost += lost
            for event in events:
                if queue.qsize() >= MAX_WAITING:
                    num_lost += 1
                    continue
                if num_lost:
                    queue.put_nowait({"kind": "lost", "events": num_lost})
                    num_lost = 0
                queue.put_nowait(shown_event(event))

        remove = self.add_sink(sink)
        try:
            yield queue
        finally:
            remove()

    def _deliver(self, message: wire.Events) -> None:
        try:
            events = [KvEvent(*event) for event in message.events]
        except TypeError as error:
            logger.warning("dropped events from the engine: %s", error)
            return
        for sink in tuple(self._sinks):
            sink(events, message.num_lost)
