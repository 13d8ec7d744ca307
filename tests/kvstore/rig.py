"""A store over memory tiers for tests: real threads or a seeded order, and a clock that moves only when told to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from pagetier.kvstore.block import Address, BlockName, BlockStatus
from pagetier.kvstore.config import StoreLimits
from pagetier.kvstore.executor import SeededExecutor
from pagetier.kvstore.job import Completion, LoadDone, LoadQuiesced, LookupDone, PutDone
from pagetier.kvstore.memory import Faults, MemoryTier
from pagetier.kvstore.store import TieredStore
from pagetier.kvstore.tier import BlockWrite, Tier
from pagetier.kvstore.watch import Watch
from tests.kvstore.tier_contract import PART, payload_of

PAYLOAD_BYTES = 64
UNTOUCHED = 0xAB
PATIENCE_S = 20.0

C = TypeVar("C", LookupDone, LoadDone, LoadQuiesced, PutDone)


class Clock:
    """Seconds that pass when someone sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def payload(name: BlockName) -> bytes:
    return payload_of(name, PART, PAYLOAD_BYTES)


def memory(name: str, num_blocks: int = 64, clock: Clock | None = None, *, at_once: bool | None = None) -> MemoryTier:
    """A tier of that many blocks; `redis` answers lookups by I/O unless told otherwise."""
    at_once = name != "redis" if at_once is None else at_once
    capacity, faults = num_blocks * PAYLOAD_BYTES, Faults()
    if clock is None:
        return MemoryTier(capacity, name=name, answers_at_once=at_once, faults=faults)
    return MemoryTier(capacity, name=name, answers_at_once=at_once, faults=faults, clock=clock, sleep=clock.sleep)


class Buffers:
    """Destinations, and whether they hold their blocks."""

    def __init__(self, names: Sequence[BlockName]) -> None:
        self.names = list(names)
        self.bytes = [bytearray([UNTOUCHED]) * PAYLOAD_BYTES for _ in names]

    @property
    def views(self) -> list[memoryview]:
        return [memoryview(buffer) for buffer in self.bytes]

    def assert_right(self, statuses: Sequence[BlockStatus]) -> None:
        """Every block that is said to be loaded holds its own bytes."""
        for name, buffer, status in zip(self.names, self.bytes, statuses, strict=True):
            assert status is not BlockStatus.OK or bytes(buffer) == payload(name), f"wrong bytes at {name.position}"


class Rig:
    """A store and the tiers below it. A context manager that checks everything at the end: pins = 0."""

    def __init__(
        self,
        *tiers: Tier,
        threads: bool = False,
        executor: SeededExecutor | None = None,
        clock: Clock | None = None,
        budget_s: float = 10.0,
        second_touch: Sequence[str] = (),
        domain: bytes | None = None,
        watch: Watch | None = None,
        **limits: float,
    ) -> None:
        self.tiers, self.clock = tiers, clock
        self.executor = executor or SeededExecutor.inline()
        values: dict[str, float] = {"floor_bytes_per_s": float("inf"), "piece_bytes": 4 * PAYLOAD_BYTES, **limits}
        values = dict.fromkeys(("put_piece_bytes", "large_piece_bytes"), values["piece_bytes"]) | values
        make = {} if threads else {"make_executor": self.executor.factory}
        timed = {} if clock is None else {"clock": clock}
        self.store = TieredStore(
            tiers,
            part=PART,
            payload_bytes=PAYLOAD_BYTES,
            domain=domain,
            load_budget_s=budget_s,
            second_touch=second_touch,
            watch=watch,
            limits=StoreLimits(**values),  # type: ignore[arg-type]
            **make,  # type: ignore[arg-type]
            **timed,  # type: ignore[arg-type]
        )
        self.seen: list[Completion] = []

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.until(lambda: not self.store.has_work)
            self.store.check()
            assert self.store.counters()["tickets"] == 0, "a test must release its tickets"
        self.store.close()
        if kind is None:
            for tier in self.tiers:
                assert not isinstance(tier, MemoryTier) or tier.num_pinned == 0, f"pins left in {tier.name}"

    def until(self, is_over: Callable[[], bool]) -> None:
        """Poll until then, keeping what was seen."""
        limit_s = time.monotonic() + PATIENCE_S
        while not is_over():
            assert time.monotonic() < limit_s, f"nothing after {PATIENCE_S} s; seen: {self.seen}"
            self.seen += self.store.poll()
            if not self.executor.num_waiting:
                time.sleep(0.0002)

    def find(self, kind: type[C], number: int) -> C | None:
        for completion in self.seen:
            if isinstance(completion, kind):
                own = completion.ticket if isinstance(completion, LookupDone) else completion.job
                if own == number:
                    return completion
        return None

    def wait(self, kind: type[C], number: int) -> C:
        self.until(lambda: self.find(kind, number) is not None)
        found = self.find(kind, number)
        assert found is not None
        return found

    def put(self, names: Sequence[BlockName]) -> tuple[BlockStatus, ...]:
        job = self.store.submit_put(names, [memoryview(payload(name)) for name in names])
        return self.wait(PutDone, job).statuses

    def lookup(self, names: Sequence[BlockName]) -> tuple[int, tuple[str, ...]]:
        ticket = self.store.submit_lookup(names)
        return ticket, self.wait(LookupDone, ticket).tiers

    def load(self, ticket: int, names: Sequence[BlockName]) -> tuple[LoadDone, Buffers]:
        buffers = Buffers(names)
        done = self.wait(LoadDone, self.store.submit_load(ticket, names, buffers.views))
        buffers.assert_right(done.statuses)
        return done, buffers


def hit(rig: Rig, names: Sequence[BlockName]) -> None:
    """Look a chain up and load it all."""
    ticket, tiers = rig.lookup(names)
    assert len(tiers) == len(names)
    rig.load(ticket, names)
    rig.store.release(ticket)


def store_in(tier: Tier, names: Sequence[BlockName]) -> None:
    """Put blocks into one tier, past the store."""
    statuses = tier.put([BlockWrite(name, PART, memoryview(payload(name))) for name in names], time.monotonic() + 1e6)
    assert statuses == [BlockStatus.OK] * len(names)


def addresses(names: Sequence[BlockName]) -> list[Address]:
    return [Address(name.key, PART) for name in names]
