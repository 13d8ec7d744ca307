"""KV events in the form in which they leave a process: runs of consecutive blocks; and as people see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pagetier.kvstore.block import BlockName
from pagetier.kvstore.events import EventKind, StoreEvent


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


def shown_event(event: KvEvent) -> dict[str, Any]:
    """An event as people see it: without tokens."""
    keys = event.key_list
    fields: dict[str, Any] = {"time_s": round(event.time_s, 6), "kind": event.kind, "tier": event.medium}
    fields |= {"num_blocks": len(keys), "keys": [key.hex() for key in keys]}
    if event.kind == "stored":
        num_tokens = len(event.tokens) // 4
        fields |= {
            "parent": event.parent.hex() or None,
            "tokens": [event.position, event.position + num_tokens - 1],
            "num_tokens": num_tokens,
        }
    return fields
