"""The host tier: blocks in an arena of this process, found by a dict, evicted by chains.

Knows no other tier and no device. Payload bytes are copied outside the lock, several blocks at once; a slot that is
being read or written is held until that copy is over. Every read is verified: name, then checksum, which is made from
the bytes on their way, so no reader can be given a flipped bit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pagetier.kvstore.arena import SLAB_BYTES, Arena, Slot
from pagetier.kvstore.block import Address, BlockName, BlockStatus, Part
from pagetier.kvstore.copier import Copier, Copy, PlainCopier
from pagetier.kvstore.errors import CapacityError
from pagetier.kvstore.residents import Lease, Residents
from pagetier.kvstore.tier import BlockRead, BlockWrite, Description, ListedRecord, TierCounters

COPY_BYTES = 8 << 20  # copied by one call, about: half a millisecond, in which neither lock nor GIL is asked for


@dataclass(slots=True)
class _Entry:
    name: BlockName
    slot: Slot
    checksum: bytes  # xxh3-128 of the payload
    domain: bytes | None
    num_readers: int = 0
    is_doomed: bool = False  # out of the index; its slot is freed by the last reader


@dataclass(frozen=True, slots=True)
class Loan:
    """A block that a reader outside of the tier may copy from the arena until it gives it back. offset: from the
    arena's start. checksum: xxh3-128 of the payload, for the reader to verify its copy against.
    """

    offset: int
    nbytes: int
    checksum: bytes
    entry: _Entry


class HostTier:
    """Implements `tier.Tier` and `tier.PinningTier`. Pins hold at most half of the capacity.

    poison: overwrite a slot when it is freed, so that a read of bytes that are gone shows (--paranoid). copier: moves
    the bytes.
    Invariants: the index and the account hold the same addresses; every entry has a slot of its own; a slot is freed
    only when nobody copies from it.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        slab_bytes: int = SLAB_BYTES,
        clock: Callable[[], float] = time.monotonic,
        poison: bool = False,
        copier: Copier | None = None,
    ) -> None:
        self._clock, self._copier = clock, copier or PlainCopier()
        self._lock = threading.Lock()
        self._arena = Arena(capacity_bytes, slab_bytes=slab_bytes, poison=poison)  # guarded by self._lock, as all below
        self._entries: dict[Address, _Entry] = {}
        self._writing: set[Address] = set()
        self._residents = Residents(self._arena.capacity_bytes // 2)
        self._identities: dict[bytes, bytes] = {}
        self._num_doomed = self._corrupt = self._bytes_read = self._bytes_written = 0
        self._is_closed = False

    @property
    def name(self) -> str:
        return "host"

    @property
    def answers_at_once(self) -> bool:
        return True

    @property
    def num_pinned(self) -> int:
        with self._lock:
            return self._residents.num_pinned

    def set_domain(self, domain: bytes) -> None:
        """Nothing to do: keys and roots, which entries are compared by, are the domain's already."""

    def lookup(self, addresses: Sequence[Address], deadline_s: float) -> int:
        with self._lock:
            return self._residents.num_leading(addresses)

    def get(self, reads: Sequence[BlockRead], deadline_s: float) -> list[BlockStatus]:
        statuses: list[BlockStatus] = []
        for few in _in_calls(reads):
            late = self._clock() > deadline_s
            statuses += [BlockStatus.TIMEOUT] * len(few) if late else self._read(few)
        return statuses

    def put(self, writes: Sequence[BlockWrite], deadline_s: float) -> list[BlockStatus]:
        statuses: list[BlockStatus] = []
        dropped: set[Address] = set()  # the rest of a chain goes with what was dropped of it
        for write in writes:
            if self._clock() > deadline_s:
                statuses.append(BlockStatus.TIMEOUT)
                continue
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
    def arena_fd(self) -> int:
        """The arena's descriptor, to be shared; the file only grows, and never beyond `capacity_bytes`."""
        return self._arena.fd

    @property
    def slab_bytes(self) -> int:
        """No slot of the arena crosses a multiple of this."""
        return self._arena.slab_bytes

    def lend(self, names: Sequence[BlockName], part: Part) -> list[Loan | None]:
        """Blocks to copy straight from the arena, None for those that are not there. They stay until `give_back`,
        evicted or not."""
        with self._lock:
            return [self._lend(name, part) for name in names]

    def _lend(self, name: BlockName, part: Part) -> Loan | None:
        entry = self._entries.get(Address(name.key, part))
        if entry is None or entry.name != name or self._is_closed:
            return None
        entry.num_readers += 1
        self._bytes_read += entry.slot.nbytes
        return Loan(entry.slot.offset, entry.slot.nbytes, entry.checksum, entry)

    def give_back(self, loan: Loan) -> None:
        """Its reader is done; once for each loan."""
        with self._lock:
            if not self._is_closed:
                self._end_reading(loan.entry)

    def describe(self, addresses: Sequence[Address], deadline_s: float) -> list[Description | None]:
        with self._lock:
            found = [self._entries.get(address) for address in addresses]
            return [None if entry is None else Description(entry.slot.nbytes, entry.name) for entry in found]

    def records(self, deadline_s: float) -> Iterator[ListedRecord]:
        with self._lock:
            entries = list(self._entries.items())
        for address, entry in entries:
            yield ListedRecord(entry.name, address.part, entry.slot.nbytes, entry.domain)

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
                blocks=len(self._entries),
                nbytes=self._residents.nbytes,
                capacity_bytes=self._arena.capacity_bytes,
                evictions=self._residents.num_evicted,
                corrupt=self._corrupt,
                bytes_read=self._bytes_read,
                bytes_written=self._bytes_written,
            )

    def check(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._residents.check()
            self._arena.check()
            assert all(address in self._residents for address in self._entries), "a block that the account lacks"
            assert len(self._residents) == len(self._entries), "the account and the index hold different blocks"
            taken = len(self._entries) + len(self._writing) + self._num_doomed
            assert taken == self._arena.num_taken, f"{self._arena.num_taken} slots taken for {taken} blocks"
            nbytes = sum(entry.slot.nbytes for entry in self._entries.values())
            assert nbytes == self._residents.nbytes, f"{nbytes} bytes, counted {self._residents.nbytes}"

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._entries.clear()
                self._arena.close()

    def _read(self, reads: Sequence[BlockRead]) -> list[BlockStatus]:
        statuses, found = [BlockStatus.MISS] * len(reads), dict[int, _Entry]()
        copies: list[Copy] = []
        with self._lock:
            for i, read in enumerate(reads):
                entry = self._entries.get(read.address)
                if entry is None:
                    continue
                if entry.name != read.name or entry.slot.nbytes != len(read.destination):
                    self._corrupt += 1  # another block under its key: it goes, or the true one could never be stored
                    self._forget(read.address)
                    statuses[i] = BlockStatus.CORRUPT
                    continue
                entry.num_readers += 1
                found[i] = entry
                copies.append((self._arena.view(entry.slot), read.destination))
        digests = self._copier.copy(copies)
        for view, _ in copies:
            view.release()
        with self._lock:
            for (i, entry), digest in zip(found.items(), digests, strict=True):
                is_sound = digest == entry.checksum
                if not is_sound and not entry.is_doomed:
                    self._corrupt += 1
                    self._forget(reads[i].address)
                self._end_reading(entry)
                self._bytes_read += entry.slot.nbytes if is_sound else 0
                statuses[i] = BlockStatus.OK if is_sound else BlockStatus.CORRUPT
        return statuses

    def _end_reading(self, entry: _Entry) -> None:
        """One reader less; the last one frees the slot of an entry that has left the index. Needs the lock."""
        entry.num_readers -= 1
        if entry.is_doomed and not entry.num_readers:
            self._num_doomed -= 1
            self._arena.free(entry.slot)

    def _write(self, write: BlockWrite) -> BlockStatus:
        address, parent = write.address, Address(write.name.parent, write.part)
        with self._lock:
            entry = self._entries.get(address)
            if entry is not None:
                is_same = entry.name == write.name and entry.slot.nbytes == len(write.source)
                return BlockStatus.EXISTS if is_same else BlockStatus.DROPPED
            if address in self._writing:  # another thread stores it at this moment
                return BlockStatus.EXISTS
            if self._is_closed:
                return BlockStatus.DROPPED
            slot = self._make_room(len(write.source), parent, is_head=write.name.parent == write.name.root)
            if slot is None:
                return BlockStatus.DROPPED
            self._writing.add(address)
            view = self._arena.view(slot)
        (checksum,) = self._copier.copy([(write.source, view)])
        view.release()
        with self._lock:
            self._writing.discard(address)
            self._entries[address] = _Entry(write.name, slot, checksum, write.domain)
            self._residents.add(address, parent, slot.nbytes)
            self._bytes_written += slot.nbytes
        return BlockStatus.OK

    def _make_room(self, nbytes: int, parent: Address, *, is_head: bool) -> Slot | None:
        """A slot, or None when there is no room and nobody leaves for this block."""
        try:
            while (slot := self._arena.alloc(nbytes)) is None:
                victim = self._residents.evict_for(parent, is_head=is_head)
                if victim is None:
                    return None
                self._let_go(self._entries.pop(victim))
        except CapacityError:
            return None
        return slot

    def _forget(self, address: Address) -> int:
        if not self._residents.remove(address):
            return 0
        self._let_go(self._entries.pop(address))
        return 1

    def _let_go(self, entry: _Entry) -> None:
        """Free the slot of an entry that has left the index, now or after its last reader."""
        if entry.num_readers:
            entry.is_doomed = True
            self._num_doomed += 1
        else:
            self._arena.free(entry.slot)


def _in_calls(reads: Sequence[BlockRead]) -> Iterator[Sequence[BlockRead]]:
    """Runs of at most COPY_BYTES, one read at least."""
    first = nbytes = 0
    for i, read in enumerate(reads):
        if nbytes and nbytes + len(read.destination) > COPY_BYTES:
            yield reads[first:i]
            first, nbytes = i, 0
        nbytes += len(read.destination)
    if first < len(reads):
        yield reads[first:]
