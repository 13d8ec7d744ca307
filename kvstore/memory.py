"""The tier that needs nothing: records in a dict. The readable reference of `Tier`, and the test double that ships.

Verifies every read like a tier with a medium (name, then checksum), is bounded, evicts by chains, and breaks on
request through `Faults`. One lock, held while bytes are copied: right for small payloads, not meant for speed.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import xxhash

from pagetier.kvstore.block import Address, BlockName, BlockStatus
from pagetier.kvstore.errors import TierUnavailable
from pagetier.kvstore.residents import Lease, Residents
from pagetier.kvstore.tier import BlockRead, BlockWrite, Description, ListedRecord, TierCounters

POISON = 0xEE  # fills destinations of failed reads, so that a use of undefined bytes is seen


class Fault(StrEnum):
    """What befalls one block of a `get` or `put`."""

    ERROR = "error"  # the medium fails; nothing read or written
    TIMEOUT = "timeout"  # the answer does not come in time
    SHORT = "short"  # read: half of the bytes arrive, then an error
    CORRUPT = "corrupt"  # read: a stored byte is flipped; the record is quarantined
    LOST = "lost"  # read: the record was evicted a moment ago


@dataclass(slots=True)
class Faults:
    """What goes wrong, changed at will by the test that owns it.

    reads, writes: fault by ordinal: the nth block read or written since the tier was made, from 0.
    rate, rng: every block read or written fails with this probability, by a kind that `rng` draws.
    down: every call fails at once. silent: no call answers before its deadline. delay_s: every call takes that long
    (or until its deadline, then TIMEOUT). stubborn: delays ignore the deadline and the bytes still arrive, late.
    gate: calls to `get` wait for it, whatever their deadline; `waiting` is set when one does.
    """

    reads: dict[int, Fault] = field(default_factory=dict)
    writes: dict[int, Fault] = field(default_factory=dict)
    rate: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    down: bool = False
    silent: bool = False
    delay_s: float = 0.0
    stubborn: bool = False
    gate: threading.Event | None = None
    waiting: threading.Event = field(default_factory=threading.Event)

    def of_read(self, ordinal: int) -> Fault | None:
        fault = self.reads.get(ordinal)
        if fault is None and self.rate and self.rng.random() < self.rate:
            fault = self.rng.choice(list(Fault))
        return fault

    def of_write(self, ordinal: int) -> Fault | None:
        fault = self.writes.get(ordinal)
        if fault is None and self.rate and self.rng.random() < self.rate:
            fault = self.rng.choice((Fault.ERROR, Fault.TIMEOUT))
        return fault


@dataclass(slots=True)
class _Record:
    name: BlockName
    payload: bytearray
    checksum: int
    domain: bytes | None = None


class MemoryTier:
    """Implements `tier.Tier` and `tier.PinningTier` over a dict. Pins hold at most half of the capacity.

    name: what it calls itself, so that it can stand in for `nvme` or `redis` in tests. answers_at_once False makes the
    store treat its lookups as I/O. clock and sleep: seconds; injected by tests that must not wait.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        name: str = "memory",
        answers_at_once: bool = True,
        faults: Faults | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.faults = faults if faults is not None else Faults()
        self._name, self._at_once, self._capacity_bytes = name, answers_at_once, capacity_bytes
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._records: dict[Address, _Record] = {}  # guarded by self._lock, as all below
        self._residents = Residents(capacity_bytes // 2)
        self._identities: dict[bytes, bytes] = {}
        self._errors = self._corrupt = self._bytes_read = self._bytes_written = 0
        self._num_reads = self._num_writes = self._num_lost = 0

    @property
    def name(self) -> str:
        return self._name

    @property
    def answers_at_once(self) -> bool:
        return self._at_once

    def set_domain(self, domain: bytes) -> None:
        """Nothing to do: keys and roots, which records are compared by, are the domain's already."""

    def lookup(self, addresses: Sequence[Address], deadline_s: float) -> int:
        if not self._at_once:
            if self.faults.down:
                raise TierUnavailable(self._name, "lookup", "down")
            if not self._waited(deadline_s):
                raise TierUnavailable(self._name, "lookup", "no answer in time")
        with self._lock:
            return self._residents.num_leading(addresses)

    def get(self, reads: Sequence[BlockRead], deadline_s: float) -> list[BlockStatus]:
        if self.faults.gate is not None:
            self.faults.waiting.set()
            self.faults.gate.wait()
        elif self.faults.down:
            return self._failed(len(reads), BlockStatus.ERROR)
        elif not self._waited(deadline_s):
            return self._failed(len(reads), BlockStatus.TIMEOUT)
        with self._lock:
            return [self._read(read) for read in reads]

    def put(self, writes: Sequence[BlockWrite], deadline_s: float) -> list[BlockStatus]:
        if self.faults.down:
            return self._failed(len(writes), BlockStatus.ERROR)
        if not self._waited(deadline_s):
            return self._failed(len(writes), BlockStatus.TIMEOUT)
        statuses: list[BlockStatus] = []
        dropped: set[Address] = set()  # the rest of a chain goes with what was dropped of it
        with self._lock:
            for write in writes:
                orphan = Address(write.name.parent, write.part) in dropped
                statuses.append(BlockStatus.DROPPED if orphan else self._write(write))
                if statuses[-1] is BlockStatus.DROPPED:
                    dropped.add(write.address)
        return statuses

    def touch(self, addresses: Sequence[Address]) -> None:
        with self._lock:
            self._residents.touch(addresses)

    def delete(self, addresses: Sequence[Address]) -> int:
        with self._lock:
            return sum(self._forget(address) for address in addresses)

    def pin(self, addresses: Sequence[Address]) -> Lease:
        with self._lock:
            return self._residents.pin(addresses)

    def unpin(self, lease: Lease) -> None:
        with self._lock:
            self._residents.unpin(lease)

    @property
    def num_pinned(self) -> int:
        with self._lock:
            return self._residents.num_pinned

    def evict(self, num_blocks: int) -> int:
        """Evict that many of the coldest blocks; how many went. For tests of what an eviction does to others."""
        with self._lock:
            victims = self._residents.evict(num_blocks)
            for address in victims:
                del self._records[address]
            return len(victims)

    def describe(self, addresses: Sequence[Address], deadline_s: float) -> list[Description | None]:
        if self.faults.down:
            raise TierUnavailable(self._name, "describe", "down")
        with self._lock:
            found = [self._records.get(address) for address in addresses]
            return [None if record is None else Description(len(record.payload), record.name) for record in found]

    def records(self, deadline_s: float) -> Iterator[ListedRecord]:
        if self.faults.down:
            raise TierUnavailable(self._name, "list", "down")
        with self._lock:
            records = list(self._records.items())
        for address, record in records:
            yield ListedRecord(record.name, address.part, len(record.payload), record.domain)

    def report_removed(self, callback: Callable[[Sequence[bytes]], None]) -> None:
        with self._lock:
            self._residents.on_gone = callback

    def put_identity(self, domain: bytes, encoded: bytes) -> None:
        with self._lock:
            self._identities[domain] = encoded

    def identities(self) -> dict[bytes, bytes]:
        with self._lock:
            return dict(self._identities)

    def counters(self) -> TierCounters:
        with self._lock:
            return TierCounters(
                blocks=len(self._records),
                nbytes=self._residents.nbytes,
                capacity_bytes=self._capacity_bytes,
                evictions=self._residents.num_evicted + self._num_lost,
                errors=self._errors,
                corrupt=self._corrupt,
                bytes_read=self._bytes_read,
                bytes_written=self._bytes_written,
            )

    def check(self) -> None:
        with self._lock:
            self._residents.check()
            assert all(address in self._residents for address in self._records), "a record that the account lacks"
            assert len(self._residents) == len(self._records), "the account and the index hold different records"
            nbytes = sum(len(record.payload) for record in self._records.values())
            assert nbytes == self._residents.nbytes <= self._capacity_bytes, f"{nbytes} bytes of {self._capacity_bytes}"
            for address, record in self._records.items():
                assert record.name.key == address.key, f"record {record.name.key.hex()[:16]} at another's address"

    def close(self) -> None:
        """Nothing to let go of: the records stay, as a medium's would."""

    def _waited(self, deadline_s: float) -> bool:
        """Let time pass as the faults say; whether there is an answer before the deadline."""
        delay_s = self.faults.delay_s
        if self.faults.stubborn:
            self._sleep(delay_s)
            return True
        left_s = deadline_s - self._clock()
        if left_s < 0:
            return False
        if self.faults.silent or delay_s > left_s:
            self._sleep(left_s)
            return False
        if delay_s:
            self._sleep(delay_s)
        return True

    def _failed(self, num_blocks: int, status: BlockStatus) -> list[BlockStatus]:
        with self._lock:
            self._errors += num_blocks
        return [status] * num_blocks

    def _read(self, read: BlockRead) -> BlockStatus:
        fault = self.faults.of_read(self._num_reads)
        self._num_reads += 1
        record = self._records.get(read.address)
        if record is not None and fault is Fault.CORRUPT and record.payload:
            record.payload[0] ^= 0xFF
        elif record is not None and fault is not None:
            return self._faulty_read(read, record, fault)
        if record is None:
            return BlockStatus.MISS
        is_sound = record.name == read.name and len(record.payload) == len(read.destination)
        if is_sound:
            read.destination[:] = record.payload
            is_sound = xxhash.xxh3_128_intdigest(read.destination) == record.checksum
        if not is_sound:
            self._corrupt += 1
            self._forget(read.address)
            return BlockStatus.CORRUPT
        self._bytes_read += len(record.payload)
        return BlockStatus.OK

    def _faulty_read(self, read: BlockRead, record: _Record, fault: Fault) -> BlockStatus:
        half = len(read.destination) // 2
        read.destination[:] = bytes([POISON]) * len(read.destination)
        if fault is Fault.LOST:
            self._num_lost += self._forget(read.address)
            return BlockStatus.MISS
        self._errors += 1
        if fault is Fault.SHORT:
            read.destination[:half] = memoryview(record.payload)[:half]
        return BlockStatus.TIMEOUT if fault is Fault.TIMEOUT else BlockStatus.ERROR

    def _write(self, write: BlockWrite) -> BlockStatus:
        fault = self.faults.of_write(self._num_writes)
        self._num_writes += 1
        if fault is not None:
            self._errors += 1
            return BlockStatus.TIMEOUT if fault is Fault.TIMEOUT else BlockStatus.ERROR
        address = write.address
        if (there := self._records.get(address)) is not None:
            is_same = there.name == write.name and len(there.payload) == len(write.source)
            return BlockStatus.EXISTS if is_same else BlockStatus.DROPPED
        payload, parent = bytearray(write.source), Address(write.name.parent, write.part)
        if not self._make_room(len(payload), parent, is_head=write.name.parent == write.name.root):
            return BlockStatus.DROPPED
        self._records[address] = _Record(write.name, payload, xxhash.xxh3_128_intdigest(payload), write.domain)
        self._residents.add(address, parent, len(payload))
        self._bytes_written += len(payload)
        return BlockStatus.OK

    def _make_room(self, nbytes: int, parent: Address, *, is_head: bool) -> bool:
        """Evict for `nbytes`; whether there is room."""
        while self._residents.nbytes + nbytes > self._capacity_bytes:
            victim = self._residents.evict_for(parent, is_head=is_head)
            if victim is None:
                return False
            del self._records[victim]
        return True

    def _forget(self, address: Address) -> int:
        if not self._residents.remove(address):
            return 0
        del self._records[address]
        return 1
