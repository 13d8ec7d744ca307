"""The host tier keeps the contract, keeps chains, and never lets go of a slot that is being read."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from pagetier.kvstore.arena import POISON
from pagetier.kvstore.block import BlockStatus
from pagetier.kvstore.host import HostTier
from pagetier.kvstore.tier import BlockRead, BlockWrite, PinningTier, Tier
from tests.kvstore.tier_contract import (
    CAPACITY_BLOCKS,
    PART,
    PAYLOAD_BYTES,
    TierContract,
    addresses,
    assert_readable,
    chain,
    get,
    payload_of,
    put,
    soon,
)

OK, MISS = BlockStatus.OK, BlockStatus.MISS


class TestHostTier(TierContract):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        tier = HostTier(CAPACITY_BLOCKS * PAYLOAD_BYTES, slab_bytes=16 * PAYLOAD_BYTES)
        yield tier
        tier.close()


@pytest.fixture
def small() -> Iterator[HostTier]:
    """Eight blocks in two slabs."""
    tier = HostTier(8 * PAYLOAD_BYTES, slab_bytes=4 * PAYLOAD_BYTES, poison=True)
    yield tier
    tier.check()
    tier.close()


def test_eviction_takes_the_tail_of_the_coldest_chain(small: HostTier) -> None:
    old, new = chain(4, seed=1), chain(4, seed=2)
    put(small, old)
    put(small, new)
    small.touch(addresses(old))
    assert put(small, chain(2, seed=3)) == [OK, OK]
    assert small.lookup(addresses(old), soon()) == 4
    assert small.lookup(addresses(new), soon()) == 2


def test_a_chain_longer_than_the_tier_keeps_its_head(small: HostTier) -> None:
    names = chain(12)
    assert put(small, names) == [OK] * 8 + [BlockStatus.DROPPED] * 4
    assert_readable(small, names[:8])


def test_pins_hold_at_most_half(small: HostTier) -> None:
    assert isinstance(small, PinningTier)
    names = chain(6)
    put(small, names)
    lease = small.pin(addresses(names))
    assert len(lease) == 4
    put(small, chain(8, seed=1))
    assert_readable(small, names[:4])
    small.check()
    small.unpin(lease)
    assert small.num_pinned == 0


def test_a_block_that_fits_no_slab_is_dropped(small: HostTier) -> None:
    (name,) = chain(1)
    assert small.put([BlockWrite(name, PART, memoryview(bytes(5 * PAYLOAD_BYTES)))], soon()) == [BlockStatus.DROPPED]


def test_a_flipped_bit_is_a_miss_and_a_quarantine(small: HostTier) -> None:
    names = chain(3)
    put(small, names)
    entry = small._entries[addresses(names)[1]]
    view = small._arena.view(entry.slot)
    view[PAYLOAD_BYTES // 2] ^= 1
    view.release()
    assert get(small, names)[0] == [OK, BlockStatus.CORRUPT, OK]
    assert get(small, names)[0] == [OK, MISS, OK]
    assert small.counters().corrupt == 1


def test_reads_race_evictions_without_a_wrong_byte(small: HostTier) -> None:
    """Readers copy outside the lock; a slot given away under them would show another block's bytes."""
    stop = threading.Event()
    failures: list[str] = []

    def read(seed: int) -> None:
        names = chain(4, seed=seed)
        buffer = bytearray(PAYLOAD_BYTES)
        while not stop.is_set():
            for name in names:
                (status,) = small.get([BlockRead(name, PART, memoryview(buffer))], soon())
                if status is OK and bytes(buffer) != payload_of(name):
                    failures.append(f"wrong bytes of {name.key.hex()[:16]}")
                if status not in (OK, MISS):
                    failures.append(status)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for round_ in range(60):
        put(small, chain(4, seed=round_ % 4))
        small.delete(addresses(chain(4, seed=(round_ + 1) % 4)))
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_bytes_of_a_freed_slot_are_gone(small: HostTier) -> None:
    """And a stray write into one is found by the next check."""
    (name,) = chain(1)
    put(small, [name])
    slot = small._entries[addresses([name])[0]].slot
    small.delete(addresses([name]))
    view = small._arena.view(slot)
    assert bytes(view) == bytes([POISON]) * PAYLOAD_BYTES
    small.check()
    view[100] ^= 1
    with pytest.raises(AssertionError, match="written while free"):
        small.check()
    view[100] ^= 1
    view.release()
