"""The staged connector: runs through a small window, copies that end late, and no slot lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest

from pagetier.connectors.base import Connector
from pagetier.connectors.staged import StagedConnector
from pagetier.kvstore.block import BlockName, BlockStatus
from pagetier.kvstore.executor import SeededExecutor, ThreadPool
from pagetier.kvstore.job import Completion, LoadDone, LookupDone, PutDone
from pagetier.kvstore.memory import Fault, MemoryTier
from pagetier.kvstore.store import TieredStore
from tests.kvstore.rig import PAYLOAD_BYTES, memory, payload
from tests.kvstore.tier_contract import PART, chain

OK, MISS, EXISTS = BlockStatus.OK, BlockStatus.MISS, BlockStatus.EXISTS


class LateCopies:
    """Device blocks and slots in CPU memory; a copy happens when its token is found done, some polls later."""

    def __init__(self, num_blocks: int, num_slots: int, seed: int = 0) -> None:
        self.blocks = [bytearray(PAYLOAD_BYTES) for _ in range(num_blocks)]
        self.slots = [bytearray(PAYLOAD_BYTES) for _ in range(num_slots)]
        self.rng, self.num_copied, self.is_closed = random.Random(seed), 0, False
        self.pending: dict[object, list[tuple[bytearray, bytearray]]] = {}

    @property
    def num_slots(self) -> int:
        return len(self.slots)

    def view(self, slot: int) -> memoryview:
        return memoryview(self.slots[slot])

    def start_copy_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> object:
        return self._start([(self.blocks[b], self.slots[s]) for b, s in zip(block_ids, slots, strict=True)])

    def start_copy_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> object:
        return self._start([(self.slots[s], self.blocks[b]) for s, b in zip(slots, block_ids, strict=True)])

    def is_done(self, token: object) -> bool:
        if self.rng.random() < 0.6:
            return False
        for source, destination in self.pending.pop(token):
            destination[:] = source
            self.num_copied += 1
        return True

    def close(self) -> None:
        self.is_closed = True

    def _start(self, pairs: list[tuple[bytearray, bytearray]]) -> object:
        token = object()
        self.pending[token] = pairs
        return token


class Bench:
    """A staged connector over memory tiers."""

    def __init__(self, *tiers: MemoryTier, num_slots: int = 4, seed: int = 0) -> None:
        self.staging = LateCopies(64, num_slots, seed)
        self.store = TieredStore(
            tiers, part=PART, payload_bytes=PAYLOAD_BYTES, make_executor=SeededExecutor(seed).factory
        )
        self.connector = StagedConnector(self.store, self.staging)
        self.seen: list[Completion] = []

    def answer(self, number: int, kind: type[Completion]) -> Completion:
        for _ in range(5000):
            self.seen += self.connector.poll()
            self.connector.check()
            for completion in self.seen:
                if isinstance(completion, kind) and number in (
                    getattr(completion, "job", None),
                    getattr(completion, "ticket", None),
                ):
                    return completion
        raise AssertionError(f"no {kind.__name__} for {number}")

    def save(self, names: Sequence[BlockName], first_block: int = 0) -> Completion:
        block_ids = list(range(first_block, first_block + len(names)))
        for block_id, name in zip(block_ids, names, strict=True):
            self.staging.blocks[block_id][:] = payload(name)
        return self.answer(self.connector.submit_save(names, block_ids), PutDone)

    def close(self) -> None:
        self.connector.check()
        self.connector.close()
        assert self.staging.is_closed


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_slots", [1, 4, 40])
def test_a_job_larger_than_the_window_passes_through_it(seed: int, num_slots: int) -> None:
    names = chain(20)
    bench = Bench(memory("nvme"), num_slots=num_slots, seed=seed)
    assert isinstance(bench.connector, StagedConnector)
    connector: Connector = bench.connector
    saved = bench.save(names)
    assert isinstance(saved, PutDone) and saved.statuses == (OK,) * 20
    ticket = connector.submit_lookup(names)
    found = bench.answer(ticket, LookupDone)
    assert isinstance(found, LookupDone) and len(found.tiers) == 20
    done = bench.answer(connector.submit_load(ticket, names, range(30, 50)), LoadDone)
    assert isinstance(done, LoadDone) and done.statuses == (OK,) * 20 and done.quiesced
    for block_id, name in zip(range(30, 50), names, strict=True):
        assert bytes(bench.staging.blocks[block_id]) == payload(name)
    connector.release(ticket)
    bench.close()


def test_what_is_stored_everywhere_is_not_even_copied() -> None:
    names = chain(4)
    bench = Bench(memory("host"), memory("nvme"))
    bench.save(names)
    before = bench.staging.num_copied
    saved = bench.save(names)
    assert isinstance(saved, PutDone) and saved.statuses == (EXISTS,) * 4
    assert bench.staging.num_copied == before
    bench.close()


@pytest.mark.parametrize("position", range(6))
def test_a_failed_block_leaves_its_device_block_alone(position: int) -> None:
    names, tier = chain(6), memory("nvme")
    bench = Bench(tier)
    bench.save(names)
    ticket = bench.connector.submit_lookup(names)
    bench.answer(ticket, LookupDone)
    tier.faults.reads[position] = Fault.SHORT
    done = bench.answer(bench.connector.submit_load(ticket, names, range(10, 16)), LoadDone)
    assert isinstance(done, LoadDone)
    failed = [i for i, status in enumerate(done.statuses) if status is not OK]
    assert len(failed) == 1
    for i, name in enumerate(names):
        wanted = bytes(PAYLOAD_BYTES) if i in failed else payload(name)
        assert bytes(bench.staging.blocks[10 + i]) == wanted
    bench.connector.release(ticket)
    bench.close()


def test_a_release_gives_up_runs_that_have_not_begun() -> None:
    names = chain(12)
    bench = Bench(memory("nvme"), num_slots=2)
    bench.save(names)
    ticket = bench.connector.submit_lookup(names)
    bench.answer(ticket, LookupDone)
    job = bench.connector.submit_load(ticket, names, range(12, 24))
    bench.connector.release(ticket)
    done = bench.answer(job, LoadDone)
    assert isinstance(done, LoadDone) and done.quiesced and MISS in done.statuses
    for i, status in enumerate(done.statuses):
        assert (bytes(bench.staging.blocks[12 + i]) == payload(names[i])) == (status is OK)
    bench.close()


def test_a_thread_that_writes_late_holds_slots_and_never_device_blocks() -> None:
    names, tier = chain(3), memory("nvme")
    staging = LateCopies(8, 3)
    store = TieredStore([tier], part=PART, payload_bytes=PAYLOAD_BYTES, load_budget_s=0.2, make_executor=ThreadPool)
    connector = StagedConnector(store, staging)
    seen: list[Completion] = []

    def until(kind: type[Completion]) -> Completion:
        while True:
            seen.extend(connector.poll())
            connector.check()
            for completion in seen:
                if isinstance(completion, kind):
                    return completion

    for block_id, name in enumerate(names):
        staging.blocks[block_id][:] = payload(name)
    connector.submit_save(names, [0, 1, 2])
    until(PutDone)
    ticket = connector.submit_lookup(names)
    until(LookupDone)
    tier.faults.gate = gate = threading.Event()
    connector.submit_load(ticket, names[:1], [5])
    done = until(LoadDone)
    assert isinstance(done, LoadDone) and done.statuses == (BlockStatus.TIMEOUT,) and done.quiesced
    assert len(connector._free) == 2, "one slot may still be written to"
    gate.set()
    while len(connector._free) < 3:
        connector.poll()
    assert bytes(staging.blocks[5]) == bytes(PAYLOAD_BYTES)
    connector.release(ticket)
    connector.check()
    connector.close()
