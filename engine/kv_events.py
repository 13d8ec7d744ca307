"""KV events on their way out of the engine: what came into the device pool and the tiers below, and what left them.

Owns the listener that tells of the device pool while somebody follows. Knows no socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagetier.engine.prefix_index import PrefixIndex
from pagetier.kvstore.block import BlockName
from pagetier.kvstore.event_forms import forms_of
from pagetier.kvstore.events import EventKind, EventLog

MAX_EVENTS = 256  # taken at once: between two steps nobody shall wait for who follows
DEVICE = "device"


class EventTap:
    """Lets events out of an engine while somebody follows. owner: core thread."""

    def __init__(self, index: PrefixIndex, log: EventLog) -> None:
        self._index, self._log = index, log
        self._next_seq = 0
        self.is_open = False

    def open(self) -> None:
        """Tell of what happens from now on."""
        if not self.is_open:
            self.is_open, self._next_seq, self._index.listener = True, self._log.next_seq, _DeviceListener(self._log)
            self._log.follow(True)

    def close(self) -> None:
        """Stop telling."""
        if self.is_open:
            self._log.follow(False)
        self.is_open, self._index.listener = False, None

    def all_cleared(self) -> None:
        """No block of before will be used again."""
        if self.is_open:
            self._log.cleared(DEVICE, None)

    def take(self) -> tuple[list[tuple[Any, ...]], int]:
        """Some of what happened since the last call, and how many events before it are lost."""
        if not self.is_open:
            return [], 0
        tail = self._log.since(self._next_seq, MAX_EVENTS)
        num_lost, self._next_seq = tail.first_seq - self._next_seq, tail.next_seq
        return [tuple(form) for event in tail.events for form in forms_of(event)], num_lost


class _DeviceListener:
    """Enters what the prefix index tells into the log."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def entered(self, names: Sequence[BlockName]) -> None:
        self._log.append(EventKind.STORED, DEVICE, [name.key for name in names], names, None)

    def left(self, names: Sequence[BlockName]) -> None:
        self._log.append(EventKind.REMOVED, DEVICE, [name.key for name in names], (), None)
