"""Queues of puts before a tier that is silent: sources, which are device blocks, come back within one budget."""

from __future__ import annotations

import pytest

from pagetier.kvstore.block import BlockStatus
from pagetier.kvstore.memory import Fault
from tests.kvstore.rig import Clock, Rig, memory
from tests.kvstore.tier_contract import chain

PUT_BUDGET_S = 2.0


@pytest.mark.parametrize("num_blocks", [1, 4, 5, 32])
def test_a_silent_tier_holds_sources_for_one_budget(num_blocks: int) -> None:
    """However many pieces of four blocks wait."""
    clock = Clock()
    tier = memory("redis", 64, clock)
    tier.faults.silent = True
    with Rig(tier, clock=clock, put_budget_s=PUT_BUDGET_S) as rig:
        start_s, names = clock.now_s, chain(num_blocks)
        statuses = rig.put(names)
        assert clock.now_s - start_s == pytest.approx(PUT_BUDGET_S)
        tried = min(num_blocks, 4)
        assert statuses[:tried] == (BlockStatus.TIMEOUT,) * tried
        assert set(statuses[tried:]) <= {BlockStatus.DROPPED}
        assert rig.store.counters()["dropped_puts"] == num_blocks - tried
        tier.faults.silent = False
        assert rig.put(names) == (BlockStatus.OK,) * num_blocks, "well again, it takes all of the chain"


def test_a_slow_tier_keeps_what_it_managed_and_is_asked_for_the_rest() -> None:
    """A piece that got through in part is no silence: the pieces behind it are tried."""
    clock = Clock()
    tier = memory("redis", 64, clock)
    with Rig(tier, clock=clock, put_budget_s=PUT_BUDGET_S) as rig:
        tier.faults.writes = {2: Fault.TIMEOUT, 3: Fault.TIMEOUT}
        ok, late = BlockStatus.OK, BlockStatus.TIMEOUT
        assert rig.put(chain(8)) == (ok, ok, late, late, ok, ok, ok, ok)
