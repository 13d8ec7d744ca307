"""The connector for a device whose memory the CPU cannot reach: blocks pass through a bounded window of host slots.

Knows when to copy, not how: `Staging` does (connectors/cuda_blocks.py). Loads go before saves when slots are short.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagetier.connectors.base import BlockStore
from pagetier.kvstore.admin import Admin
from pagetier.kvstore.block import BlockName, BlockStatus
from pagetier.kvstore.events import EventLog
from pagetier.kvstore.identity import CacheIdentity
from pagetier.kvstore.job import Completion, LoadDone, LoadQuiesced, LookupDone, PutDone


class Staging(Protocol):
    """Host slots of one block each, and copies between them and the device that run by themselves."""

    @property
    def num_slots(self) -> int:
        """Size of the window in blocks, at least 1."""

    def view(self, slot: int) -> memoryview:
        """A slot's bytes, writable, of the store's payload size."""

    def start_copy_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> object:
        """Begin to copy device blocks to slots; a token."""

    def start_copy_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> object:
        """Begin to copy slots to device blocks; a token."""

    def is_done(self, token: object) -> bool:
        """Whether the copies of a token are over. Does not wait."""

    def close(self) -> None:
        """Wait for copies under way, let go of the slots. Idempotent."""


@dataclass(slots=True)
class _Job:
    """One submit_load or submit_save, advanced in runs of blocks as slots come free. domain: of the names."""

    job: int
    domain: bytes | None
    ticket: int | None  # None: a save
    names: tuple[BlockName, ...]
    block_ids: tuple[int, ...]
    statuses: list[BlockStatus | None]
    tiers: list[str | None]
    waiting: deque[int] = field(default_factory=deque)  # block indices without a slot yet
    num_runs: int = 0  # runs under way

    @property
    def is_over(self) -> bool:
        return not self.waiting and not self.num_runs


@dataclass(frozen=True, slots=True)
class _Run:
    """Some blocks of a job that hold slots."""

    job: _Job
    indices: tuple[int, ...]
    slots: tuple[int, ...]


class StagedConnector:
    """Implements `connectors.base.Connector`. Owns the store and the staging window.

    A load is always reported as quiesced: late threads write to slots, never to the device. Invariant: a slot is free
    or belongs to one run; it is free again only when neither the store nor the device touches it.
    """

    def __init__(self, store: BlockStore, staging: Staging) -> None:
        self._store, self._staging = store, staging
        self._free = list(range(staging.num_slots))
        self._max_run = max(1, staging.num_slots // 4)  # so that copies of one run overlap reads of the next
        self._next = 1
        self._loads: deque[_Job] = deque()  # with blocks that wait for slots
        self._saves: deque[_Job] = deque()
        self._stored: dict[int, _Run] = {}  # store job -> the run it loads or puts
        self._copies: list[tuple[object, _Run]] = []  # device copies under way
        self._late: dict[int, _Run] = {}  # store job -> run of a load that is not quiesced
        self._done: list[Completion] = []

    def submit_lookup(self, blocks: Sequence[BlockName]) -> int:
        return self._store.submit_lookup(blocks)

    def submit_load(self, ticket: int, blocks: Sequence[BlockName], block_ids: Sequence[int]) -> int:
        job = self._new_job(ticket, blocks, block_ids)
        job.waiting.extend(range(len(blocks)))
        return self._enter(job, self._loads)

    def submit_save(self, blocks: Sequence[BlockName], block_ids: Sequence[int]) -> int:
        job = self._new_job(None, blocks, block_ids)
        for i, name in enumerate(blocks):
            if self._store.is_stored(name):
                job.statuses[i] = BlockStatus.EXISTS
            else:
                job.waiting.append(i)
        return self._enter(job, self._saves)

    def touch(self, blocks: Sequence[BlockName]) -> None:
        self._store.touch(blocks)

    def release(self, ticket: int) -> None:
        """As for every connector; runs of the ticket's loads that have not begun are given up as misses."""
        for job in [job for job in self._loads if job.ticket == ticket]:
            job.waiting.clear()
            self._loads.remove(job)
            self._finish_if_over(job)
        self._store.release(ticket)

    def poll(self) -> list[Completion]:
        for completion in self._store.poll():
            self._advance(completion)
        under_way, self._copies = self._copies, []
        for token, run in under_way:
            if self._staging.is_done(token):
                self._copied(run)
            else:
                self._copies.append((token, run))
        self._start_runs()
        done, self._done = self._done, []
        return done

    def set_identity(self, identity: CacheIdentity) -> None:
        """As for every connector; saves that wait for slots know whose they are."""
        self._store.set_identity(identity)

    def quarantine(self, blocks: Sequence[BlockName]) -> None:
        self._store.quarantine(blocks)

    @property
    def admin(self) -> Admin:
        """What people ask of the store."""
        return self._store.admin

    @property
    def events(self) -> EventLog:
        """What came into the store's tiers and left them."""
        return self._store.events

    @property
    def num_returns(self) -> int:
        return self._store.num_returns

    def stats(self) -> dict[str, Any]:
        return self._store.stats()

    def flush(self, timeout_s: float) -> bool:
        """Wait for saves that have reached the store, and for those on their way to it. Blocks: for shutdown only."""
        deadline_s = time.monotonic() + timeout_s
        while self._saves or any(run.job.ticket is None for _, run in self._copies):
            self._done = self.poll()
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(0.001)
        return self._store.flush(max(0.0, deadline_s - time.monotonic()))

    def check(self) -> None:
        """Raise AssertionError when slots or jobs are lost."""
        self._store.check()
        runs = [*self._stored.values(), *(run for _, run in self._copies), *self._late.values()]
        held = [slot for run in runs for slot in run.slots]
        assert sorted([*held, *self._free]) == list(range(self._staging.num_slots)), "staging slots lost or held twice"

    def close(self) -> None:
        self._store.close()
        self._staging.close()

    def _new_job(self, ticket: int | None, blocks: Sequence[BlockName], block_ids: Sequence[int]) -> _Job:
        assert len(blocks) == len(block_ids), f"{len(blocks)} names for {len(block_ids)} blocks"
        number, self._next = self._next, self._next + 1
        return _Job(
            number,
            self._store.domain,
            ticket,
            tuple(blocks),
            tuple(block_ids),
            [None] * len(blocks),
            [None] * len(blocks),
        )

    def _enter(self, job: _Job, queue: deque[_Job]) -> int:
        if job.waiting:
            queue.append(job)
        else:
            self._finish_if_over(job)
        self._start_runs()
        return job.job

    def _start_runs(self) -> None:
        for queue in (self._loads, self._saves):
            while queue and self._free:
                job = queue[0]
                count = min(len(job.waiting), len(self._free), self._max_run)
                indices = tuple(job.waiting.popleft() for _ in range(count))
                run = _Run(job, indices, tuple(self._free.pop() for _ in range(count)))
                job.num_runs += 1
                if not job.waiting:
                    queue.popleft()
                self._start(run)

    def _start(self, run: _Run) -> None:
        if run.job.ticket is None:
            token = self._staging.start_copy_out([run.job.block_ids[i] for i in run.indices], run.slots)
            self._copies.append((token, run))
        else:
            names = [run.job.names[i] for i in run.indices]
            views = [self._staging.view(slot) for slot in run.slots]
            self._stored[self._store.submit_load(run.job.ticket, names, views)] = run

    def _advance(self, completion: Completion) -> None:
        if isinstance(completion, LookupDone):
            self._done.append(completion)
        elif isinstance(completion, LoadDone):
            self._loaded(completion, self._stored.pop(completion.job))
        elif isinstance(completion, LoadQuiesced):
            self._give(self._late.pop(completion.job).slots)
        else:
            self._put(completion, self._stored.pop(completion.job))

    def _loaded(self, done: LoadDone, run: _Run) -> None:
        """Copy what is loaded to the device; slots that may still be written to are kept aside."""
        job = run.job
        for i, status, tier in zip(run.indices, done.statuses, done.tiers, strict=True):
            job.statuses[i], job.tiers[i] = status, tier
        good = [k for k, status in enumerate(done.statuses) if status is BlockStatus.OK]
        rest = tuple(slot for k, slot in enumerate(run.slots) if done.statuses[k] is not BlockStatus.OK)
        if done.quiesced:
            self._give(rest)
        else:
            self._late[done.job] = _Run(job, (), rest)
        loaded = _Run(job, tuple(run.indices[k] for k in good), tuple(run.slots[k] for k in good))
        token = self._staging.start_copy_in(loaded.slots, [job.block_ids[i] for i in loaded.indices])
        self._copies.append((token, loaded))

    def _put(self, done: PutDone, run: _Run) -> None:
        for i, status in zip(run.indices, done.statuses, strict=True):
            run.job.statuses[i] = status
        self._end(run)

    def _copied(self, run: _Run) -> None:
        if run.job.ticket is None:
            names = [run.job.names[i] for i in run.indices]
            views = [self._staging.view(slot) for slot in run.slots]
            self._stored[self._store.submit_put(names, views, domain=run.job.domain)] = run
        else:
            self._end(run)

    def _end(self, run: _Run) -> None:
        self._give(run.slots)
        run.job.num_runs -= 1
        self._finish_if_over(run.job)

    def _give(self, slots: Sequence[int]) -> None:
        self._free.extend(slots)

    def _finish_if_over(self, job: _Job) -> None:
        if not job.is_over:
            return
        statuses = tuple(status or BlockStatus.MISS for status in job.statuses)
        if job.ticket is None:
            self._done.append(PutDone(job.job, statuses))
        else:
            self._done.append(LoadDone(job.job, statuses, tuple(job.tiers), quiesced=True))
