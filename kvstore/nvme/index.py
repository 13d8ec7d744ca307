"""Where every record lies: one dict and four columns, some 200 bytes a record.

Owns addresses, places and recency; knows no files. Addresses are the 40 bytes of `record.address_bytes`. A *tick* is a
moment of use; records of a chain share the tick of the last touch, and a new record takes its parent's, so that no
parent is colder than its child. Thread-safe.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pagetier.kvstore.nvme.segment import LIVE, Entries, record_bytes
from pagetier.kvstore.record import PAGE_BYTES

MAX_GONE = 65_536  # kept for `take_gone`
_FREE = 0  # segment id of a slot without a record


class Place(NamedTuple):
    """A record's place: segment id, page of its header, payload bytes."""

    segment: int
    page: int
    payload_bytes: int

    @property
    def offset(self) -> int:
        return self.page * PAGE_BYTES

    @property
    def end(self) -> int:
        return self.page * PAGE_BYTES + record_bytes(self.payload_bytes)


class SegmentTicks(NamedTuple):
    """When the middle one of a segment's records was used, and when the last."""

    median: int
    hottest: int


class RecordIndex:
    """Address -> place, with recency. Invariants (`check`): dict and columns agree; nothing is listed twice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # all guarded by self._lock; `_slots` is also read without it, by `contains`
        self._slots: dict[bytes, int] = {}
        self._addresses: list[bytes | None] = []
        self._segments = array("I")
        self._pages = array("I")
        self._payload_bytes = array("I")
        self._ticks = array("Q")
        self._free = array("I")
        self._tick = 1
        self._nbytes = 0
        self._gone: deque[bytes] | None = None  # addresses withdrawn since `take_gone`, where somebody asks for them

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        """What the records take on disk."""
        return self._nbytes

    def contains(self, address: bytes) -> bool:
        return address in self._slots

    def num_leading(self, addresses: Iterable[bytes]) -> int:
        """How many of `addresses` are present before the first that is not. Takes no lock: a hint by contract."""
        present = list(map(self._slots.__contains__, addresses))
        return len(present) if all(present) else present.index(False)

    def find(self, addresses: Sequence[bytes]) -> list[Place | None]:
        """The place of each."""
        with self._lock:
            get = self._slots.get
            return [None if (slot := get(address)) is None else self._place(slot) for address in addresses]

    def _place(self, slot: int) -> Place:
        return Place(self._segments[slot], self._pages[slot], self._payload_bytes[slot])

    def add(self, address: bytes, parent: bytes, place: Place) -> None:
        """Make a complete record visible, as hot as its parent. One that is there already moves to `place`."""
        self.add_all([(address, parent, place)])

    def add_all(self, records: Iterable[tuple[bytes, bytes, Place]]) -> None:
        """`add` for each, at once: (address, parent, place)."""
        with self._lock:
            for address, parent, place in records:
                slot = self._slots.get(address)
                if slot is None:
                    above = self._slots.get(parent)
                    if above is None:
                        self._tick += 1
                    self._insert(address, place, self._tick if above is None else self._ticks[above])
                    continue
                self._nbytes += record_bytes(place.payload_bytes) - record_bytes(self._payload_bytes[slot])
                self._segments[slot], self._pages[slot], self._payload_bytes[slot] = place

    def _insert(self, address: bytes, place: Place, tick: int) -> None:
        if self._free:
            slot = self._free.pop()
            self._addresses[slot] = address
            self._segments[slot], self._pages[slot], self._payload_bytes[slot] = place
            self._ticks[slot] = tick
        else:
            slot = len(self._addresses)
            self._addresses.append(address)
            self._segments.append(place.segment)
            self._pages.append(place.page)
            self._payload_bytes.append(place.payload_bytes)
            self._ticks.append(tick)
        self._slots[address] = slot
        self._nbytes += record_bytes(place.payload_bytes)

    def load(self, segment: int, entries: Entries, erased: bytes) -> None:
        """Add a found segment's records, all with one new tick; those erased or known already are left out."""
        addresses = entries.address_list()
        pages = np.frombuffer(entries.pages, dtype="<u4")
        alive = np.frombuffer(erased, dtype=np.uint8)[pages // 2] == LIVE if len(pages) else np.zeros(0, bool)
        with self._lock:
            self._tick += 1
            if bool(alive.all()) and len(set(addresses)) == len(addresses) and self._slots.keys().isdisjoint(addresses):
                first, count = len(self._addresses), len(addresses)
                self._slots.update(zip(addresses, range(first, first + count), strict=True))
                self._addresses.extend(addresses)
                self._segments.frombytes(np.full(count, segment, "<u4").tobytes())
                self._pages.extend(entries.pages)
                self._payload_bytes.extend(entries.payload_bytes)
                self._ticks.frombytes(np.full(count, self._tick, "<u8").tobytes())
                payloads = np.frombuffer(entries.payload_bytes, dtype="<u4").astype(np.int64)
                self._nbytes += int((-(-payloads // PAGE_BYTES) + 1).sum()) * PAGE_BYTES
                return
            for i in range(len(addresses) - 1, -1, -1):  # of two with one address, the later write counts
                if alive[i] and addresses[i] not in self._slots:
                    place = Place(segment, entries.pages[i], entries.payload_bytes[i])
                    self._insert(addresses[i], place, self._tick)

    def touch(self, addresses: Iterable[bytes]) -> None:
        """Renew a chain: all of it gets one new tick."""
        with self._lock:
            self._tick += 1
            for address in addresses:
                slot = self._slots.get(address)
                if slot is not None:
                    self._ticks[slot] = self._tick

    def remove(self, address: bytes, place: Place | None = None) -> Place | None:
        """Withdraw a record (only if it lies at `place`, where given); where it was, None when it was not there."""
        with self._lock:
            slot = self._slots.get(address)
            if slot is None:
                return None
            found = self._place(slot)
            if place is not None and found != place:
                return None
            self._free_slot(address, slot)
            return found

    def _free_slot(self, address: bytes, slot: int) -> None:
        del self._slots[address]
        self._nbytes -= record_bytes(self._payload_bytes[slot])
        self._addresses[slot] = None
        self._segments[slot] = _FREE
        self._ticks[slot] = 0
        self._free.append(slot)
        if self._gone is not None:
            self._gone.append(address)

    def take_gone(self) -> list[bytes]:
        """Addresses that were withdrawn since the last call, or since the first one, and did not come back."""
        if self._gone is not None and not self._gone:
            return []
        with self._lock:
            gone, self._gone = self._gone, deque(maxlen=MAX_GONE)
            return [address for address in dict.fromkeys(gone or ()) if address not in self._slots]

    def drop_segment(self, segment: int) -> int:
        """Withdraw all records of a segment; how many."""
        with self._lock:
            slots = np.flatnonzero(np.frombuffer(self._segments, dtype="<u4") == segment).tolist()
            for slot in slots:
                address = self._addresses[slot]
                assert address is not None, f"slot {slot} of segment {segment} has no address"
                self._free_slot(address, slot)
            return len(slots)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            if self._gone is not None:
                self._gone.extend(self._slots)
            self._slots.clear()
            self._addresses.clear()
            for column in (self._segments, self._pages, self._payload_bytes, self._ticks, self._free):
                del column[:]
            self._nbytes = 0

    def segment_ticks(self) -> dict[int, SegmentTicks]:
        """The recency of every segment that has records."""
        with self._lock:
            segments = np.frombuffer(self._segments, dtype="<u4")
            ticks = np.frombuffer(self._ticks, dtype="<u8")
            order = np.lexsort((ticks, segments))
            idents, firsts, counts = np.unique(segments[order], return_index=True, return_counts=True)
            sorted_ticks = ticks[order]
            medians, hottest = sorted_ticks[firsts + counts // 2], sorted_ticks[firsts + counts - 1]
            columns = zip(idents.tolist(), medians.tolist(), hottest.tolist(), strict=True)
            return {ident: SegmentTicks(median, last) for ident, median, last in columns if ident != _FREE}

    def addresses_in(self, segment: int) -> set[bytes]:
        """Addresses of the records of a segment."""
        with self._lock:
            slots = np.flatnonzero(np.frombuffer(self._segments, dtype="<u4") == segment).tolist()
            return {address for slot in slots if (address := self._addresses[slot]) is not None}

    def records_in(self, segment: int) -> list[tuple[bytes, Place]]:
        """The records of a segment in the order in which they lie there."""
        with self._lock:
            slots = np.flatnonzero(np.frombuffer(self._segments, dtype="<u4") == segment).tolist()
            found = [(address, self._place(slot)) for slot in slots if (address := self._addresses[slot]) is not None]
        return sorted(found, key=lambda record: record[1].page)

    def hot_records(self, segment: int, max_bytes: int) -> list[tuple[bytes, Place]]:
        """Records of a segment that were used later than half of all records, hottest first, up to `max_bytes`."""
        with self._lock:
            segments = np.frombuffer(self._segments, dtype="<u4")
            ticks = np.frombuffer(self._ticks, dtype="<u8")
            live = ticks[segments != _FREE]
            if not len(live):
                return []
            slots = np.flatnonzero((segments == segment) & (ticks > np.median(live)))
            order = np.lexsort((np.frombuffer(self._pages, dtype="<u4")[slots], -ticks[slots].astype(np.int64)))
            chosen, nbytes = [], 0
            for slot in slots[order].tolist():
                place, address = self._place(slot), self._addresses[slot]
                nbytes += record_bytes(place.payload_bytes)
                if nbytes > max_bytes:
                    break
                assert address is not None, f"slot {slot} has no address"
                chosen.append((address, place))
            return chosen

    def places(self) -> list[tuple[bytes, Place]]:
        """Everything, for checks and listings."""
        with self._lock:
            return [(address, self._place(slot)) for address, slot in self._slots.items()]

    def check(self) -> None:
        """Raise AssertionError, with ids, when dict and columns disagree. O(n)."""
        with self._lock:
            columns = (self._segments, self._pages, self._payload_bytes, self._ticks)
            assert {len(column) for column in columns} == {len(self._addresses)}, "columns differ in length"
            assert len(self._free) + len(self._slots) == len(self._addresses), "slots leaked"
            assert len(set(self._free)) == len(self._free), "a slot is free twice"
            nbytes = 0
            for address, slot in self._slots.items():
                assert self._addresses[slot] == address, f"slot {slot} does not hold {address.hex()[:16]}"
                assert self._segments[slot] != _FREE, f"{address.hex()[:16]} lies in no segment"
                nbytes += record_bytes(self._payload_bytes[slot])
            assert nbytes == self._nbytes, f"records take {nbytes} bytes, counted {self._nbytes}"
