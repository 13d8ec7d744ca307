"""What is known of blocks beside their bytes: names, since when, last use and hits. Bounded; least used leave first.

Filled by the store as puts, loads and touches happen; read by people's questions (`query`, `top`). It is of one process
and forgets at its end: how often something was hit is no property of a record. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import zip_longest
from typing import Any

from pagetier.kvstore.block import BlockName
from pagetier.kvstore.residency import Residency

MAX_ENTRIES = 131_072  # some 60 MB; 2 million tokens
CHUNK_BLOCKS = 512  # entered by one call of the store's thread at most: some 0.5 ms
MAX_WAITING_BLOCKS = 65_536


class Use(Enum):
    PUT = auto()  # computed here, or offered to the store
    HIT = auto()  # loaded from a lower tier, or used again on the device
    FOUND = auto()  # seen in a tier, by whomever it was put


@dataclass(slots=True)
class Entry:
    """A block. domain: None when unknown. stored_s, used_s: on the book's clock; stored_s None: before it began."""

    name: BlockName
    domain: bytes | None
    stored_s: float | None
    used_s: float
    hits: int = 0


@dataclass(frozen=True, slots=True)
class _Note:
    use: Use
    names: Sequence[BlockName]
    domain: bytes | None
    time_s: float
    tiers: Sequence[str] = ()


class BlockBook:
    """Notes are O(1) for the thread that makes them and are entered later, a few at a time, by whoever comes next.

    Invariant: at most `max_entries` entries and, beyond one note, `MAX_WAITING_BLOCKS` waiting blocks.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES, clock: Callable[[], float] = time.time) -> None:
        self._max_entries, self._clock = max_entries, clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # guarded by self._lock, as all below
        self._notes: deque[_Note] = deque()
        self._num_waiting = 0
        self._residency: dict[str, Residency] = {}
        self.num_lost = 0  # notes dropped, because nobody had time to enter them

    def note(
        self, use: Use, names: Sequence[BlockName], domain: bytes | None = None, tiers: Sequence[str] = ()
    ) -> None:
        """Something happened to blocks. Cheap, for the engine's thread; `names` must not change any more. tiers: of a
        HIT, which served each."""
        if not names:
            return
        note = _Note(use, names, domain, self._clock(), tiers)
        with self._lock:
            self._notes.append(note)
            self._num_waiting += len(names)
            if self._num_waiting > MAX_WAITING_BLOCKS // 4:
                self._enter_some(CHUNK_BLOCKS)
            while self._num_waiting > MAX_WAITING_BLOCKS and len(self._notes) > 1:
                self._num_waiting -= len(self._notes.popleft().names)
                self.num_lost += 1

    def left(self, tier: str, keys: Iterable[bytes]) -> None:
        """A tier has lost these: counted by how long they were stored and unused, where that is known."""
        with self._lock:
            self._enter_some(CHUNK_BLOCKS)
            now_s, counts = self._clock(), self._residency.setdefault(tier, Residency())
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and entry.stored_s is not None:
                    counts.evicted(max(0.0, now_s - entry.stored_s), max(0.0, now_s - entry.used_s))

    def residency(self, tier: str) -> dict[str, Any]:
        """How blocks fared in a tier since this began: three histograms, as plain data."""
        with self._lock:
            return self._residency.setdefault(tier, Residency()).as_dict()

    def find(self, keys: Iterable[bytes]) -> list[Entry | None]:
        """What is known of each; copies."""
        with self._lock:
            self._enter_some(self._num_waiting)
            return [None if (entry := self._entries.get(key)) is None else _copy(entry) for key in keys]

    def entries(self, domain: bytes | None = None) -> list[Entry]:
        """Copies of all, least used first; of one domain where that is given."""
        with self._lock:
            self._enter_some(self._num_waiting)
            return [_copy(e) for e in self._entries.values() if domain is None or e.domain in (None, domain)]

    def forget(self, keys: Iterable[bytes]) -> None:
        """These are gone for good."""
        with self._lock:
            self._enter_some(self._num_waiting)
            for key in keys:
                self._entries.pop(key, None)

    def _enter_some(self, max_blocks: int) -> None:
        """Enter waiting notes, oldest first. Needs the lock."""
        done = 0
        while self._notes and done < max_blocks:
            note = self._notes.popleft()
            now, later = note.names[: max_blocks - done], note.names[max_blocks - done :]
            if later:
                tiers = note.tiers[len(now) :]
                self._notes.appendleft(_Note(note.use, later, note.domain, note.time_s, tiers))
            for name, tier in zip_longest(now, note.tiers[: len(now)]):
                self._enter(note, name, tier)
            done += len(now)
            self._num_waiting -= len(now)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def _enter(self, note: _Note, name: BlockName, tier: str | None) -> None:
        entry = self._entries.get(name.key)
        if tier is not None and entry is not None:
            self._residency.setdefault(tier, Residency()).reused([max(0.0, note.time_s - entry.used_s)])
        if entry is None:
            stored_s = note.time_s if note.use is Use.PUT else None
            entry = self._entries[name.key] = Entry(name, note.domain, stored_s, note.time_s)
            if note.use is Use.FOUND:
                self._entries.move_to_end(name.key, last=False)
        elif note.use is not Use.FOUND:
            self._entries.move_to_end(name.key)
            entry.used_s = note.time_s
        if note.use is Use.HIT:
            entry.hits += 1


def _copy(entry: Entry) -> Entry:
    return Entry(entry.name, entry.domain, entry.stored_s, entry.used_s, entry.hits)
