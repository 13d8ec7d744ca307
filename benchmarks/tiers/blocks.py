"""Chains of blocks with random payloads, in memory like a device pool's, and stores over one tier to move them.

Sizes are those of real models: 360 KiB is a block of the default model in bf16, 2 MiB one of Llama-3-8B.
"""

from __future__ import annotations

import dataclasses
import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pagetier.kvstore.block import BlockName, BlockStatus, Part
from pagetier.kvstore.config import StoreLimits
from pagetier.kvstore.job import Completion, LoadDone, LoadQuiesced, LookupDone, PutDone
from pagetier.kvstore.keys import chain_names, root_key
from pagetier.kvstore.store import TieredStore
from pagetier.kvstore.tier import Tier

BLOCK_SIZE = 16
DOMAIN = bytes(range(32))
PART = Part(0, 0, 30, 0, 3)
PAYLOADS = {"360KiB": 360 << 10, "2MiB": 2 << 20}
NEVER_S = 600.0
POLL_S = 0.0003  # between looks at the store: the engine looks once a step

_Awaited = TypeVar("_Awaited", LookupDone, LoadDone, LoadQuiesced)


def names_of(num_blocks: int, seed: int) -> list[BlockName]:
    """A chain of full blocks of random tokens; a new seed, another chain."""
    tokens = np.random.default_rng(seed).integers(0, 49_152, num_blocks * BLOCK_SIZE)
    return chain_names(root_key(DOMAIN), tokens, BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A chain, its payloads in `source` and as much room in `destination`, both (num_blocks, payload_bytes) u8."""

    names: list[BlockName]
    source: np.ndarray
    destination: np.ndarray

    @classmethod
    def random(cls, payload_bytes: int, total_bytes: int) -> Blocks:
        """About `total_bytes` of payloads. Neither side is touched by the kernel for the first time later."""
        shape = (total_bytes // payload_bytes, payload_bytes)
        source, destination = _pages(shape), _pages(shape)
        source.view(np.uint64)[:] = np.random.default_rng(0).integers(0, 1 << 63, source.view(np.uint64).shape)
        destination[:] = 0
        return cls(names_of(shape[0], seed=0), source, destination)

    def renamed(self, seed: int) -> Blocks:
        """The same memory as another chain, which no tier has seen."""
        return dataclasses.replace(self, names=names_of(len(self.names), seed))

    @property
    def payload_bytes(self) -> int:
        return int(self.source.shape[1])

    @property
    def nbytes(self) -> int:
        return int(self.source.nbytes)

    def sources(self) -> list[memoryview]:
        return [memoryview(row) for row in self.source]

    def destinations(self) -> list[memoryview]:
        return [memoryview(row) for row in self.destination]

    def take_loaded(self) -> None:
        """Raise RuntimeError unless every destination holds its source; then wipe them."""
        if not np.array_equal(self.source, self.destination):
            raise RuntimeError("a tier loaded other bytes than were put")
        self.destination[:] = 0


def _pages(shape: tuple[int, int]) -> np.ndarray:
    """Page-aligned u8 memory in huge pages where the kernel gives them, as the device pool's."""
    memory = mmap.mmap(-1, shape[0] * shape[1])
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8).reshape(shape)


def store_over(tier: Tier, payload_bytes: int) -> TieredStore:
    """A store as `serve` makes it, over one tier that exists; it closes the tier."""
    return TieredStore([tier], part=PART, payload_bytes=payload_bytes, domain=DOMAIN, load_budget_s=NEVER_S)


def put_rate(store: TieredStore, blocks: Blocks) -> float:
    """Bytes of payload per second from the first put to the last one that is stored. Puts are offered like an
    engine's: as many as the store's queue holds."""
    window = max(1, StoreLimits().put_queue_bytes // 4 // blocks.payload_bytes)
    sources, waiting, start_s = blocks.sources(), 0, time.perf_counter()
    for first in range(0, len(sources), window):
        store.submit_put(blocks.names[first : first + window], sources[first : first + window])
        waiting += 1
        while waiting > 2:
            waiting -= len(_puts(store))
    while waiting:
        waiting -= len(_puts(store))
    return blocks.nbytes / (time.perf_counter() - start_s)


def load_rate(store: TieredStore, blocks: Blocks) -> float:
    """Bytes of payload per second from the lookup to the last verified byte; the bytes are compared afterwards."""
    destinations, start_s = blocks.destinations(), time.perf_counter()
    ticket = store.submit_lookup(blocks.names)
    found = await_one(store, LookupDone)
    if len(found.tiers) != len(blocks.names):
        raise RuntimeError(f"{len(found.tiers)} of {len(blocks.names)} blocks found")
    store.submit_load(ticket, blocks.names, destinations)
    done = await_one(store, LoadDone)
    if not done.quiesced:
        await_one(store, LoadQuiesced)
    elapsed_s = time.perf_counter() - start_s
    store.release(ticket)
    _require(done.statuses, BlockStatus.OK)
    blocks.take_loaded()
    return blocks.nbytes / elapsed_s


def await_one(store: TieredStore, kind: type[_Awaited]) -> _Awaited:
    """The store's next completion of that kind; others are thrown away."""
    give_up_s = time.monotonic() + NEVER_S
    while time.monotonic() < give_up_s:
        for completion in store.poll():
            if isinstance(completion, kind):
                return completion
        time.sleep(POLL_S)
    raise RuntimeError(f"no {kind.__name__} in {NEVER_S:.0f} s")


def _puts(store: TieredStore) -> list[Completion]:
    done = store.poll()
    for completion in done:
        if isinstance(completion, PutDone):
            _require(completion.statuses, BlockStatus.OK)
    if not done:
        time.sleep(POLL_S)
    return done


def _require(statuses: Sequence[BlockStatus], wanted: BlockStatus) -> None:
    wrong = [status for status in statuses if status is not wanted]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(statuses)} blocks were not {wanted}: {wrong[0]}")
