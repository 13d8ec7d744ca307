"""What came into tiers and left them: a bounded log of events that any number of readers follow, each at its own pace.

Owns order and numbers; knows no wire. Thread-safe. Who reads too slowly loses the oldest events, and can tell by their
numbers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from pagetier.kvstore.block import BlockName

MAX_EVENTS = 16_384  # kept; an event has up to a piece of a chain


class EventKind(StrEnum):
    STORED = "stored"  # blocks can be found in a tier from now on
    REMOVED = "removed"  # they left it: evicted, deleted, or found damaged
    CLEARED = "cleared"  # all of a cache identity left it


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """One thing that happened to blocks of one tier.

    medium: the tier's name. keys: head first. names: of the same blocks where they are known, as they are for all that
    was stored; else empty. domain: None when it is not known. time_s: since 1970. seq: from 0, without gaps.
    """

    seq: int
    time_s: float
    kind: EventKind
    medium: str
    keys: tuple[bytes, ...] = ()
    names: tuple[BlockName, ...] = ()
    domain: bytes | None = None


@dataclass(frozen=True, slots=True)
class Tail:
    """Events from `first_seq` on. Later ones begin at `next_seq`. Those asked for before `first_seq` are lost."""

    events: tuple[StoreEvent, ...]
    first_seq: int
    next_seq: int


class EventLog:
    """The last `max_events` events. Invariant: numbers in it are consecutive and end at `next_seq` - 1."""

    def __init__(
        self,
        max_events: int = MAX_EVENTS,
        clock: Callable[[], float] = time.time,
        on_follow: Callable[[bool], None] | None = None,
    ) -> None:
        """on_follow: told when somebody begins to read the log and when nobody does any more; for a log that is filled
        from elsewhere, and only while it is read. Must not block."""
        self._clock, self._on_follow = clock, on_follow
        self._changed = threading.Condition()
        self._events: deque[StoreEvent] = deque(maxlen=max_events)  # guarded by self._changed, as all below
        self._next_seq = 0
        self._listeners: list[Callable[[], None]] = []

    def follow(self, wanted: bool) -> None:
        """The one reader that an engine has begins, or ends."""
        if self._on_follow is not None:
            self._on_follow(wanted)

    @property
    def next_seq(self) -> int:
        """The number of the event to come."""
        return self._next_seq

    def stored(self, medium: str, names: Sequence[BlockName], domain: bytes | None) -> None:
        """Blocks are in a tier now."""
        if names:
            self.append(EventKind.STORED, medium, [name.key for name in names], names, domain)

    def removed(self, medium: str, keys: Sequence[bytes], domain: bytes | None = None) -> None:
        """Blocks are no longer in a tier."""
        if keys:
            self.append(EventKind.REMOVED, medium, keys, (), domain)

    def cleared(self, medium: str, domain: bytes | None) -> None:
        """Nothing of a domain is in a tier any more."""
        self.append(EventKind.CLEARED, medium, (), (), domain)

    def append(
        self,
        kind: EventKind,
        medium: str,
        keys: Sequence[bytes],
        names: Sequence[BlockName],
        domain: bytes | None,
    ) -> int:
        """Add an event; its number."""
        with self._changed:
            seq = self._next_seq
            self._next_seq += 1
            self._events.append(StoreEvent(seq, self._clock(), kind, medium, tuple(keys), tuple(names), domain))
            self._changed.notify_all()
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()
        return seq

    def since(self, seq: int, limit: int = 256) -> Tail:
        """Up to `limit` events from number `seq` on, or from the oldest that is left. Does not wait."""
        with self._changed:
            oldest = self._next_seq - len(self._events)
            first = min(max(seq, oldest), self._next_seq)
            events = tuple(islice(self._events, first - oldest, first - oldest + limit))
        return Tail(events, first, first + len(events))

    def wait(self, seq: int, timeout_s: float) -> bool:
        """Sleep until event `seq` is there; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next_seq > seq, timeout_s)

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after every event, on the thread that caused it: it must not block or raise. What is returned
        ends that."""
        with self._changed:
            self._listeners.append(listener)

        def stop() -> None:
            with self._changed:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return stop
