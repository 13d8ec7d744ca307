"""The reading end: neighbours merged into few large reads, straight into destinations, every record verified."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap

from pagetier.kvstore.block import BlockStatus
from pagetier.kvstore.nvme.catalog import Catalog
from pagetier.kvstore.nvme.files import Files, read_full
from pagetier.kvstore.nvme.handles import Handles, Segment
from pagetier.kvstore.nvme.index import Place, RecordIndex
from pagetier.kvstore.nvme.log import is_aligned
from pagetier.kvstore.nvme.quarantine import Quarantine
from pagetier.kvstore.nvme.segment import round_up
from pagetier.kvstore.record import PAGE_BYTES, RecordStatus, unpack
from pagetier.kvstore.tier import BlockRead

log = logging.getLogger(__name__)

READ_BYTES = 16 << 20  # most that one read operation carries
_MAX_RECORDS = 256  # of one read operation: three buffers each stay below IOV_MAX
_MAX_STRIKES = 3  # failed reads of one record, while others could be read, after which it is given up


@dataclass(frozen=True, slots=True)
class Wanted:
    """A record to read: its position in the batch, where it lies, where it goes and whose it has to be."""

    index: int
    address: bytes
    place: Place
    read: BlockRead
    domain: bytes

    @property
    def room(self) -> memoryview:
        """Where its payload goes as it is stored: into the front of the destination, with padding that fits there."""
        return self.read.destination[: round_up(self.place.payload_bytes)]


def plan_runs(wanted: Sequence[Wanted]) -> list[list[Wanted]]:
    """Sort into runs that lie back to back in one segment, each one read operation."""
    runs: list[list[Wanted]] = []
    nbytes = 0
    for record in sorted(wanted, key=lambda entry: (entry.place.segment, entry.place.page)):
        size = record.place.end - record.place.offset
        last = runs[-1][-1].place if runs else None
        joins = last is not None and last.segment == record.place.segment and last.end == record.place.offset
        if joins and len(runs[-1]) < _MAX_RECORDS and nbytes + size <= READ_BYTES:
            runs[-1].append(record)
            nbytes += size
        else:
            runs.append([record])
            nbytes = size
    return runs


class Scratch:
    """Page-aligned buffers for headers and padding, one per read in progress. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[memoryview] = []  # guarded by self._lock

    def take(self) -> memoryview:
        """Pages for the headers of one run, then one page for padding."""
        with self._lock:
            return self._idle.pop() if self._idle else memoryview(mmap(-1, (_MAX_RECORDS + 1) * PAGE_BYTES))

    def give(self, buffer: memoryview) -> None:
        with self._lock:
            self._idle.append(buffer)


