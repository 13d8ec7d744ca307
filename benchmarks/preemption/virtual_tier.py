"""A lower tier in virtual time: whatever was saved is there, and copies cross one link, one after the other.

What is unfair: copies take no processor time from steps beside them, the tier is never full, and lookups cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from pagetier.connectors.base import Connector
from pagetier.kvstore.block import BlockName, BlockStatus
from pagetier.kvstore.events import EventLog
from pagetier.kvstore.job import Completion, LoadDone, LookupDone, PutDone

NAME = "virtual"


class VirtualTier:
    """Implements what an engine asks of a `Connector`. bytes_per_s: of the link, for both directions together."""

    num_returns = 0
    admin = None

    def __init__(self, clock: Callable[[], float], bytes_per_s: float, block_nbytes: int) -> None:
        self.events = EventLog()
        self._clock, self._block_s = clock, block_nbytes / bytes_per_s
        self._stored: set[bytes] = set()
        self._free_s = 0.0  # when what has been submitted so far has crossed
        self._under_way: list[tuple[float, Completion]] = []
        self._num_jobs = 0

    def submit_lookup(self, blocks: Sequence[BlockName]) -> int:
        count = next((i for i, name in enumerate(blocks) if name.key not in self._stored), len(blocks))
        return self._submit(lambda job, due_s: LookupDone(job, (NAME,) * count), 0)

    def submit_load(self, ticket: int, blocks: Sequence[BlockName], block_ids: Sequence[int]) -> int:
        count = len(blocks)
        statuses, tiers = (BlockStatus.OK,) * count, (NAME,) * count
        return self._submit(lambda job, due_s: LoadDone(job, statuses, tiers, True, due_s), count)

    def submit_save(self, blocks: Sequence[BlockName], block_ids: Sequence[int]) -> int:
        new = [name.key for name in blocks if name.key not in self._stored]
        self._stored.update(new)
        statuses = (BlockStatus.OK,) * len(blocks)
        return self._submit(lambda job, due_s: PutDone(job, statuses, due_s), len(new))

    def _submit(self, answer: Callable[[int, float], Completion], num_blocks: int) -> int:
        self._num_jobs += 1
        due_s = self._clock()
        if num_blocks:
            self._free_s = due_s = max(self._free_s, due_s) + num_blocks * self._block_s
        self._under_way.append((due_s, answer(self._num_jobs, due_s)))
        return self._num_jobs

    def poll(self) -> list[Completion]:
        now_s = self._clock()
        done = [one for due_s, one in self._under_way if due_s <= now_s]
        self._under_way = [(due_s, one) for due_s, one in self._under_way if due_s > now_s]
        return done

    def touch(self, blocks: Sequence[BlockName]) -> None:
        """Nothing is ever evicted."""

    def release(self, ticket: int) -> None:
        """Nothing is ever evicted."""

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """There is nothing to let go of."""


def as_connector(tier: VirtualTier) -> Connector:
    """The tier has the verbs that engines without an operator use, and no others."""
    return cast(Connector, tier)
