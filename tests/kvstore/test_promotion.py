"""Promotion of what a slower tier served: to faster ones, when nothing of its load is read any more."""

from __future__ import annotations

import pytest

from pagetier.kvstore.executor import SeededExecutor
from pagetier.kvstore.job import LoadDone
from tests.kvstore.rig import PAYLOAD_BYTES, Buffers, Rig, memory, store_in
from tests.kvstore.test_store import Unpinned
from tests.kvstore.tier_contract import chain


@pytest.mark.parametrize("seed", range(20))
def test_a_promotion_waits_for_the_end_of_its_load(seed: int) -> None:
    """Else what is written competes with what is yet to be read, and the request waits for both."""
    nvme, redis, names = Unpinned("nvme"), memory("redis"), chain(24)
    executor = SeededExecutor(seed, eagerness=0.3)
    with Rig(nvme, redis, executor=executor, piece_bytes=2 * PAYLOAD_BYTES) as rig:
        store_in(redis, names)
        ticket, _ = rig.lookup(names)
        job = rig.store.submit_load(ticket, names, Buffers(names).views)
        was_held = False
        while rig.find(LoadDone, job) is None:
            assert nvme.counters().blocks == 0
            was_held |= rig.store.counters()["queued_put_bytes"] > 0
            rig.seen += rig.store.poll()
            rig.store.check()
        rig.store.release(ticket)
        assert was_held and rig.store.flush(5.0)
        assert nvme.counters().blocks == 24
        assert rig.store.counters()["queued_put_bytes"] == 0


def test_copies_of_loads_under_way_are_given_back_when_the_store_closes() -> None:
    nvme, redis, names = Unpinned("nvme"), memory("redis"), chain(8)
    rig = Rig(nvme, redis, executor=SeededExecutor(0, eagerness=0.2), piece_bytes=PAYLOAD_BYTES)
    store_in(redis, names)
    ticket, _ = rig.lookup(names)
    rig.store.submit_load(ticket, names, Buffers(names).views)
    while not rig.store.counters()["queued_put_bytes"]:
        rig.store.poll()
    rig.store.close()
    assert rig.store.counters()["queued_put_bytes"] == 0
