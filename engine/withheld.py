"""Blocks that transfers have held for so long that they may never come back, and who has no room without them.

A block that a tier still reads or writes is nobody else's, however long that takes. So a medium that hangs makes the
pool smaller: what fits the rest goes on, what does not waits for a while and then ends. Once the transfer ends, its
blocks are the pool's again.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagetier.engine.block_pool import BlockPool
from pagetier.engine.config import EngineConfig
from pagetier.engine.messages import TIERS_HANG
from pagetier.engine.prefix_index import PrefixIndex
from pagetier.engine.transfers import PATIENCE_S, Transfers


class Withheld:
    """Owner: core thread. Which blocks are withheld is found out once a step: only between two steps do transfers end.

    num_tokens: a request is to have blocks for. own: the blocks that it has, or would share.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, index: PrefixIndex, transfers: Transfers) -> None:
        self._config, self._pool, self._index, self._transfers = config, pool, index, transfers
        self._patience_s = min(PATIENCE_S, config.transfer_timeout_s)
        self._kept: dict[float, set[int]] = {}  # of this step, by how long at least they have been held

    def begin_step(self) -> None:
        """Transfers may have begun, ended or come of age."""
        self._kept.clear()

    @property
    def are_any(self) -> bool:
        """Whether there are any, which costs next to nothing where no transfer is late."""
        return bool(self._kept_from_others(self._patience_s))

    def are_missed(self, num_tokens: int, own: Iterable[int]) -> bool:
        """Whether a request that fits the pool has no room without them, whoever else gave blocks up."""
        return self._num_lacking(num_tokens, own, self._patience_s) > 0

    def complaint(self, num_tokens: int, own: Iterable[int]) -> str:
        """One line for a request that has missed them for too long; "" while there is hope."""
        timeout_s, num_blocks = self._config.transfer_timeout_s, self._pool.num_blocks
        num_lacking = self._num_lacking(num_tokens, own, timeout_s)
        if num_lacking <= 0:
            return ""
        return (
            f"{TIERS_HANG}: {num_lacking} more of the {num_blocks} blocks of the KV cache are needed than are left by "
            f"reads and writes that have not ended for {timeout_s:g} s; try again later, and if it stays so find the "
            "tier at fault with `pagetier doctor` and restart without it"
        )

    def _num_lacking(self, num_tokens: int, own: Iterable[int], held_s: float) -> int:
        need = -(-num_tokens // self._config.block_size)
        held = self._kept_from_others(held_s)
        if not held or need > self._pool.num_blocks:
            return 0
        return need - (self._pool.num_blocks - len(held.difference(own)))

    def _kept_from_others(self, held_s: float) -> set[int]:
        """Blocks of such transfers, and those before them in their chains: a parent is not evicted before its child."""
        kept = self._kept.get(held_s)
        if kept is None:
            kept = self._kept[held_s] = self._walk(held_s)
        return kept

    def _walk(self, held_s: float) -> set[int]:
        kept: set[int] = set()
        for block in self._transfers.held_blocks(held_s):
            kept.add(block)
            node = self._index.node_of(block)
            parent = None if node is None else node.parent
            while parent is not None and parent.parent is not None and parent.block not in kept:
                kept.add(parent.block)
                parent = parent.parent
        return kept
