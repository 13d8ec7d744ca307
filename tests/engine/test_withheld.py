"""What tiers keep is found out once a step, however many ask."""

from __future__ import annotations

from typing import cast

from pagetier.engine.block_pool import BlockPool
from pagetier.engine.config import EngineConfig
from pagetier.engine.prefix_index import PrefixIndex
from pagetier.engine.transfers import PATIENCE_S, Transfers
from pagetier.engine.withheld import Withheld

BLOCK_SIZE, NUM_BLOCKS, TIMEOUT_S = 8, 10, 10.0


class Held:
    """Stands in for `Transfers`: blocks by how long they have been held."""

    def __init__(self) -> None:
        self.held_for_s: dict[int, float] = {}
        self.num_walks = 0

    def held_blocks(self, held_s: float) -> set[int]:
        self.num_walks += 1
        return {block for block, for_s in self.held_for_s.items() if for_s > held_s}


def withheld(timeout_s: float = TIMEOUT_S) -> tuple[Withheld, Held]:
    config = EngineConfig(num_blocks=NUM_BLOCKS, max_model_len=400, block_size=BLOCK_SIZE, transfer_timeout_s=timeout_s)
    index, held = PrefixIndex(BLOCK_SIZE), Held()
    return Withheld(config, BlockPool(NUM_BLOCKS, index), index, cast(Transfers, held)), held


def test_they_are_looked_for_once_a_step_and_anew_in_the_next() -> None:
    kept, held = withheld()
    held.held_for_s = {1: 2 * PATIENCE_S, 2: 2 * TIMEOUT_S}
    for _ in range(20):
        assert kept.are_any
        assert kept.are_missed(9 * BLOCK_SIZE, ()) and not kept.are_missed(9 * BLOCK_SIZE, (1,))
        assert kept.complaint(10 * BLOCK_SIZE, ()) and not kept.complaint(9 * BLOCK_SIZE, ())
    assert held.num_walks == 2, "one for each age that counts"
    held.held_for_s = {}
    kept.begin_step()
    assert not kept.are_any and not kept.are_missed(9 * BLOCK_SIZE, ()) and not kept.complaint(10 * BLOCK_SIZE, ())


def test_a_timeout_below_the_usual_patience_is_the_patience() -> None:
    kept, held = withheld(PATIENCE_S / 4)
    held.held_for_s = {1: PATIENCE_S / 2}
    assert kept.are_any and kept.are_missed(10 * BLOCK_SIZE, ()) and kept.complaint(10 * BLOCK_SIZE, ())
