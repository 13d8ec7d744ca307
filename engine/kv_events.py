"""KV events on their way out of the engine: what came into the device pool and the tiers below, and what left them.

Owns the form in which they cross to the API process, and the listener that tells of the device pool while somebody
follows. Knows no socket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pagetier.engine.prefix_index import PrefixIndex
from pagetier.kvstore.block import BlockName
from pagetier.kvstore.events import EventKind, EventLog, StoreEvent

MAX_EVENTS = 256  # taken at once: between two steps nobody shall wait for who follows
DEVICE = "device"


class KvEvent(NamedTuple):
    """One thing that happened to a run of blocks of one tier; a message's form of it.

    kind: stored, removed or cleared. keys: 32 bytes each, joined. parent: the key before the first, empty for the first
    of a chain. tokens: u32 little-endian, joined; empty unless stored. position: of the first token. block_tokens: of
    each block.
    """

    time_s: float
    kind: str
    medium: str
    keys: bytes = b""
    parent: bytes = b""
    position: int = 0
    tokens: bytes = b""
    block_tokens: int = 0

    @property
    def key_list(self) -> list[bytes]:
        return [self.keys[i : i + 32] for i in range(0, len(self.keys), 32)]


def forms_of(event: StoreEvent) -> Iterator[KvEvent]:
    """An event of the log as messages: one for each run in which a block is the parent of the next."""
    kind, medium = str(event.kind), event.medium
    if event.kind is not EventKind.STORED:
        yield KvEvent(event.time_s, kind, medium, b"".join(event.keys))
        return
    for run in _runs(event.names):
        yield KvEvent(
            event.time_s,
            kind,
            medium,
            b"".join(name.key for name in run),
            b"" if run[0].parent == run[0].root else run[0].parent,
            run[0].position,
            b"".join(name.tokens for name in run),
            run[0].num_tokens,
        )


def _runs(names: Sequence[BlockName]) -> Iterator[Sequence[BlockName]]:
    first = 0
    for i in range(1, len(names) + 1):
        if i == len(names) or names[i].parent != names[i - 1].key or names[i].num_tokens != names[first].num_tokens:
            yield names[first:i]
            first = i


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

    def close(self) -> None:
        """Stop telling."""
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