class Reader:
    """Reads and verifies. Thread-safe. `bytes_read`, `errors`: counts since start."""

    def __init__(
        self, files: Files, catalog: Catalog, index: RecordIndex, handles: Handles, quarantine: Quarantine
    ) -> None:
        self._files, self._catalog, self._index, self._handles = files, catalog, index, handles
        self._quarantine = quarantine
        self.mac_key: bytes | None = None  # of the records; set before the first read
        self._scratch = Scratch()
        self.direct = False
        self._lock = threading.Lock()
        self.bytes_read = 0  # guarded by self._lock
        self.errors = 0  # guarded by self._lock
        self._strikes: dict[bytes, int] = {}  # guarded by self._lock

    def read(self, wanted: Sequence[Wanted], statuses: list[BlockStatus], deadline_s: float) -> None:
        """Read each record and set its entry of `statuses`."""
        failed: list[Wanted] = []
        scratch = self._scratch.take()
        try:
            for run in plan_runs(wanted):
                if self._read_run(run, statuses, scratch, deadline_s):
                    continue
                for record in run if len(run) > 1 else ():  # each alone, so that one bad sector costs one record
                    self._read_run([record], statuses, scratch, deadline_s)
                failed += [record for record in run if statuses[record.index] is BlockStatus.ERROR]
        finally:
            self._scratch.give(scratch)
        any_read = any(statuses[record.index] is BlockStatus.OK for record in wanted)
        for record in failed:
            self._count_error(record, others_read=any_read)

    def _read_run(self, run: list[Wanted], statuses: list[BlockStatus], scratch: memoryview, deadline_s: float) -> bool:
        """Read one run and set its statuses; False when the read itself failed."""
        if self._files.now_s() >= deadline_s:
            for record in run:
                statuses[record.index] = BlockStatus.TIMEOUT
            return True
        segment = self._catalog.get(run[0].place.segment)
        direct = self.direct and all(is_aligned(record.read.destination) for record in run)
        for record in run:
            statuses[record.index] = BlockStatus.MISS
        if segment is None:
            return True
        try:
            fd, handle = self._handles.acquire(segment, direct)
            try:
                got = read_full(self._files, fd, self._buffers(run, scratch), run[0].place.offset)
            finally:
                self._handles.release(handle)
        except FileNotFoundError:
            self._catalog.drop(segment)
            return True
        except OSError as error:
            log.warning("%s: reading %d records failed (%s)", segment.path, len(run), error)
            for record in run:
                statuses[record.index] = BlockStatus.ERROR
            return False
        for i, record in enumerate(run):
            page = scratch[i * PAGE_BYTES : (i + 1) * PAGE_BYTES]
            whole = record.place.offset - run[0].place.offset + PAGE_BYTES + record.place.payload_bytes <= got
            statuses[record.index] = self._judge(segment, record, page) if whole else self._cut(segment, record)
        return True

    def _buffers(self, run: list[Wanted], scratch: memoryview) -> list[memoryview]:
        buffers = []
        for i, record in enumerate(run):
            buffers.append(scratch[i * PAGE_BYTES : (i + 1) * PAGE_BYTES])
            buffers.append(record.room)
            padding = round_up(record.place.payload_bytes) - record.room.nbytes
            if padding:
                buffers.append(scratch[_MAX_RECORDS * PAGE_BYTES :][:padding])
        return buffers

    def _cut(self, segment: Segment, record: Wanted) -> BlockStatus:
        """The file ends before the record does. Whoever evicts a segment leaves nothing of it; else it is damage."""
        if self._quarantine.is_evicted(segment, record.address, record.place):
            return self._lost(record)
        return self._condemn(segment, record, "cut short")

    def _condemn(self, segment: Segment, record: Wanted, reason: str) -> BlockStatus:
        self._quarantine.condemn(segment, record.address, record.place, reason)
        return BlockStatus.CORRUPT

    def _lost(self, record: Wanted) -> BlockStatus:
        self._index.remove(record.address, record.place)
        return BlockStatus.MISS

    def _judge(self, segment: Segment, record: Wanted, page: memoryview) -> BlockStatus:
        read = record.read
        stored = read.destination[: record.place.payload_bytes]
        status = unpack(page, stored, read.destination, record.domain, read.name, read.part, mac_key=self.mac_key)
        if status is RecordStatus.OK:
            with self._lock:
                self.bytes_read += stored.nbytes
                if self._strikes:
                    self._strikes.pop(record.address, None)
            return BlockStatus.OK
        if self._quarantine.is_evicted(segment, record.address, record.place):
            return self._lost(record)
        return self._condemn(segment, record, status.value)

    def _count_error(self, record: Wanted, *, others_read: bool) -> None:
        """Count a failed read. A record that fails again and again while the disk answers for others is given up."""
        with self._lock:
            self.errors += 1
            if not others_read:
                return
            strikes = self._strikes.get(record.address, 0) + 1
            self._strikes[record.address] = strikes
        segment = self._catalog.get(record.place.segment)
        if strikes >= _MAX_STRIKES and segment is not None:
            self._condemn(segment, record, "unreadable")
            with self._lock:
                self._strikes.pop(record.address, None)
