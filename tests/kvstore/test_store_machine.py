"""A Hypothesis state machine over the store: any order of verbs, evictions and faults, in any interleaving.

Payloads are ledger-like: each names its block, so a wrong byte is seen. Sources are spoilt as soon as their put is done
and destinations as soon as their load quiesced: who still reads or writes them after that is seen too.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagetier.kvstore.block import BlockName, BlockStatus
from pagetier.kvstore.executor import SeededExecutor
from pagetier.kvstore.job import Completion, LoadDone, LoadQuiesced, LookupDone, PutDone
from pagetier.kvstore.tier import BlockRead
from tests.kvstore.rig import PAYLOAD_BYTES, UNTOUCHED, Buffers, Clock, Rig, addresses, memory, payload
from tests.kvstore.tier_contract import PART, chain

SPOILT = bytes([0x5C]) * PAYLOAD_BYTES
TRUNK = chain(6, seed=1)
CHAINS = [
    [*TRUNK, *chain(10, seed=2)[6:]],  # names below another parent: never reachable, still never wrong
    chain(10, seed=1),
    chain(5, seed=3),
]
ENDED = {BlockStatus.OK, BlockStatus.MISS, BlockStatus.CORRUPT, BlockStatus.TIMEOUT, BlockStatus.ERROR}
STORED = {BlockStatus.OK, BlockStatus.EXISTS, BlockStatus.DROPPED, BlockStatus.TIMEOUT, BlockStatus.ERROR}


class StoreMachine(RuleBasedStateMachine):
    """host (8 blocks, pins), nvme (14) and redis (40, lookups by I/O) under one store."""

    @initialize(seed=st.integers(0, 1 << 16), eagerness=st.sampled_from([0.15, 0.5, 1.0]))
    def open(self, seed: int, eagerness: float) -> None:
        self.clock = Clock()
        self.tiers = [memory(n, size, self.clock) for n, size in (("host", 8), ("nvme", 14), ("redis", 40))]
        for i, tier in enumerate(self.tiers):
            tier.faults.rng.seed(seed + i)
        self.rig = Rig(
            *self.tiers,
            clock=self.clock,
            executor=SeededExecutor(seed, eagerness),
            budget_s=4.0,
            piece_bytes=3 * PAYLOAD_BYTES,
            large_piece_bytes=3 * PAYLOAD_BYTES,
            put_piece_bytes=3 * PAYLOAD_BYTES,
            put_queue_bytes=12 * PAYLOAD_BYTES,
        )
        self.store = self.rig.store
        self.asked: dict[int, list[BlockName]] = {}
        self.hits: dict[int, list[BlockName]] = {}
        self.loads: dict[int, Buffers] = {}
        self.late: dict[int, Buffers] = {}
        self.puts: dict[int, list[bytearray]] = {}
        self.quiet: list[Buffers] = []

    # -- verbs ---------------------------------------------------------------------------------------------------------

    @rule(which=st.sampled_from(CHAINS), first=st.integers(0, 9), count=st.integers(1, 10))
    def put(self, which: list[BlockName], first: int, count: int) -> None:
        names = which[first : first + count]
        sources = [bytearray(payload(name)) for name in names]
        self.puts[self.store.submit_put(names, [memoryview(source) for source in sources])] = sources

    @rule(which=st.sampled_from(CHAINS))
    def lookup(self, which: list[BlockName]) -> None:
        self.asked[self.store.submit_lookup(which)] = which

    @rule(
        which=st.sampled_from(CHAINS),
        rate=st.sampled_from([0.0, 0.3]),
        stubborn=st.booleans(),
        polls=st.integers(0, 6),
        seconds=st.sampled_from([0.0, 5.0]),
    )
    def request(self, which: list[BlockName], rate: float, stubborn: bool, polls: int, seconds: float) -> None:
        """What most requests do, faults included; without it few runs would get as far as a load."""
        self.put(which, 0, len(which))
        self.settle()
        self.lookup(which)
        self.settle()
        for tier in self.tiers:
            tier.faults.rate, tier.faults.stubborn = rate, stubborn
        for ticket in sorted(self.hits)[-1:]:
            self.start_load(ticket, 0, 10)
        for _ in range(polls):
            self.poll()
        self.clock.now_s += seconds

    @rule()
    def settle(self) -> None:
        for _ in range(60):
            self.poll()

    @precondition(lambda self: self.hits)
    @rule(data=st.data(), first=st.integers(0, 3), count=st.integers(5, 10))
    def load(self, data: st.DataObject, first: int, count: int) -> None:
        self.start_load(data.draw(st.sampled_from(sorted(self.hits))), first, count)

    def start_load(self, ticket: int, first: int, count: int) -> None:
        names = self.hits[ticket][first : first + count]
        buffers = Buffers(names)
        self.loads[self.store.submit_load(ticket, names, buffers.views)] = buffers

    @precondition(lambda self: self.asked or self.hits)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted([*self.asked, *self.hits])))
        self.store.release(ticket)
        self.asked.pop(ticket, None)
        self.hits.pop(ticket, None)

    @rule(which=st.sampled_from(CHAINS), end=st.integers(1, 10))
    def touch(self, which: list[BlockName], end: int) -> None:
        self.store.touch(which[:end])

    @rule()
    def poll(self) -> None:
        for completion in self.store.poll():
            self.note(completion)

    # -- what befalls the tiers ----------------------------------------------------------------------------------------

    @rule(tier=st.integers(0, 2), count=st.integers(1, 8))
    def evict(self, tier: int, count: int) -> None:
        self.tiers[tier].evict(count)

    @rule(tier=st.integers(0, 2), which=st.sampled_from(CHAINS), i=st.integers(0, 9))
    def delete(self, tier: int, which: list[BlockName], i: int) -> None:
        self.tiers[tier].delete(addresses(which[i : i + 1]))

    @rule(tier=st.integers(0, 2), rate=st.sampled_from([0.0, 0.1, 0.5]))
    def fail_some(self, tier: int, rate: float) -> None:
        self.tiers[tier].faults.rate = rate

    @rule(tier=st.integers(0, 2), kind=st.sampled_from(["", "", "down", "silent", "stubborn", "stubborn"]))
    def fail_all(self, tier: int, kind: str) -> None:
        faults = self.tiers[tier].faults
        faults.down, faults.silent, faults.stubborn = kind == "down", kind == "silent", kind == "stubborn"

    @rule(seconds=st.sampled_from([0.01, 1.5, 40.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @precondition(lambda self: self.loads)
    @rule()
    def run_out_of_time(self) -> None:
        """The deadline of everything under way passes between two polls."""
        self.poll()
        self.clock.now_s += 5.0
        self.poll()

    # -- what is checked -----------------------------------------------------------------------------------------------

    def note(self, completion: Completion) -> None:
        if isinstance(completion, LookupDone):
            names = self.asked.pop(completion.ticket)  # KeyError: released, or answered twice
            assert len(completion.tiers) <= len(names)
            self.hits[completion.ticket] = names[: len(completion.tiers)]
        elif isinstance(completion, LoadDone):
            buffers = self.loads.pop(completion.job)
            assert len(completion.statuses) == len(completion.tiers) == len(buffers.names)
            assert set(completion.statuses) <= ENDED
            for status, tier in zip(completion.statuses, completion.tiers, strict=True):
                assert (status is BlockStatus.OK) == (tier is not None)
            buffers.assert_right(completion.statuses)
            if completion.quiesced:
                self.spoil(buffers)
            else:
                self.late[completion.job] = buffers
        elif isinstance(completion, LoadQuiesced):
            self.spoil(self.late.pop(completion.job))
        elif isinstance(completion, PutDone):
            sources = self.puts.pop(completion.job)
            assert len(completion.statuses) == len(sources) and set(completion.statuses) <= STORED
            for source in sources:
                source[:] = SPOILT

    def spoil(self, buffers: Buffers) -> None:
        for buffer in buffers.bytes:
            buffer[:] = SPOILT
        self.quiet.append(buffers)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.check()
        for tier in self.tiers:
            assert tier.counters().nbytes <= tier.counters().capacity_bytes
        for buffers in self.quiet:
            assert all(bytes(buffer) == SPOILT for buffer in buffers.bytes), "written to after it quiesced"

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for tier in self.tiers:
            tier.faults.rate = 0.0
            tier.faults.down = tier.faults.silent = tier.faults.stubborn = False
        for _ in range(2000):
            self.poll()
            if not self.store.has_work:
                break
        for ticket in [*self.asked, *self.hits]:
            self.store.release(ticket)
        assert not (self.asked or self.loads or self.late or self.puts), "answers are missing"
        self.holds()
        assert [tier.num_pinned for tier in self.tiers] == [0, 0, 0]
        for tier in self.tiers:
            for name in {name.key: name for which in CHAINS for name in which}.values():
                buffer = bytearray([UNTOUCHED]) * PAYLOAD_BYTES
                (status,) = tier.get([BlockRead(name, PART, memoryview(buffer))], float("inf"))
                assert status is BlockStatus.MISS or bytes(buffer) == payload(name), "a wrong byte was stored"
        self.store.close()
        assert self.store.poll() == []


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
