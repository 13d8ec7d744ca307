"""The connector API: all that an engine knows of the KV store.

Six verbs, none of which blocks: `submit_lookup`, `submit_load`, `submit_save`, `touch`, `release`, `poll`. Block ids
index the engine's device pool; whoever implements this turns ids into bytes. All calls come from the engine's core
thread. Answers arrive through `poll` only, as `pagetier.kvstore.job` values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pagetier.kvstore.admin import Admin
from pagetier.kvstore.block import BlockName
from pagetier.kvstore.events import EventLog
from pagetier.kvstore.identity import CacheIdentity
from pagetier.kvstore.job import Completion


class BlockStore(Protocol):
    """What connectors need of a store: `TieredStore` in this process, or `RemoteStore` for a service. The verbs are
    those of `TieredStore`; buffers belong to the caller as there.
    """

    @property
    def admin(self) -> Admin: ...
    @property
    def events(self) -> EventLog: ...
    @property
    def domain(self) -> bytes | None: ...
    @property
    def num_returns(self) -> int: ...

    def submit_lookup(self, blocks: Sequence[BlockName]) -> int: ...
    def submit_load(self, ticket: int, blocks: Sequence[BlockName], destinations: Sequence[memoryview]) -> int: ...
    def submit_put(
        self, blocks: Sequence[BlockName], sources: Sequence[memoryview], *, domain: bytes | None = None
    ) -> int: ...
    def is_stored(self, block: BlockName) -> bool: ...
    def touch(self, blocks: Sequence[BlockName]) -> None: ...
    def release(self, ticket: int) -> None: ...
    def poll(self) -> list[Completion]: ...
    def set_identity(self, identity: CacheIdentity) -> None: ...
    def quarantine(self, blocks: Sequence[BlockName]) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def flush(self, timeout_s: float) -> bool: ...
    def check(self) -> None: ...
    def close(self) -> None: ...


class Connector(Protocol):
    """The store as seen from an engine.

    Rules for the caller: a block given to `submit_load` or `submit_save` stays referenced until its job is done (for
    loads: quiesced); `submit_save` comes only after the kernel that wrote the block has finished; `submit_load` only
    after every reader of the destination's old content has; every ticket is released exactly once.
    """

    def submit_lookup(self, blocks: Sequence[BlockName]) -> int:
        """Ask for the longest stored prefix of a chain (head first); a ticket. What is found is pinned until
        `release`.
        """

    def submit_load(self, ticket: int, blocks: Sequence[BlockName], block_ids: Sequence[int]) -> int:
        """Load a leading run of the ticket's hit into device blocks; a job."""

    def submit_save(self, blocks: Sequence[BlockName], block_ids: Sequence[int]) -> int:
        """Store full device blocks under their names; a job. Names already stored cost nothing."""

    def touch(self, blocks: Sequence[BlockName]) -> None:
        """A request used this chain on the device: renew it in the lower tiers."""

    def release(self, ticket: int) -> None:
        """Drop a lookup's pins. The ticket may have an unfinished lookup or load; both then end unseen or as usual."""

    def poll(self) -> list[Completion]:
        """Everything that finished since the last call."""

    def set_identity(self, identity: CacheIdentity) -> None:
        """From now on lookups and saves are `identity`'s. What was begun goes on under the former one."""

    def quarantine(self, blocks: Sequence[BlockName]) -> None:
        """These were found to hold what they should not: take them out of every tier, soon."""

    @property
    def admin(self) -> Admin:
        """What people ask of the store; its methods may block, and are called from another thread than all others."""

    @property
    def events(self) -> EventLog:
        """What came into the store's tiers and left them."""

    @property
    def num_returns(self) -> int:
        """Times a tier came back after a failure or a restart: what was saved before may be missing there."""

    def stats(self) -> dict[str, Any]:
        """Per-tier counters in the shape of `GET /stats` (`tiers` only, without hits)."""

    def flush(self, timeout_s: float) -> bool:
        """Wait for queued saves; whether all were written. For shutdown only: this one blocks."""

    def check(self) -> None:
        """Raise AssertionError when an invariant of the connector or of the store is broken."""

    def close(self) -> None:
        """Let go of the store. Idempotent."""
