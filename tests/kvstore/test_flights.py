"""Single flight: loads that want the same blocks at the same time read each once, and none waits for another."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest

from pagetier.kvstore.block import BlockName, BlockStatus
from pagetier.kvstore.executor import SeededExecutor
from pagetier.kvstore.flights import MAX_WAITING
from pagetier.kvstore.job import LoadDone, LoadQuiesced
from pagetier.kvstore.memory import Fault, MemoryTier
from tests.kvstore.rig import PAYLOAD_BYTES, Buffers, Clock, Rig, memory, store_in
from tests.kvstore.tier_contract import chain

OK, TIMEOUT = BlockStatus.OK, BlockStatus.TIMEOUT


def started(rig: Rig, names: Sequence[BlockName]) -> tuple[int, int, Buffers]:
    """A load that was begun and is not waited for: ticket, job, buffers."""
    ticket, tiers = rig.lookup(names)
    assert len(tiers) == len(names)
    buffers = Buffers(names)
    return ticket, rig.store.submit_load(ticket, names, buffers.views), buffers


def ended(rig: Rig, load: tuple[int, int, Buffers]) -> LoadDone:
    ticket, job, buffers = load
    done = rig.wait(LoadDone, job)
    buffers.assert_right(done.statuses)
    rig.store.release(ticket)
    return done


def num_read(tier: MemoryTier) -> int:
    """Blocks."""
    return tier.counters().bytes_read // PAYLOAD_BYTES


def all_are_reading(rig: Rig) -> bool:
    """Whether nothing waits for a thread."""
    return all(not port.read_executor._tasks for port in rig.store._ports)  # type: ignore[attr-defined]


@pytest.fixture
def gated() -> MemoryTier:
    """A tier whose reads wait for `faults.gate`."""
    tier = memory("nvme")
    tier.faults.gate = threading.Event()
    return tier


def opened(tier: MemoryTier) -> None:
    assert tier.faults.gate is not None
    tier.faults.gate.set()


@pytest.mark.parametrize("num_followers", range(1, MAX_WAITING + 2))
def test_a_block_that_is_being_read_is_read_once(gated: MemoryTier, num_followers: int) -> None:
    """Beyond a few followers more read for themselves, so that their leader does not copy for ever."""
    names = chain(3)
    with Rig(gated, threads=True, budget_s=1e6) as rig:
        store_in(gated, names)
        loads = [started(rig, names)]
        assert gated.faults.waiting.wait(10)
        loads += [started(rig, names) for _ in range(num_followers)]
        rig.until(lambda: all_are_reading(rig))
        opened(gated)
        for load in loads:
            assert ended(rig, load).statuses == (OK,) * 3
        assert num_read(gated) + rig.store.counters()["shared_reads"] == 3 * (1 + num_followers)
        assert num_read(gated) == (3 if num_followers <= MAX_WAITING else 6)


@pytest.mark.parametrize("seed", range(40))
def test_what_a_load_has_read_already_is_copied_from_it_until_it_is_answered(seed: int) -> None:
    """Seeded: the second load begins while the first is anywhere between its first and its last piece."""
    rng, names, tier = random.Random(seed), chain(24), memory("redis")
    with Rig(tier, executor=SeededExecutor(seed, eagerness=0.3), piece_bytes=2 * PAYLOAD_BYTES) as rig:
        store_in(tier, names)
        loads = [started(rig, names)]
        for _ in range(rng.randrange(12)):
            rig.seen += rig.store.poll()
        is_over = rig.find(LoadDone, loads[0][1]) is not None
        loads.append(started(rig, names))
        for load in loads:
            assert ended(rig, load).statuses == (OK,) * 24
        assert num_read(tier) + rig.store.counters()["shared_reads"] == 48
        if not is_over:
            assert rig.store.counters()["shared_reads"] > 0


@pytest.mark.parametrize("fault", list(Fault))
def test_a_leader_that_fails_is_replaced(gated: MemoryTier, fault: Fault) -> None:
    names = chain(1)
    with Rig(gated, memory("redis"), threads=True, budget_s=1e6) as rig:
        store_in(gated, names)
        store_in(rig.tiers[1], names)
        gated.faults.reads[0] = fault
        leader = started(rig, names)
        assert gated.faults.waiting.wait(10)
        follower = started(rig, names)
        rig.until(lambda: all_are_reading(rig))
        opened(gated)
        assert ended(rig, leader).statuses == (OK,)  # from the next tier
        assert ended(rig, follower).statuses == (OK,)


def test_who_waits_for_a_leader_whose_time_is_up_asks_for_itself() -> None:
    """The leader's read hangs past its deadline; the follower, with more time, is not held up with it."""
    names, clock = chain(1), Clock()
    tier = memory("nvme")
    tier.faults.gate = threading.Event()
    with Rig(tier, threads=True, clock=clock, budget_s=5.0) as rig:
        store_in(tier, names)
        leader = started(rig, names)
        assert tier.faults.waiting.wait(10)
        clock.sleep(4.0)
        follower = started(rig, names)
        rig.until(lambda: all_are_reading(rig))
        clock.sleep(2.0)
        done = rig.wait(LoadDone, leader[1])
        assert done.statuses == (TIMEOUT,) and not done.quiesced
        opened(tier)
        assert ended(rig, follower).statuses == (OK,)
        rig.wait(LoadQuiesced, leader[1])
        rig.store.release(leader[0])


@pytest.mark.parametrize("seed", range(60))
def test_overlapping_loads_over_failing_tiers_answer_every_block_rightly(seed: int) -> None:
    """Whatever is shared, fails or comes late: all is answered, what is OK is right, and nobody leads at the end."""
    rng, clock = random.Random(seed), Clock()
    tiers = [memory("nvme", clock=clock), memory("redis", clock=clock)]
    trunk, forks = chain(12), [chain(12), chain(12, seed=1)]
    executor = SeededExecutor(seed, eagerness=rng.choice((0.2, 0.5, 0.9)))
    with Rig(*tiers, executor=executor, clock=clock, budget_s=2.0, piece_bytes=2 * PAYLOAD_BYTES) as rig:
        for names in forks:
            for tier in tiers:
                store_in(tier, names)
        for tier in tiers:
            tier.faults.rate, tier.faults.rng = rng.choice((0.0, 0.1, 0.5)), rng
        under_way: list[tuple[int, int, Buffers]] = []
        for _ in range(12):
            names = rng.choice([trunk, *forks])[rng.randrange(4) :][: rng.randint(1, 12)]
            ticket, tiers_found = rig.lookup(names)
            buffers = Buffers(names[: len(tiers_found)])
            if buffers.names:
                under_way.append((ticket, rig.store.submit_load(ticket, buffers.names, buffers.views), buffers))
            else:
                rig.store.release(ticket)
            clock.sleep(rng.choice((0.0, 0.0, 0.3)))
            rig.store.check()
            while len(under_way) > 3:
                ended(rig, under_way.pop(0))
        for load in under_way:
            ended(rig, load)
        rig.until(lambda: not rig.store.has_work)
        assert not rig.store._flights
