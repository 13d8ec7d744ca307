"""The tiered store: prefixes across tiers, a status per block, budgets, pins, and no exception whatever a tier does."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from pagetier.kvstore.block import Address, BlockStatus
from pagetier.kvstore.errors import ClosedError, ConfigError
from pagetier.kvstore.executor import SeededExecutor
from pagetier.kvstore.job import LoadDone, LoadQuiesced, LookupDone, PutDone
from pagetier.kvstore.memory import Fault, Faults, MemoryTier
from pagetier.kvstore.store import TieredStore
from pagetier.kvstore.tier import BlockRead, BlockWrite, PinningTier, Tier
from tests.kvstore.rig import PAYLOAD_BYTES, UNTOUCHED, Buffers, Clock, Rig, addresses, memory, payload, store_in
from tests.kvstore.tier_contract import PART, chain

OK, MISS, EXISTS, DROPPED = BlockStatus.OK, BlockStatus.MISS, BlockStatus.EXISTS, BlockStatus.DROPPED
TIMEOUT, ERROR = BlockStatus.TIMEOUT, BlockStatus.ERROR


@pytest.mark.parametrize("threads", [False, True])
def test_a_put_reaches_every_tier_and_is_loaded_back(threads: bool) -> None:
    names = chain(20)
    with Rig(memory("nvme"), memory("redis"), threads=threads) as rig:
        assert rig.put(names) == (OK,) * 20
        assert rig.store.flush(5.0)
        assert [tier.counters().blocks for tier in rig.tiers] == [20, 20]
        ticket, tiers = rig.lookup(names)
        assert tiers == ("nvme",) * 20
        done, _ = rig.load(ticket, names)
        assert done.statuses == (OK,) * 20 and done.quiesced and done.tiers == tiers
        rig.store.release(ticket)


def test_memory_tiers_answer_a_lookup_in_the_very_next_poll() -> None:
    names = chain(5)
    with Rig(memory("host"), memory("nvme"), executor=SeededExecutor(0)) as rig:
        store_in(rig.tiers[0], names[:2])
        store_in(rig.tiers[1], names[:4])
        ticket = rig.store.submit_lookup(names)
        assert rig.store.poll() == [LookupDone(ticket, ("host", "host", "nvme", "nvme"))]
        rig.store.release(ticket)


def test_a_full_hit_in_memory_does_not_ask_a_slow_tier() -> None:
    names = chain(3)
    with Rig(memory("nvme"), memory("redis")) as rig:
        store_in(rig.tiers[0], names)
        rig.tiers[1].faults.down = True  # type: ignore[attr-defined]
        ticket = rig.store.submit_lookup(names)
        assert rig.store.poll() == [LookupDone(ticket, ("nvme",) * 3)]
        rig.store.release(ticket)


def test_a_store_without_tiers_misses_and_drops() -> None:
    names = chain(2)
    with Rig() as rig:
        assert rig.lookup(names)[1] == ()
        rig.store.release(1)
        assert rig.put(names) == (DROPPED, DROPPED)


@pytest.mark.parametrize(
    ("host", "nvme", "redis", "expected"),
    [
        ("110000", "111100", "111111", "hhnnrr"),
        ("101010", "010101", "000000", "hnhnhn"),
        ("000000", "110111", "001000", "nnrnnn"),
        ("000100", "000000", "111111", "rrrhrr"),
        ("100000", "001111", "000000", "h"),
        ("000000", "000000", "000000", ""),
        ("000001", "111110", "111111", "nnnnnh"),
    ],
)
def test_block_i_comes_from_the_first_tier_that_has_it(host: str, nvme: str, redis: str, expected: str) -> None:
    names = chain(6)
    with Rig(memory("host"), memory("nvme"), memory("redis")) as rig:
        for tier, present in zip(rig.tiers, (host, nvme, redis), strict=True):
            store_in(tier, [name for name, bit in zip(names, present, strict=True) if bit == "1"])
        ticket, tiers = rig.lookup(names)
        assert "".join(tier[0] for tier in tiers) == expected
        done, _ = rig.load(ticket, names[: len(tiers)])
        assert done.statuses == (OK,) * len(tiers) and done.tiers == tiers
        rig.store.release(ticket)


@pytest.mark.parametrize("position", range(9))
@pytest.mark.parametrize("fault", list(Fault))
def test_one_failing_block_among_many_is_the_only_one_not_loaded(position: int, fault: Fault) -> None:
    names = chain(9)
    tier = memory("nvme")
    with Rig(tier, budget_s=1e6) as rig:
        store_in(tier, names)
        ticket, _ = rig.lookup(names)
        tier.faults.reads[position] = fault
        done, _ = rig.load(ticket, names)
        assert [i for i, status in enumerate(done.statuses) if status is not OK] == [position]
        assert done.tiers[position] is None and done.quiesced
        rig.store.release(ticket)


@pytest.mark.parametrize("position", range(9))
@pytest.mark.parametrize("fault", list(Fault))
def test_a_block_that_one_tier_fails_comes_from_the_next(position: int, fault: Fault) -> None:
    names = chain(9)
    with Rig(memory("nvme"), memory("redis")) as rig:
        rig.put(names)
        ticket, _ = rig.lookup(names)
        rig.tiers[0].faults.reads[position] = fault  # type: ignore[attr-defined]
        done, _ = rig.load(ticket, names)
        assert done.statuses == (OK,) * 9
        assert [i for i, tier in enumerate(done.tiers) if tier == "redis"] == [position]
        rig.store.release(ticket)


def test_what_is_gone_between_lookup_and_load_shrinks_the_hit() -> None:
    names = chain(8)
    with Rig(memory("nvme"), memory("redis")) as rig:
        rig.put(names[:6])
        store_in(rig.tiers[1], names[6:])
        ticket, tiers = rig.lookup(names)
        assert tiers == ("nvme",) * 6 + ("redis",) * 2
        for tier in rig.tiers:
            tier.delete(addresses([names[3], names[7]]))
        done, _ = rig.load(ticket, names)
        assert done.statuses == (OK, OK, OK, MISS, OK, OK, OK, MISS)
        rig.store.release(ticket)


def test_a_lookup_pins_until_release_and_loads_keep_the_pins() -> None:
    names = chain(4)
    tier = memory("nvme", 8)
    with Rig(tier, executor=SeededExecutor(3)) as rig:
        rig.put(names)
        ticket, _ = rig.lookup(names)
        assert tier.num_pinned == 4 and tier.evict(8) == 0
        job = rig.store.submit_load(ticket, names, Buffers(names).views)
        rig.store.release(ticket)
        assert tier.num_pinned == 4, "a load under way holds its blocks"
        assert rig.wait(LoadDone, job).statuses == (OK,) * 4
        assert tier.num_pinned == 0 and tier.evict(8) == 4


def test_pins_beyond_half_of_a_tier_are_served_from_the_next() -> None:
    names = chain(8)
    with Rig(memory("host", 8), memory("nvme", 16)) as rig:
        rig.put(names)
        ticket, tiers = rig.lookup(names)
        assert tiers == ("host",) * 4 + ("nvme",) * 4
        rig.store.release(ticket)


def test_a_lookup_released_before_its_answer_ends_unseen() -> None:
    names = chain(4)
    with Rig(memory("nvme"), memory("redis"), executor=SeededExecutor(1)) as rig:
        store_in(rig.tiers[0], names[:2])
        ticket = rig.store.submit_lookup(names)
        rig.store.release(ticket)
        rig.until(lambda: not rig.store.has_work)
        assert rig.find(LookupDone, ticket) is None


def test_a_silent_tier_costs_a_lookup_its_share_of_the_budget_and_no_more() -> None:
    names, clock = chain(6), Clock()
    nvme, redis = memory("nvme", clock=clock), memory("redis", clock=clock)
    redis.faults.silent = True
    with Rig(nvme, redis, clock=clock, budget_s=8.0) as rig:
        store_in(nvme, names[:2])
        begun_s = clock.now_s
        ticket, tiers = rig.lookup(names)
        assert tiers == ("nvme", "nvme")
        assert clock.now_s - begun_s == pytest.approx(2.0)
        rig.store.release(ticket)


def test_a_lookup_is_answered_at_its_deadline_though_the_tier_still_thinks() -> None:
    """The threads never run here: only the clock moves."""
    names, clock = chain(6), Clock()

    class Never(SeededExecutor):
        def pump(self) -> None:
            pass

    with Rig(memory("nvme", clock=clock), memory("redis", clock=clock), executor=Never(), clock=clock) as rig:
        store_in(rig.tiers[0], names[:3])
        ticket = rig.store.submit_lookup(names)
        assert rig.store.poll() == []
        clock.now_s += 2.6
        assert rig.store.poll() == [LookupDone(ticket, ("nvme",) * 3)]
        rig.store.release(ticket)
        assert rig.tiers[0].num_pinned == 0  # type: ignore[attr-defined]


def test_a_dead_tier_opens_its_breaker_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    names, clock = chain(6), Clock()
    nvme, redis = memory("nvme", clock=clock), memory("redis", clock=clock)
    with Rig(nvme, redis, clock=clock) as rig:
        store_in(nvme, names[:2])
        store_in(redis, names)
        redis.faults.down = True
        for _ in range(12):
            ticket, tiers = rig.lookup(names)
            assert tiers == ("nvme", "nvme")
            rig.store.release(ticket)
        assert rig.store.stats()["redis"]["breaker"] == "open" and rig.store.is_degraded
        redis.faults.down = False
        ticket = rig.store.submit_lookup(names)
        assert rig.store.poll() == [LookupDone(ticket, ("nvme", "nvme"))], "an open breaker is not waited for"
        rig.store.release(ticket)
        clock.now_s += 1.1
        ticket, tiers = rig.lookup(names)
        assert tiers == ("nvme",) * 2 + ("redis",) * 4
        rig.store.release(ticket)
        assert rig.store.stats()["redis"]["breaker"] == "closed" and not rig.store.is_degraded
    assert len([r for r in caplog.records if "redis" in r.getMessage()]) == 2  # open, closed (half-open is INFO)


def test_the_front_counts_at_the_deadline_and_the_rest_quiesces_later() -> None:
    """One thread hangs in the second tier past the deadline; what the first tier gave is kept."""
    names = chain(8)
    host, nvme = memory("host"), memory("nvme")
    nvme.faults.gate = gate = threading.Event()
    with Rig(host, nvme, threads=True, budget_s=0.25) as rig:
        store_in(host, names[:3])
        store_in(nvme, names)
        ticket, tiers = rig.lookup(names)
        assert tiers == ("host",) * 3 + ("nvme",) * 5
        buffers = Buffers(names)
        job = rig.store.submit_load(ticket, names, buffers.views)
        assert nvme.faults.waiting.wait(5.0)
        done = rig.wait(LoadDone, job)
        assert done.statuses == (OK,) * 3 + (TIMEOUT,) * 5
        assert done.tiers == ("host",) * 3 + (None,) * 5
        assert not done.quiesced and rig.find(LoadQuiesced, job) is None
        buffers.assert_right(done.statuses)
        rig.store.release(ticket)
        assert nvme.num_pinned > 0, "pins last until nobody reads any more"
        gate.set()
        rig.wait(LoadQuiesced, job)
        assert rig.seen.index(done) < rig.seen.index(LoadQuiesced(job))


def test_pieces_not_begun_at_the_deadline_are_never_read() -> None:
    names, clock = chain(12), Clock()
    tier = memory("nvme", clock=clock)
    tier.faults.delay_s = 3.0
    with Rig(tier, clock=clock, budget_s=10.0, piece_bytes=2 * PAYLOAD_BYTES) as rig:
        store_in(tier, names)
        tier.faults.delay_s = 3.0
        ticket, _ = rig.lookup(names)
        done, buffers = rig.load(ticket, names)
        assert done.quiesced
        num_front = next(i for i, status in enumerate(done.statuses) if status is not OK)
        assert num_front == 6, "three pieces of 3 s fit into 10 s"
        assert set(done.statuses[num_front:]) == {TIMEOUT}
        assert all(set(b) == {UNTOUCHED} for b in buffers.bytes[num_front:])
        rig.store.release(ticket)


def test_a_seeded_run_may_answer_before_a_read_lands() -> None:
    """With phases apart, the deadline can fall while a piece is being read: the destination is written afterwards."""
    names, clock = chain(4), Clock()
    unquiesced = 0
    for seed in range(20):
        tier = memory("nvme", clock=clock)
        tier.faults.stubborn = True
        with Rig(tier, clock=clock, executor=SeededExecutor(seed, eagerness=0.3), budget_s=1.0) as rig:
            store_in(tier, names)
            ticket, _ = rig.lookup(names)
            buffers = Buffers(names)
            job = rig.store.submit_load(ticket, names, buffers.views)
            rig.seen += rig.store.poll()
            clock.now_s += 1.5
            done = rig.wait(LoadDone, job)
            if not done.quiesced:
                unquiesced += 1
                rig.wait(LoadQuiesced, job)
                assert bytes(buffers.bytes[0]) == payload(names[0]), "it was written to, late"
            rig.store.release(ticket)
    assert unquiesced > 0


def test_loads_of_a_ticket_share_its_budget_and_overlaps_count_once() -> None:
    names, clock = chain(8), Clock()
    tier = memory("nvme", clock=clock)
    with Rig(tier, clock=clock, budget_s=10.0) as rig:
        store_in(tier, names)
        ticket, _ = rig.lookup(names)
        tier.faults.delay_s = 3.0
        jobs = [rig.store.submit_load(ticket, names[i : i + 4], Buffers(names[i : i + 4]).views) for i in (0, 4)]
        assert [rig.wait(LoadDone, job).statuses for job in jobs] == [(OK,) * 4] * 2  # 6 s of the 10, not 3 + 6
        assert rig.load(ticket, names[:4])[0].statuses == (OK,) * 4
        assert rig.load(ticket, names[:4])[0].statuses == (TIMEOUT,) * 4
        rig.store.release(ticket)


def test_a_known_block_costs_no_read_of_its_source() -> None:
    names = chain(4)
    with Rig(memory("nvme")) as rig:
        rig.put(names)
        wrong = [memoryview(bytes(PAYLOAD_BYTES)) for _ in names]
        done = rig.wait(PutDone, rig.store.submit_put(names, wrong))
        assert done.statuses == (EXISTS,) * 4
        ticket, _ = rig.lookup(names)
        rig.load(ticket, names)
        rig.store.release(ticket)


def test_a_put_is_ok_when_some_tier_stored_it() -> None:
    names = chain(4)
    with Rig(memory("nvme"), memory("redis")) as rig:
        rig.tiers[0].faults.writes.update({1: Fault.ERROR})  # type: ignore[attr-defined]
        rig.tiers[1].faults.writes.update({1: Fault.TIMEOUT, 2: Fault.ERROR})  # type: ignore[attr-defined]
        assert rig.put(names) == (OK, ERROR, OK, OK)


def test_a_full_queue_drops_the_newest_with_the_rest_of_its_chain() -> None:
    names, other = chain(10), chain(2, seed=1)
    with Rig(memory("nvme"), executor=SeededExecutor(0), put_queue_bytes=6 * PAYLOAD_BYTES) as rig:
        first = rig.store.submit_put(names[:8], [memoryview(payload(n)) for n in names[:8]])
        done = rig.wait(PutDone, first)
        assert done.statuses == (OK,) * 6 + (DROPPED,) * 2
        assert rig.put(names[8:]) == (DROPPED, DROPPED), "their parents are not there"
        assert rig.put(other) == (OK, OK), "other chains are not concerned"
        assert rig.store.counters()["dropped_puts"] == 4
        assert rig.put(names[6:]) == (DROPPED,) * 0 + (OK,) * 4, "from the first dropped block on it may be stored"


def test_sources_are_referenced_until_the_put_is_done() -> None:
    """A put that hangs keeps its sources: PutDone comes after the last read of them."""
    names, gate, reading = chain(2), threading.Event(), threading.Event()

    class Hanging(MemoryTier):
        def put(self, writes: Sequence[BlockWrite], deadline_s: float) -> list[BlockStatus]:
            reading.set()
            gate.wait()
            return super().put(writes, float("inf"))

    tier = Hanging(1 << 16, name="nvme")
    with Rig(tier, memory("redis"), threads=True) as rig:
        sources = [bytearray(payload(name)) for name in names]
        job = rig.store.submit_put(names, [memoryview(source) for source in sources])
        assert reading.wait(5.0)
        for _ in range(20):
            rig.seen += rig.store.poll()
        assert rig.find(PutDone, job) is None
        gate.set()
        assert rig.wait(PutDone, job).statuses == (OK, OK)
        for source in sources:
            source[:] = bytes(PAYLOAD_BYTES)
        ticket, _ = rig.lookup(names)
        rig.load(ticket, names)
        rig.store.release(ticket)


@pytest.mark.parametrize("fast", ["host", "nvme"])
def test_what_a_slow_tier_served_is_promoted(fast: str) -> None:
    names = chain(9)
    upper: Tier = memory(fast) if fast == "host" else Unpinned("nvme")
    with Rig(upper, memory("redis")) as rig:
        assert isinstance(upper, PinningTier) == (fast == "host")
        store_in(rig.tiers[1], names)
        ticket, tiers = rig.lookup(names)
        assert tiers == ("redis",) * 9
        _, buffers = rig.load(ticket, names)
        for buffer in buffers.bytes:
            buffer[:] = bytes(PAYLOAD_BYTES)  # the destination may be reused at once
        rig.store.release(ticket)
        assert rig.store.flush(5.0)
        ticket, tiers = rig.lookup(names)
        assert tiers == (fast,) * 9
        rig.load(ticket, names)
        rig.store.release(ticket)


class Unpinned:
    """A tier without pins, as NVMe is: only what `Tier` asks for."""

    answers_at_once = True

    def __init__(self, name: str) -> None:
        tier = MemoryTier(64 * PAYLOAD_BYTES, name=name)
        self.name = name
        self.set_domain = tier.set_domain
        self.lookup, self.get, self.put, self.touch, self.delete = (
            tier.lookup,
            tier.get,
            tier.put,
            tier.touch,
            tier.delete,
        )
        self.put_identity, self.identities, self.counters = tier.put_identity, tier.identities, tier.counters
        self.check, self.close = tier.check, tier.close


class Lying(MemoryTier):
    """Breaks the contract of a tier in every way that the store must survive."""

    lie = ""

    def lookup(self, addresses: Sequence[Address], deadline_s: float) -> int:
        if self.lie == "lookup raises":
            raise RuntimeError("boom")
        return len(addresses) + 7 if self.lie == "too many" else super().lookup(addresses, deadline_s)

    def get(self, reads: Sequence[BlockRead], deadline_s: float) -> list[BlockStatus]:
        if self.lie == "get raises":
            raise OSError("boom")
        answer = super().get(reads, deadline_s)
        return answer[:-1] if self.lie == "too few" else answer

    def put(self, writes: Sequence[BlockWrite], deadline_s: float) -> list[BlockStatus]:
        if self.lie == "put raises":
            raise ValueError("boom")
        return super().put(writes, deadline_s)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("lie", ["lookup raises", "too many", "get raises", "too few", "put raises"])
def test_a_lying_tier_shortens_hits_and_raises_nothing(lie: str, at_once: bool) -> None:
    names = chain(6)
    liar = Lying(1 << 16, name="redis", answers_at_once=at_once)
    with Rig(memory("nvme"), liar) as rig:
        rig.put(names[:3])
        store_in(liar, names[3:5])
        liar.lie = lie
        for _ in range(6):
            rig.put(names[5:])
            rig.tiers[0].delete(addresses(names[3:]))
            ticket, tiers = rig.lookup(names)
            assert tiers[:3] == ("nvme",) * 3
            done, _ = rig.load(ticket, names[: len(tiers)])
            assert done.statuses[:3] == (OK,) * 3
            rig.store.release(ticket)
        assert "boom" not in str(rig.store.stats())


def test_pins_outlive_a_load_and_end_with_the_ticket() -> None:
    names = chain(3)
    tier = memory("nvme", 8)
    with Rig(tier) as rig:
        rig.put(names)
        ticket, _ = rig.lookup(names)
        rig.load(ticket, names[:1])
        assert tier.num_pinned == 3
        rig.load(ticket, names[1:])
        rig.store.release(ticket)
        assert tier.num_pinned == 0


def test_two_tickets_pin_the_same_blocks_independently() -> None:
    names = chain(3)
    tier = memory("nvme", 8)
    with Rig(tier) as rig:
        rig.put(names)
        first, _ = rig.lookup(names)
        second, _ = rig.lookup(names)
        rig.store.release(first)
        assert tier.num_pinned == 3
        rig.store.release(second)
        assert tier.num_pinned == 0
        with pytest.raises(KeyError):
            rig.store.release(second)


def test_loads_renew_what_they_used_and_lookups_do_not() -> None:
    old, new = chain(3, seed=1), chain(3, seed=2)
    tier = memory("nvme", 6)
    with Rig(tier) as rig:
        rig.put(old)
        rig.put(new)
        ticket, _ = rig.lookup(old)
        rig.store.release(ticket)
        assert tier.evict(1) == 1 and tier.lookup(addresses(old), 0.0) == 2, "a lookup is no use"
        ticket, _ = rig.lookup(old[:2])
        rig.load(ticket, old[:2])
        rig.store.release(ticket)
        rig.store.poll()
        assert tier.evict(3) == 3 and tier.lookup(addresses(new), 0.0) == 0, "a load is"


def test_touch_renews_a_chain_in_every_tier() -> None:
    old, new = chain(3, seed=1), chain(3, seed=2)
    with Rig(memory("host", 6), memory("nvme", 6)) as rig:
        rig.put(old)
        rig.put(new)
        rig.store.touch(old)
        rig.store.poll()
        for tier in rig.tiers:
            assert isinstance(tier, MemoryTier) and tier.evict(3) == 3
            assert tier.lookup(addresses(old), 0.0) == 3


def test_close_waits_for_bytes_under_way_and_answers_everything() -> None:
    names = chain(6)
    tier = memory("nvme")
    tier.faults.gate = gate = threading.Event()
    rig = Rig(tier, threads=True)
    before = threading.active_count()
    store_in(tier, names)
    ticket = rig.store.submit_lookup(names)
    rig.store.poll()
    job = rig.store.submit_load(ticket, names, Buffers(names).views)
    assert tier.faults.waiting.wait(5.0)
    threading.Timer(0.05, gate.set).start()
    rig.store.close()
    rig.store.close()
    answers = rig.store.poll()
    kinds = [type(answer) for answer in answers if getattr(answer, "job", None) == job]
    assert kinds in ([LoadDone, LoadQuiesced], [LoadDone])
    assert tier.num_pinned == 0 and threading.active_count() <= before + 1
    for call in (lambda: rig.store.submit_lookup(names), lambda: rig.store.touch(names)):
        with pytest.raises(ClosedError):
            call()


def test_close_drops_what_is_queued_and_says_so() -> None:
    names = chain(3)
    rig = Rig(memory("nvme"), executor=SeededExecutor(0))
    job = rig.store.submit_put(names, [memoryview(payload(n)) for n in names])
    rig.store.close()
    assert rig.store.poll() == [PutDone(job, (DROPPED,) * 3)]


def test_flush_writes_what_is_queued_or_says_that_it_could_not() -> None:
    names, clock = chain(6), Clock()
    with Rig(memory("nvme"), executor=SeededExecutor(0, eagerness=0.1)) as rig:
        rig.store.submit_put(names, [memoryview(payload(n)) for n in names])
        assert rig.store.flush(5.0)
        assert rig.tiers[0].counters().blocks == 6

    class Never(SeededExecutor):
        def pump(self) -> None:
            pass

    rig = Rig(memory("nvme", clock=clock), executor=Never(), clock=clock)
    rig.store.submit_put(names, [memoryview(payload(n)) for n in names])
    assert not rig.store.flush(0.01)
    rig.store.close()


def test_stats_have_the_shape_of_get_stats() -> None:
    with Rig(memory("nvme"), memory("redis")) as rig:
        rig.put(chain(3))
        stats = rig.store.stats()
        assert list(stats) == ["nvme", "redis"]
        for tier in stats.values():
            assert list(tier) == [
                *("blocks", "bytes", "capacity_bytes", "evictions", "errors", "corrupt", "quarantined"),
                *("scrubbed_bytes", "read_bytes", "written_bytes", "breaker", "queued_put_bytes", "dropped_puts"),
                *("warmed_blocks", "residency"),
            ]
            assert tier["blocks"] == 3 and tier["bytes"] == 3 * PAYLOAD_BYTES and tier["breaker"] == "closed"


def test_identities_reach_every_tier() -> None:
    with Rig(memory("nvme"), memory("redis")) as rig:
        rig.store.put_identity(bytes(32), b"who")
        rig.store.poll()
        assert [tier.identities() for tier in rig.tiers] == [{bytes(32): b"who"}] * 2


def test_two_tiers_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="each tier once"):
        TieredStore([memory("nvme"), memory("nvme")], part=PART, payload_bytes=PAYLOAD_BYTES)


def replay(seed: int) -> list[str]:
    """Everything that a run with random faults reported, as text."""
    clock, names = Clock(), chain(24)
    tiers = [memory("nvme", 16, clock), memory("redis", 40, clock)]
    for i, tier in enumerate(tiers):
        tier.faults.rate = 0.2
        tier.faults.rng.seed(seed * 2 + i)
    with Rig(*tiers, clock=clock, executor=SeededExecutor(seed)) as rig:
        for first in (0, 8, 4):
            rig.put(names[: first + 10])
            ticket, tiers_found = rig.lookup(names)
            rig.load(ticket, names[: len(tiers_found)])
            rig.store.release(ticket)
        return [repr(answer) for answer in rig.seen]


def test_a_seeded_store_replays() -> None:
    assert replay(1) == replay(1) != replay(2)


def test_faults_default_to_none() -> None:
    assert Faults().of_read(0) is None and Faults().of_write(0) is None
