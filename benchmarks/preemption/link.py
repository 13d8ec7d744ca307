"""A connector behind a link of a given speed: what it finished is told only when the bytes could have crossed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

from pagetier.connectors.base import Connector
from pagetier.kvstore.block import BlockName
from pagetier.kvstore.job import Completion, LoadDone, LoadQuiesced, PutDone


class SlowLink:
    """Loads and saves cross one after the other; all else is the connector's. bytes_per_s may be set while it is idle;
    None: as fast as the connector itself."""

    def __init__(self, connector: Connector, block_nbytes: int) -> None:
        self.bytes_per_s: float | None = None
        self._connector, self._block_nbytes = connector, block_nbytes
        self._free_s = 0.0  # when what has been submitted so far has crossed
        self._due_s: dict[int, float] = {}
        self._held: list[Completion] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)

    def submit_load(self, ticket: int, blocks: Sequence[BlockName], block_ids: Sequence[int]) -> int:
        return self._timed(self._connector.submit_load(ticket, blocks, block_ids), len(blocks))

    def submit_save(self, blocks: Sequence[BlockName], block_ids: Sequence[int]) -> int:
        return self._timed(self._connector.submit_save(blocks, block_ids), len(blocks))

    def _timed(self, job: int, num_blocks: int) -> int:
        if self.bytes_per_s is not None:
            start_s = max(self._free_s, time.monotonic())
            self._free_s = self._due_s[job] = start_s + num_blocks * self._block_nbytes / self.bytes_per_s
        return job

    def poll(self) -> list[Completion]:
        now_s = time.monotonic()
        done = [*self._held, *self._connector.poll()]
        self._held = [one for one in done if self._is_early(one, now_s)]
        return [one for one in done if not self._is_early(one, now_s)]

    def _is_early(self, completion: Completion, now_s: float) -> bool:
        if not isinstance(completion, LoadDone | LoadQuiesced | PutDone):
            return False
        return self._due_s.get(completion.job, 0.0) > now_s


def as_connector(link: SlowLink) -> Connector:
    """The link has every verb, some by delegation, which a type checker cannot see."""
    return cast(Connector, link)
