"""The contract of `pagetier.kvstore.tier.Tier` as a suite: subclass `TierContract`, give it a `tier` fixture.

    class TestMemoryTier(TierContract):
        @pytest.fixture
        def tier(self) -> Iterator[Tier]: ...

The tier must hold at least CAPACITY_BLOCKS blocks of PAYLOAD_BYTES and must have been made for domain DOMAIN.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from pagetier.kvstore.block import Address, BlockName, BlockStatus, Part
from pagetier.kvstore.keys import chain_names, root_key
from pagetier.kvstore.tier import BlockRead, BlockWrite, DescribingTier, ListingTier, ReportingTier, Tier

DOMAIN = bytes(range(32))
PART = Part(0, 0, 2, 0, 1)
OTHER_PART = Part(0, 0, 2, 1, 2)
PAYLOAD_BYTES = 8192
CAPACITY_BLOCKS = 256  # at least this many must fit
BLOCK_SIZE = 4
ANSWER_S = 10.0  # ample: no test of the contract is about time but the two that say so

OK, MISS, EXISTS = BlockStatus.OK, BlockStatus.MISS, BlockStatus.EXISTS


def soon() -> float:
    """A deadline that a healthy tier meets."""
    return time.monotonic() + ANSWER_S


def chain(num_blocks: int, seed: int = 0, salt: bytes = b"", block_size: int = BLOCK_SIZE) -> list[BlockName]:
    """Names of a chain of random tokens; equal seeds give equal chains."""
    token_ids = np.random.default_rng(seed).integers(0, 50_000, num_blocks * block_size, dtype=np.uint32)
    return chain_names(root_key(DOMAIN, salt), token_ids, block_size)


def payload_of(name: BlockName, part: Part = PART, nbytes: int = PAYLOAD_BYTES) -> bytes:
    """Bytes that belong to one block and part, and to no other."""
    seed = int.from_bytes(name.key[:8], "little") ^ hash((part.first_layer, part.first_head))
    return np.random.default_rng(seed & 0xFFFF_FFFF_FFFF).bytes(nbytes)


def addresses(names: Sequence[BlockName], part: Part = PART) -> list[Address]:
    return [Address(name.key, part) for name in names]


def put(tier: Tier, names: Sequence[BlockName], part: Part = PART) -> list[BlockStatus]:
    writes = [BlockWrite(name, part, memoryview(payload_of(name, part))) for name in names]
    return tier.put(writes, soon())


def get(tier: Tier, names: Sequence[BlockName], part: Part = PART) -> tuple[list[BlockStatus], list[bytearray]]:
    buffers = [bytearray(PAYLOAD_BYTES) for _ in names]
    reads = [BlockRead(name, part, memoryview(buffer)) for name, buffer in zip(names, buffers, strict=True)]
    return tier.get(reads, soon()), buffers


def assert_readable(tier: Tier, names: Sequence[BlockName], part: Part = PART) -> None:
    """All of `names` are there, with their own bytes."""
    statuses, buffers = get(tier, names, part)
    assert statuses == [OK] * len(names)
    for name, buffer in zip(names, buffers, strict=True):
        assert bytes(buffer) == payload_of(name, part)


class TierContract:
    """Every lower tier passes all of these."""

    @pytest.fixture
    def tier(self) -> object:
        raise NotImplementedError("give the suite a tier")

    def test_its_name_is_one_word(self, tier: Tier) -> None:
        assert tier.name and tier.name.isidentifier()

    def test_what_was_put_is_found_and_read_back(self, tier: Tier) -> None:
        names = chain(20)
        assert tier.lookup(addresses(names), soon()) == 0
        assert put(tier, names) == [OK] * 20
        assert tier.lookup(addresses(names), soon()) == 20
        assert_readable(tier, names)
        tier.check()

    def test_empty_batches_are_answered(self, tier: Tier) -> None:
        assert tier.lookup([], soon()) == 0
        assert tier.get([], soon()) == []
        assert tier.put([], soon()) == []
        assert tier.delete([]) == 0
        tier.touch([])

    def test_lookup_counts_leading_records_only(self, tier: Tier) -> None:
        names = chain(10)
        put(tier, names[:4] + names[5:])
        assert tier.lookup(addresses(names), soon()) == 4
        assert tier.lookup(addresses(names[4:]), soon()) == 0
        assert tier.lookup(addresses(names[5:]), soon()) == 5

    def test_a_batch_answers_per_block(self, tier: Tier) -> None:
        names = chain(9)
        put(tier, names[0:3] + names[4:8])
        statuses, buffers = get(tier, names)
        assert statuses == [OK, OK, OK, MISS, OK, OK, OK, OK, MISS]
        for i in (0, 1, 2, 4, 5, 6, 7):
            assert bytes(buffers[i]) == payload_of(names[i])

    def test_order_of_reads_is_free(self, tier: Tier) -> None:
        names = chain(12)
        put(tier, names)
        assert_readable(tier, [names[i] for i in (7, 3, 11, 0, 5, 1)])

    def test_a_second_put_writes_nothing(self, tier: Tier) -> None:
        names = chain(3)
        assert put(tier, names) == [OK] * 3
        before = tier.counters()
        other = [BlockWrite(name, PART, memoryview(bytes(PAYLOAD_BYTES))) for name in names]
        assert tier.put(other, soon()) == [EXISTS] * 3
        assert_readable(tier, names)
        assert tier.counters().blocks == before.blocks

    def test_a_put_mixes_new_and_old(self, tier: Tier) -> None:
        names = chain(6)
        put(tier, names[:2])
        assert put(tier, names) == [EXISTS, EXISTS, OK, OK, OK, OK]
        assert_readable(tier, names)

    def test_parts_of_a_block_are_separate_records(self, tier: Tier) -> None:
        names = chain(3)
        put(tier, names)
        assert tier.lookup(addresses(names, OTHER_PART), soon()) == 0
        assert get(tier, names, OTHER_PART)[0] == [MISS] * 3
        assert put(tier, names, OTHER_PART) == [OK] * 3
        assert_readable(tier, names)
        assert_readable(tier, names, OTHER_PART)

    def test_salted_chains_are_separate(self, tier: Tier) -> None:
        plain, salted = chain(3), chain(3, salt=b"tenant")
        put(tier, plain)
        assert tier.lookup(addresses(salted), soon()) == 0
        assert get(tier, salted)[0] == [MISS] * 3

    def test_another_domain_begins_empty_and_the_former_goes_on_for_who_names_it(self, tier: Tier) -> None:
        """As when weights change: what was begun ends under the old domain, all that is new knows nothing of it."""
        other = bytes(reversed(DOMAIN))
        before, late = chain(4), chain(4, seed=1)
        after = chain_names(root_key(other), np.arange(16, dtype=np.uint32), BLOCK_SIZE)
        put(tier, before)
        tier.set_domain(other)
        assert tier.lookup(addresses(after), soon()) == 0
        writes = [BlockWrite(name, PART, memoryview(payload_of(name)), DOMAIN) for name in late]
        assert tier.put(writes, soon()) == [OK] * 4
        assert put(tier, after) == [OK] * 4
        assert_readable(tier, after)
        assert tier.lookup(addresses(after), soon()) == 4
        buffers = [bytearray(PAYLOAD_BYTES) for _ in range(8)]
        reads = [BlockRead(n, PART, memoryview(b), DOMAIN) for n, b in zip(before + late, buffers, strict=True)]
        assert tier.get(reads, soon()) == [OK] * 8
        assert all(bytes(b) == payload_of(n) for n, b in zip(before + late, buffers, strict=True))
        tier.check()

    @pytest.mark.parametrize("field", ["tokens", "parent", "root", "position"])
    def test_a_key_is_a_candidate_not_a_proof(self, tier: Tier, field: str) -> None:
        """Another block under its key is a miss, counted, and does not keep the true one out."""
        first, name = chain(2)
        lies = {
            "tokens": bytes(len(name.tokens)),
            "parent": bytes(32),
            "root": bytes(32),
            "position": name.position + BLOCK_SIZE,
        }
        true = {f: getattr(name, f) for f in ("key", "parent", "root", "position", "tokens")}
        forged = BlockName(**{**true, field: lies[field]})
        assert put(tier, [first]) == [OK]
        assert tier.put([BlockWrite(forged, PART, memoryview(payload_of(name)))], soon()) == [OK]
        assert put(tier, [name])[0] in (EXISTS, BlockStatus.DROPPED)
        assert get(tier, [first, name])[0] == [OK, BlockStatus.CORRUPT]
        assert tier.counters().corrupt == 1
        assert get(tier, [first, name])[0] == [OK, MISS]
        assert put(tier, [name]) == [OK]
        assert_readable(tier, [first, name])
        assert tier.counters().corrupt == 1
        tier.check()

    def test_a_partial_block_has_its_own_record(self, tier: Tier) -> None:
        names = chain(2)
        tail = chain(3, block_size=BLOCK_SIZE - 1, seed=9)[0]
        assert put(tier, [*names, tail]) == [OK] * 3
        assert_readable(tier, [tail, *names])

    def test_a_payload_of_another_size_is_not_served(self, tier: Tier) -> None:
        for nbytes in (PAYLOAD_BYTES // 2, PAYLOAD_BYTES * 2):
            (name,) = chain(1, seed=nbytes)
            assert tier.put([BlockWrite(name, PART, memoryview(bytes(nbytes)))], soon()) == [OK]
            before = tier.counters().corrupt
            assert get(tier, [name])[0] == [BlockStatus.CORRUPT]
            assert tier.counters().corrupt == before + 1
            assert get(tier, [name])[0] == [MISS]
            assert put(tier, [name]) == [OK]
            assert_readable(tier, [name])
        tier.check()

    def test_a_read_writes_its_destination_and_nothing_beside(self, tier: Tier) -> None:
        names = chain(3)
        put(tier, names)
        pool = bytearray(b"\xaa" * (PAYLOAD_BYTES * 5))
        view = memoryview(pool)
        spots = [view[i * PAYLOAD_BYTES : (i + 1) * PAYLOAD_BYTES] for i in (3, 1)]
        reads = [BlockRead(n, PART, spot) for n, spot in zip(names[:2], spots, strict=True)]
        assert tier.get(reads, soon()) == [OK, OK]
        assert bytes(spots[0]) == payload_of(names[0]) and bytes(spots[1]) == payload_of(names[1])
        for i in (0, 2, 4):
            assert bytes(view[i * PAYLOAD_BYTES : (i + 1) * PAYLOAD_BYTES]) == b"\xaa" * PAYLOAD_BYTES

    def test_the_source_may_change_after_the_put(self, tier: Tier) -> None:
        (name,) = chain(1)
        source = bytearray(payload_of(name))
        assert tier.put([BlockWrite(name, PART, memoryview(source))], soon()) == [OK]
        source[:] = bytes(PAYLOAD_BYTES)
        assert_readable(tier, [name])

    def test_delete_removes_and_counts(self, tier: Tier) -> None:
        names = chain(6)
        put(tier, names)
        assert tier.delete(addresses(names[3:])) == 3
        assert tier.delete(addresses(names[3:])) == 0
        assert tier.lookup(addresses(names), soon()) == 3
        assert get(tier, names)[0] == [OK] * 3 + [MISS] * 3
        assert put(tier, names) == [EXISTS] * 3 + [OK] * 3
        assert_readable(tier, names)
        tier.check()

    def test_touch_takes_known_and_unknown_chains(self, tier: Tier) -> None:
        names = chain(5)
        put(tier, names[:3])
        tier.touch(addresses(names))
        tier.touch(addresses(chain(4, seed=5)))
        assert_readable(tier, names[:3])
        tier.check()

    def test_a_passed_deadline_is_a_status(self, tier: Tier) -> None:
        names = chain(2)
        put(tier, names)
        past = time.monotonic() - 1.0
        buffers = [bytearray(PAYLOAD_BYTES) for _ in names]
        reads = [BlockRead(name, PART, memoryview(b)) for name, b in zip(names, buffers, strict=True)]
        assert tier.get(reads, past) == [BlockStatus.TIMEOUT] * 2
        writes = [BlockWrite(name, PART, memoryview(payload_of(name))) for name in chain(2, seed=1)]
        assert set(tier.put(writes, past)) <= {BlockStatus.TIMEOUT, BlockStatus.DROPPED}
        assert tier.lookup(addresses(chain(2, seed=1)), soon()) == 0
        assert_readable(tier, names)

    def test_more_than_fits_evicts_or_drops_and_stays_right(self, tier: Tier) -> None:
        capacity = tier.counters().capacity_bytes
        if capacity == 0 or capacity > 64 << 20:
            pytest.skip("the tier says that its capacity is unbounded or too large to fill here")
        chains = [chain(16, seed=seed) for seed in range(2 * capacity // (16 * PAYLOAD_BYTES) + 2)]
        dropped = sum(status is BlockStatus.DROPPED for names in chains for status in put(tier, names))
        counters = tier.counters()
        assert counters.nbytes <= capacity
        assert counters.evictions + dropped > 0
        tier.check()
        for names in chains:
            found = tier.lookup(addresses(names), soon())
            statuses, buffers = get(tier, names[:found])
            for name, status, buffer in zip(names, statuses, buffers, strict=False):
                assert status in (OK, MISS)
                assert status is MISS or bytes(buffer) == payload_of(name)

    def test_records_are_described_one_by_one(self, tier: Tier) -> None:
        if not isinstance(tier, DescribingTier):
            pytest.skip("this tier describes nothing")
        names = chain(6)
        put(tier, names[:2] + names[4:])
        found = tier.describe(addresses(names), soon())
        assert [one is not None for one in found] == [True, True, False, False, True, True]
        for name, one in zip(names, found, strict=True):
            assert one is None or (one.nbytes == PAYLOAD_BYTES and one.name in (None, name))
        assert tier.describe(addresses(names, OTHER_PART), soon()) == [None] * 6
        assert tier.describe([], soon()) == []

    def test_all_records_are_listed(self, tier: Tier) -> None:
        if not isinstance(tier, ListingTier):
            pytest.skip("this tier lists nothing")
        names = chain(20)
        put(tier, names)
        put(tier, names[:3], OTHER_PART)
        tier.delete(addresses(names[5:7]))
        listed = {(record.address, record.name, record.nbytes) for record in tier.records(soon())}
        kept = names[:5] + names[7:]
        expected = {(address, name, PAYLOAD_BYTES) for name, address in zip(kept, addresses(kept), strict=True)}
        others = zip(names[:3], addresses(names[:3], OTHER_PART), strict=True)
        assert listed == expected | {(address, name, PAYLOAD_BYTES) for name, address in others}

    def test_what_leaves_is_reported_once_and_only_what_is_gone(self, tier: Tier) -> None:
        if not isinstance(tier, ReportingTier):
            pytest.skip("this tier does not know when records leave")
        gone: list[bytes] = []
        tier.report_removed(gone.extend)
        names = chain(10)
        put(tier, names)
        tier.delete(addresses(names[8:]))
        tier.delete(addresses(names[8:]))
        assert sorted(gone) == sorted(name.key for name in names[8:])
        blocks = tier.counters().capacity_bytes // PAYLOAD_BYTES
        chains = [chain(16, seed=seed) for seed in range(1, 3 + blocks // 16)]
        for more in chains:
            put(tier, more)
        everything = {name.key for more in [names, *chains] for name in more}
        there = {record.name.key for record in tier.records(soon())} if isinstance(tier, ListingTier) else set()
        assert set(gone) <= everything - there
        assert len(gone) > 2 or len(there) == len(everything) - 2

    def test_identities_are_kept_beside_the_records(self, tier: Tier) -> None:
        tier.put_identity(DOMAIN, b"identity of this domain")
        tier.put_identity(bytes(32), b"another")
        tier.put_identity(DOMAIN, b"identity of this domain")
        stored = tier.identities()
        assert stored[DOMAIN] == b"identity of this domain"
        assert stored[bytes(32)] == b"another"

    def test_counters_count(self, tier: Tier) -> None:
        names = chain(8)
        put(tier, names)
        get(tier, names)
        counters = tier.counters()
        assert counters.blocks >= 8
        assert counters.nbytes >= 8 * PAYLOAD_BYTES
        assert counters.bytes_written >= 8 * PAYLOAD_BYTES
        assert counters.bytes_read >= 8 * PAYLOAD_BYTES
        assert counters.corrupt == counters.errors == 0

    def test_threads_put_and_get_at_once(self, tier: Tier) -> None:
        failures: list[str] = []

        def work(seed: int) -> None:
            mine, shared = chain(10, seed=100 + seed), chain(10, seed=99)
            for names in (mine, shared):
                statuses = put(tier, names)
                if not set(statuses) <= {OK, EXISTS, BlockStatus.DROPPED}:
                    failures.append(f"put {statuses}")
                got, buffers = get(tier, names)
                for name, status, buffer in zip(names, got, buffers, strict=True):
                    if status is OK and bytes(buffer) != payload_of(name):
                        failures.append(f"wrong bytes of {name.key.hex()[:16]}")
                    if status not in (OK, MISS):
                        failures.append(f"get {status}")

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        for seed in range(4):
            assert_readable(tier, chain(10, seed=100 + seed))
        tier.check()

    def test_close_may_be_called_twice(self, tier: Tier) -> None:
        put(tier, chain(3))
        tier.close()
        tier.close()
