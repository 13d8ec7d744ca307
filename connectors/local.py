"""The connector for a store in this process whose bytes the CPU can reach: block ids become views, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pagetier.connectors.base import BlockStore
from pagetier.kvstore.admin import Admin
from pagetier.kvstore.block import BlockName
from pagetier.kvstore.events import EventLog
from pagetier.kvstore.identity import CacheIdentity
from pagetier.kvstore.job import Completion


class BlockBytes(Protocol):
    """The bytes of a device pool in CPU memory. A view is one whole block, contiguous, of the store's payload size."""

    def readable(self, block_id: int) -> memoryview:
        """What a save reads; stable until that save is done."""

    def writable(self, block_id: int) -> memoryview:
        """What a load writes to."""


class LocalConnector:
    """Implements `connectors.base.Connector`. Tiers read and write the pool itself: a block moves with one copy.

    Owns the store: `close` closes it. All calls come from the engine's core thread.
    """

    def __init__(self, store: BlockStore, blocks: BlockBytes) -> None:
        self._store, self._blocks = store, blocks

    def submit_lookup(self, blocks: Sequence[BlockName]) -> int:
        return self._store.submit_lookup(blocks)

    def submit_load(self, ticket: int, blocks: Sequence[BlockName], block_ids: Sequence[int]) -> int:
        return self._store.submit_load(ticket, blocks, [self._blocks.writable(i) for i in block_ids])

    def submit_save(self, blocks: Sequence[BlockName], block_ids: Sequence[int]) -> int:
        return self._store.submit_put(blocks, [self._blocks.readable(i) for i in block_ids])

    def touch(self, blocks: Sequence[BlockName]) -> None:
        self._store.touch(blocks)

    def release(self, ticket: int) -> None:
        self._store.release(ticket)

    def poll(self) -> list[Completion]:
        return self._store.poll()

    def set_identity(self, identity: CacheIdentity) -> None:
        self._store.set_identity(identity)

    def quarantine(self, blocks: Sequence[BlockName]) -> None:
        self._store.quarantine(blocks)

    @property
    def admin(self) -> Admin:
        """What people ask of the store."""
        return self._store.admin

    @property
    def events(self) -> EventLog:
        """What came into the store's tiers and left them."""
        return self._store.events

    @property
    def num_returns(self) -> int:
        return self._store.num_returns

    def stats(self) -> dict[str, Any]:
        return self._store.stats()

    def flush(self, timeout_s: float) -> bool:
        return self._store.flush(timeout_s)

    def check(self) -> None:
        """Raise AssertionError when an invariant of the store is broken."""
        self._store.check()

    def close(self) -> None:
        self._store.close()
