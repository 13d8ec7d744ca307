"""Blocks that were found wrong leave every tier before anything else is written there, and can be stored anew."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import xxhash

from pagetier.kvstore.block import Address, BlockName, BlockStatus
from pagetier.kvstore.executor import SeededExecutor
from pagetier.kvstore.job import PutDone
from pagetier.kvstore.memory import MemoryTier
from pagetier.kvstore.tier import BlockRead, Tier
from tests.kvstore.rig import PAYLOAD_BYTES, Rig, memory, payload, store_in
from tests.kvstore.test_store import Unpinned
from tests.kvstore.tier_contract import PART, addresses, chain

OK = BlockStatus.OK


def held(tier: Tier, name: BlockName) -> bytes | None:
    buffer = bytearray(PAYLOAD_BYTES)
    (status,) = tier.get([BlockRead(name, PART, memoryview(buffer))], float("inf"))
    return bytes(buffer) if status is OK else None


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("num_queued", [0, 3, 12])
def test_a_wrong_block_is_replaced_whatever_the_order_of_the_threads(seed: int, num_queued: int) -> None:
    """Put right behind its quarantine, with other puts before it: what is stored at the end is what was put."""
    names, others = chain(6), chain(num_queued, seed=5)
    tiers = [memory("host"), memory("nvme"), memory("redis")]
    executor = SeededExecutor(seed, random.Random(seed).choice((0.1, 0.5, 1.0)))
    with Rig(*tiers, executor=executor) as rig:
        for tier in tiers:
            store_in(tier, names)
        wrong = b"\xbd" * PAYLOAD_BYTES
        for tier in tiers[1:]:
            tier._records[addresses(names)[2]].payload[:] = wrong
            tier._records[addresses(names)[2]].checksum = xxhash.xxh3_128_intdigest(wrong)
        if others:
            rig.store.submit_put(others, [memoryview(payload(name)) for name in others])
        rig.store.quarantine(names[:3])
        assert not rig.store.is_stored(names[0]), "it is on its way out"
        job = rig.store.submit_put(names, [memoryview(payload(name)) for name in names])
        assert rig.wait(PutDone, job).statuses[:3] == (OK, OK, OK)
        rig.until(lambda: not rig.store.has_work)
        for tier in tiers:
            assert [held(tier, name) for name in names] == [payload(name) for name in names]


def test_a_copy_that_waits_to_be_promoted_goes_too() -> None:
    """A slower tier's wrong block must not arrive in a faster one after it was found."""
    nvme, redis = Unpinned("nvme"), memory("redis")
    names = chain(3)
    with Rig(nvme, redis, executor=SeededExecutor(0, 0.0)) as rig:
        store_in(redis, names)
        ticket, found = rig.lookup(names)
        assert found == ("redis",) * 3
        rig.load(ticket, names)
        rig.store.release(ticket)
        waiting = rig.store.counters()["queued_put_bytes"]
        rig.store.quarantine(names)
        assert waiting == 0 or rig.store.counters()["queued_put_bytes"] == 0
        rig.until(lambda: not rig.store.has_work)
        assert [held(tier, name) for tier in (nvme, redis) for name in names] == [None] * 6


class Keeps(MemoryTier):
    """A tier that keeps copies of what it takes out of use."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes, name="nvme")
        self.kept: list[tuple[Address, str]] = []

    def quarantine(self, taken: Sequence[Address], reason: str) -> None:
        self.kept += [(address, reason) for address in taken if self.delete([address])]


def test_a_tier_that_keeps_copies_is_asked_to() -> None:
    tier, names = Keeps(1 << 16), chain(4)
    with Rig(tier) as rig:
        rig.put(names)
        rig.store.quarantine(names[1:3])
        rig.until(lambda: not rig.store.has_work)
        assert tier.kept == [(address, "shadow check") for address in addresses(names)[1:3]]
        rig.store.quarantine(names[1:3])
        rig.until(lambda: not rig.store.has_work)
        assert len(tier.kept) == 2, "what is not there costs nothing"
