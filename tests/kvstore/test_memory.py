"""The memory tier keeps the contract, and breaks exactly as it is told to."""

from __future__ import annotations

import random
import threading
import time

import pytest

from pagetier.kvstore.block import BlockStatus
from pagetier.kvstore.errors import TierUnavailable
from pagetier.kvstore.memory import Fault, Faults, MemoryTier
from pagetier.kvstore.tier import BlockRead, PinningTier, Tier
from tests.kvstore.tier_contract import (
    CAPACITY_BLOCKS,
    PART,
    PAYLOAD_BYTES,
    TierContract,
    addresses,
    assert_readable,
    chain,
    get,
    put,
    soon,
)

OK, MISS, ERROR = BlockStatus.OK, BlockStatus.MISS, BlockStatus.ERROR


class TestMemoryTier(TierContract):
    @pytest.fixture
    def tier(self) -> Tier:
        return MemoryTier(CAPACITY_BLOCKS * PAYLOAD_BYTES)


def small(num_blocks: int, faults: Faults | None = None) -> MemoryTier:
    return MemoryTier(num_blocks * PAYLOAD_BYTES, faults=faults)


def test_eviction_takes_the_tail_of_the_coldest_chain() -> None:
    tier, old, new = small(8), chain(4, seed=1), chain(4, seed=2)
    put(tier, old)
    put(tier, new)
    tier.touch(addresses(old))
    assert put(tier, chain(2, seed=3)) == [OK, OK]
    assert tier.lookup(addresses(old), soon()) == 4
    assert tier.lookup(addresses(new), soon()) == 2
    tier.check()


def test_a_chain_longer_than_the_tier_keeps_its_head() -> None:
    tier, names = small(5), chain(9)
    assert put(tier, names) == [OK] * 5 + [BlockStatus.DROPPED] * 4
    assert tier.lookup(addresses(names), soon()) == 5
    tier.check()


def test_pins_hold_records_and_are_bounded_to_half() -> None:
    tier, names = small(8), chain(6)
    assert isinstance(tier, PinningTier)
    put(tier, names)
    lease = tier.pin(addresses(names))
    assert len(lease) == 4
    put(tier, chain(8, seed=1))
    assert tier.lookup(addresses(names), soon()) == 4
    assert tier.num_pinned == 4
    tier.check()
    tier.unpin(lease)
    assert tier.num_pinned == 0
    assert tier.evict(8) == 8


def test_a_quarantined_record_takes_its_pin_along() -> None:
    faults = Faults(reads={1: Fault.CORRUPT})
    tier, names = small(8, faults), chain(3)
    put(tier, names)
    lease = tier.pin(addresses(names))
    assert len(lease) == 3
    assert get(tier, names)[0] == [OK, BlockStatus.CORRUPT, OK]
    tier.check()
    tier.unpin(lease)
    tier.check()
    assert tier.num_pinned == 0


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (Fault.ERROR, ERROR),
        (Fault.TIMEOUT, BlockStatus.TIMEOUT),
        (Fault.SHORT, ERROR),
        (Fault.CORRUPT, BlockStatus.CORRUPT),
        (Fault.LOST, MISS),
    ],
)
@pytest.mark.parametrize("position", range(4))
def test_the_nth_read_fails_and_only_that(fault: Fault, status: BlockStatus, position: int) -> None:
    tier, names = small(8, Faults(reads={position: fault})), chain(4)
    put(tier, names)
    statuses, _ = get(tier, names)
    assert statuses == [status if i == position else OK for i in range(4)]
    gone = fault in (Fault.CORRUPT, Fault.LOST)
    assert get(tier, names)[0] == [MISS if gone and i == position else OK for i in range(4)]
    tier.check()


def test_a_failed_write_is_never_visible() -> None:
    tier, names = small(8, Faults(writes={1: Fault.ERROR})), chain(3)
    assert put(tier, names) == [OK, ERROR, OK]
    assert tier.lookup(addresses(names), soon()) == 1
    assert put(tier, names) == [BlockStatus.EXISTS, OK, BlockStatus.EXISTS]
    assert_readable(tier, names)


def test_silence_lasts_until_the_deadline_and_not_beyond() -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    faults = Faults(silent=True)
    tier = MemoryTier(1 << 20, answers_at_once=False, faults=faults, clock=lambda: now[0], sleep=sleep)
    (name,) = chain(1)
    with pytest.raises(TierUnavailable, match="no answer in time"):
        tier.lookup(addresses([name]), 101.0)
    assert now[0] == 101.0
    assert tier.get([BlockRead(name, PART, memoryview(bytearray(8)))], 103.0) == [BlockStatus.TIMEOUT]
    assert now[0] == 103.0


def test_a_gate_holds_reads_past_their_deadline() -> None:
    faults = Faults(gate=threading.Event())
    assert faults.gate is not None
    tier, names = small(4, faults), chain(1)
    put(tier, names)
    buffer = bytearray(PAYLOAD_BYTES)
    answers: list[BlockStatus] = []
    read = BlockRead(names[0], PART, memoryview(buffer))
    thread = threading.Thread(target=lambda: answers.extend(tier.get([read], time.monotonic())))
    thread.start()
    assert faults.waiting.wait(5.0)
    assert buffer == bytearray(PAYLOAD_BYTES)
    faults.gate.set()
    thread.join()
    assert answers == [OK] and buffer != bytearray(PAYLOAD_BYTES)


def test_random_faults_replay() -> None:
    def statuses(seed: int) -> list[BlockStatus]:
        tier, names = small(64, Faults(rate=0.3, rng=random.Random(seed))), chain(40)
        return put(tier, names) + get(tier, names)[0]

    assert statuses(1) == statuses(1) != statuses(2)
    assert set(statuses(1)) > {OK, ERROR}


def test_an_orphan_takes_free_room_and_evicts_nothing() -> None:
    tier, names, other = small(5), chain(4), chain(6, seed=1)
    put(tier, names[:4])
    assert put(tier, [other[2], other[4]]) == [OK, BlockStatus.DROPPED]
    assert tier.lookup(addresses(names), soon()) == 4
