"""NvmeTier: records in an append-only log of segments below one folder, shared by the processes of a host.

Synchronous by contract: called by the store's byte threads. Owns one small thread of its own that follows what other
writers do and finds the disk again after it was gone; it sleeps unless there are lookups.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from mmap import mmap
from pathlib import Path

from pagetier.kvstore.block import KEY_BYTES, Address, AddressRun, BlockName, BlockStatus, Part
from pagetier.kvstore.codec import NONE, stored_as
from pagetier.kvstore.config import MIN_NVME_BYTES
from pagetier.kvstore.errors import ConfigError, TierUnavailable
from pagetier.kvstore.nvme.catalog import Catalog
from pagetier.kvstore.nvme.files import DIRECT, Files, close_quietly
from pagetier.kvstore.nvme.folder import BLOCK_BYTES, TEMPORARY, Folder
from pagetier.kvstore.nvme.handles import Handles
from pagetier.kvstore.nvme.index import RecordIndex
from pagetier.kvstore.nvme.listing import Listing
from pagetier.kvstore.nvme.log import ROOM_S, LogSettings, Pending, SegmentLog
from pagetier.kvstore.nvme.quarantine import Quarantine
from pagetier.kvstore.nvme.reader import Reader, Wanted
from pagetier.kvstore.nvme.scrub import Scrubber
from pagetier.kvstore.nvme.segment import DELETED, record_bytes, round_up
from pagetier.kvstore.record import PAGE_BYTES, pack_header, part_tag
from pagetier.kvstore.tier import BlockRead, BlockWrite, Description, ListedRecord, TierCounters

log = logging.getLogger(__name__)

IO_MODES = ("auto", "direct", "buffered")
FSYNC_MODES = ("none", "segment", "always")
MIN_CAPACITY_BYTES = MIN_NVME_BYTES
_REFRESH_S = 0.5  # how often, at most, other writers' folders are looked at


class NvmeTier:
    """One process's view of PATH: writes to its own NN, reads them all. Thread-safe; see `pagetier.kvstore.tier`.

    A disk that is missing, full or broken makes statuses, not exceptions, and is tried again with every put and, at
    most every `refresh_s`, after lookups; `refresh_s=0` leaves that to explicit calls of `refresh`.
    scrub_bytes_per_s: how fast a thread re-reads what is closed, 0: none does.
    Raises ConfigError for settings that cannot be, among them io=direct on a file system without it.
    """

    name = "nvme"
    answers_at_once = True

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        domain: bytes,
        *,
        io: str = "auto",
        fsync: str = "segment",
        segment_bytes: int | None = None,
        files: Files | None = None,
        refresh_s: float = _REFRESH_S,
        mac_key: bytes | None = None,
        codec: int = NONE,
        scrub_bytes_per_s: int = 0,
    ) -> None:
        _validate(capacity_bytes, domain, io, fsync)
        if segment_bytes is None:
            segment_bytes = _default_segment_bytes(capacity_bytes)
        self.path = Path(path)
        self._io, self._domain, self._capacity_bytes, self._mac_key = io, domain, capacity_bytes, mac_key
        self._codec = codec  # of what is written; what is read may have any
        self._files = Files() if files is None else files
        self._folder = Folder(self._files, self.path)
        self._index = RecordIndex()
        self._handles = Handles(self._files)
        self._catalog = Catalog(self._files, self._folder, self._index, self._handles)
        settings = LogSettings(capacity_bytes, round_up(segment_bytes), fsync, mac_key)
        self._log = SegmentLog(self._files, self._folder, self._catalog, self._index, self._handles, settings)
        self._settings = settings
        parts = (self._files, self._catalog, self._index, self._handles)
        self._quarantine = Quarantine(self._files, self._folder, self._catalog, self._index, self._handles)
        self._reader, self._scrubber = Reader(*parts, self._quarantine), Scrubber(*parts, self._quarantine)
        self._listing = Listing(*parts)
        self._on_removed: Callable[[Sequence[bytes]], None] | None = None
        self._reader.mac_key = self._scrubber.mac_key = mac_key
        self._write_lock = threading.Lock()  # who appends, attaches or detaches; taken before any other lock
        self._attached = False  # guarded by self._write_lock for changes
        self._down = ""  # guarded by self._write_lock; why the tier is not attached
        self._write_errors = 0  # guarded by self._write_lock
        self._identities: dict[bytes, bytes] = {}  # guarded by self._write_lock; what this process wants kept
        self._unkept: dict[bytes, None] = {}  # guarded by self._write_lock; those that may not be there yet
        self._tags: dict[Part, bytes] = {}
        self._closed = False
        self._wake = threading.Event()
        self._stop = threading.Event()
        with self._write_lock:
            self._attach()
        self._thread: threading.Thread | None = None
        if refresh_s > 0:
            self._log.sync_later = self._wake.set
            self._thread = threading.Thread(target=self._follow, args=(refresh_s,), name="pagetier-nvme", daemon=True)
            self._thread.start()
        if scrub_bytes_per_s > 0:
            self._scrubber.start(scrub_bytes_per_s)

    # ---- finding the folder

    def _attach(self) -> bool:
        """Take a folder and learn what it holds; under the write lock. Never raises for the disk's faults."""
        if self._attached:
            return True
        if self._closed:
            return False
        try:
            self._folder.attach()
            self._log.recover(self._catalog.refresh())
            self._quarantine.trim(self._settings.quarantine_bytes)
            self._log.trim()
            self._settle_in()
            self._unkept = dict.fromkeys(self._identities)
            self._keep_identities(self._files.now_s() + ROOM_S)
        except OSError as error:
            self._detach(str(error))
            return False
        except ConfigError:
            self._detach("io=direct is impossible")
            self._handles.close()
            raise
        if self._down:
            log.warning("nvme tier at %s is back", self.path)
        self._attached, self._down = True, ""
        return True

    def _settle_in(self) -> None:
        """Have a folder to write to, and find out about direct I/O. Raises OSError, ConfigError."""
        if self._folder.writer is None or self._io != "buffered":
            with self._log.room(2 * BLOCK_BYTES, self._files.now_s() + ROOM_S) as has_room:
                if not has_room:
                    raise OSError(errno.EDQUOT, "no room for a start was to be had in time", str(self.path))
                if self._folder.writer is None:
                    self._folder.add_writer()
                direct = self._io != "buffered" and self._probe_direct()
        else:
            direct = False
        if self._io == "direct" and not direct and self._folder.writer is not None:
            raise ConfigError(f"--kv-nvme-io direct: the file system of {self.path} has no direct I/O; use auto")
        self._log.direct = self._reader.direct = self._scrubber.direct = direct

    def _detach(self, reason: str) -> None:
        if not self._down:
            log.warning("nvme tier at %s is unavailable (%s): nothing is found or stored there", self.path, reason)
        self._attached, self._down = False, reason
        self._log.close_open()
        self._catalog.clear()
        self._folder.detach()

    def _probe_direct(self) -> bool:
        """Whether this file system takes direct I/O on page-aligned memory."""
        if self._folder.writer is None or not DIRECT:
            return False
        path = self._folder.writer / f"probe{TEMPORARY}"
        page = memoryview(mmap(-1, PAGE_BYTES))
        try:
            fd = self._files.open(path, os.O_RDWR | os.O_CREAT | DIRECT)
            try:
                done = self._files.pwritev(fd, [page], 0), self._files.preadv(fd, [page], 0)
            finally:
                close_quietly(self._files, fd)
        except OSError as error:
            log.info("%s: no direct I/O here (%s)", self.path, error)
            return False
        finally:
            with contextlib.suppress(OSError):
                self._files.unlink(path)
        return done == (PAGE_BYTES, PAGE_BYTES)

    def _ensure_attached(self) -> bool:
        """Attach if need be, anew when the folder was removed, replaced or locked up; under the write lock."""
        writer = self._folder.writer
        if self._attached and writer is not None and (loss := self._folder.loss(writer)):
            self._detach(loss)
        return self._attach()

    def _follow(self, refresh_s: float) -> None:
        while not self._stop.is_set():
            self._wake.wait()
            self._wake.clear()
            self._log.sync_closed()
            if not self._stop.is_set():
                self.refresh()
                self._stop.wait(refresh_s)

    def refresh(self) -> None:
        """Learn what other writers did, or find the folder again. Blocks on I/O; never raises. Any thread."""
        try:
            if self._write_lock.acquire(blocking=False):
                try:
                    if not self._ensure_attached():
                        return
                finally:
                    self._write_lock.release()
            if self._attached:
                self._catalog.refresh()
                self._catalog.renew_mtimes()
                self._keep_damaged()
            self._report_gone()
        except OSError as error:
            log.warning("nvme tier at %s could not be refreshed (%s)", self.path, error)
        except ConfigError as error:
            log.warning("nvme tier: %s", error)

    def scrub(self) -> int:
        """Re-read everything that is closed in our NN, at once: bytes read. For tests and tools; else a thread does it
        at its own pace."""
        total = 0
        while nbytes := self._scrubber.step():
            total += nbytes
        return total

    def _keep_damaged(self) -> None:
        self._quarantine.keep_waiting(self._settings.quarantine_bytes, self._capacity_bytes)

    # ---- the contract's verbs

    def _address(self, address: Address) -> bytes:
        return address.key + self._tag(address.part)

    def _tag(self, part: Part) -> bytes:
        tag = self._tags.get(part)
        if tag is None:
            tag = self._tags[part] = part_tag(part)
        return tag

    def _packed(self, addresses: Sequence[Address]) -> list[bytes]:
        if isinstance(addresses, AddressRun):
            tag = self._tag(addresses.part)
            return [key + tag for key in addresses.keys]
        packed: list[bytes] = []
        part, tag = None, b""
        for address in addresses:
            if address.part is not part:
                part, tag = address.part, self._tag(address.part)
            packed.append(address.key + tag)
        return packed

    def set_domain(self, domain: bytes) -> None:
        """As in `Tier`. The index finds records by key, which is of one domain only."""
        self._domain = domain

    def lookup(self, addresses: Sequence[Address], deadline_s: float) -> int:
        """As in `Tier`; no I/O. Raises TierUnavailable while the folder cannot be used."""
        if not self._wake.is_set():  # the thread rests most of the time, with this set
            self._wake.set()
        if not self._attached:
            raise TierUnavailable(self.name, "lookup", "closed" if self._closed else self._down)
        return self._index.num_leading(self._packed(addresses))

    def holds(self, addresses: Sequence[Address]) -> list[bool]:
        """Which of them are here; none while the folder cannot be used. No I/O."""
        if not self._wake.is_set():
            self._wake.set()
        return list(map(self.holds_packed, self._packed(addresses)))

    def holds_packed(self, address: bytes) -> bool:
        """The same for one, by its 40 bytes."""
        return self._attached and self._index.contains(address)

    def find_parents_by(self, contains: Callable[[bytes], bool]) -> None:
        """Where a chain's blocks lie in several folders: ask `contains`, by its 40 bytes, whether a parent stays."""
        self._log.contains = contains

    def get(self, reads: Sequence[BlockRead], deadline_s: float) -> list[BlockStatus]:
        """As in `Tier`. A deadline that passes while the disk works is noticed after the running operation."""
        if not self._attached:
            return [BlockStatus.ERROR] * len(reads)
        if self._files.now_s() >= deadline_s:
            return [BlockStatus.TIMEOUT] * len(reads)
        statuses = [BlockStatus.MISS] * len(reads)
        packed = self._packed([read.address for read in reads])
        wanted = []
        for i, (address, place) in enumerate(zip(packed, self._index.find(packed), strict=True)):
            if place is None:
                continue
            if place.payload_bytes > reads[i].destination.nbytes:  # less: it is encoded
                segment = self._catalog.get(place.segment)
                if segment is not None:
                    self._quarantine.condemn(segment, address, place, "payload of another size")
                    statuses[i] = BlockStatus.CORRUPT
                continue
            wanted.append(Wanted(i, address, place, reads[i], reads[i].domain or self._domain))
        self._reader.read(wanted, statuses, deadline_s)
        if BlockStatus.CORRUPT in statuses:
            self._report_gone()
        return statuses

    def put(self, writes: Sequence[BlockWrite], deadline_s: float) -> list[BlockStatus]:
        """As in `Tier`. One put at a time per process; the rest of the time others may read."""
        statuses = [BlockStatus.EXISTS] * len(writes)
        todo: list[tuple[int, Pending]] = []
        for i, write in enumerate(writes):
            tag = self._tag(write.part)
            if self._attached and self._index.contains(write.name.key + tag):
                continue
            statuses[i] = BlockStatus.TIMEOUT
            if self._files.now_s() < deadline_s:
                domain = write.domain or self._domain
                payload, coding = stored_as(write.source.cast("B"), self._codec)
                named = (domain, write.name, write.part, payload, coding)
                make = functools.partial(pack_header, *named, mac_key=self._mac_key)
                nbytes = record_bytes(payload.nbytes)
                todo.append((i, Pending(write.name.key + tag, write.name.parent + tag, nbytes, make, payload)))
        if todo and self._write_lock.acquire(timeout=max(0.0, deadline_s - self._files.now_s())):
            try:
                self._put_locked(todo, statuses, deadline_s)
            except OSError as error:
                self._write_errors += 1
                log.warning("nvme tier at %s could not write (%s)", self.path, error)
            finally:
                self._write_lock.release()
            self._report_gone()
        return statuses

    def _put_locked(self, todo: list[tuple[int, Pending]], statuses: list[BlockStatus], deadline_s: float) -> None:
        """Write what is still missing. Raises OSError when no segment can be had; the rest then is ERROR already."""
        for i, _ in todo:
            statuses[i] = BlockStatus.ERROR
        if not self._ensure_attached():
            self._write_errors += 1
            return
        self._try_keep_identities(deadline_s)
        seen: set[bytes] = set()
        fresh: list[tuple[int, Pending]] = []
        for i, record in todo:
            if record.address in seen or self._index.contains(record.address):
                statuses[i] = BlockStatus.EXISTS
            else:
                seen.add(record.address)
                fresh.append((i, record))
        while fresh:
            if self._files.now_s() >= deadline_s:
                _mark(statuses, fresh, BlockStatus.TIMEOUT)
                return
            count = self._log.batch([record for _, record in fresh[:256]])
            if not count:
                rolled = self._log.roll(fresh[0][1].payload.nbytes, deadline_s)
                if rolled is BlockStatus.DROPPED:
                    _mark(statuses, fresh, BlockStatus.DROPPED)
                    return
                continue
            batch, fresh = fresh[:count], fresh[count:]
            try:
                self._log.append([record for _, record in batch])
                _mark(statuses, batch, BlockStatus.OK)
            except OSError as error:
                self._write_errors += 1
                log.warning("nvme tier at %s: writing %d records failed (%s)", self.path, count, error)

    def try_write(self, deadline_s: float) -> BlockStatus:
        """As in `TryingTier`; finds a folder that is back, too."""
        if not self._write_lock.acquire(timeout=max(0.0, deadline_s - self._files.now_s())):
            return BlockStatus.TIMEOUT
        try:
            if not self._ensure_attached():
                return BlockStatus.ERROR
            if self._folder.writer is None:
                return BlockStatus.DROPPED
            with self._log.room(BLOCK_BYTES, deadline_s) as has_room:
                if not has_room:
                    return BlockStatus.TIMEOUT if self._files.now_s() >= deadline_s else BlockStatus.DROPPED
                self._folder.try_write()
        except OSError as error:
            self._write_errors += 1
            log.warning("nvme tier at %s cannot write yet (%s)", self.path, error)
            return BlockStatus.ERROR
        finally:
            self._write_lock.release()
        return BlockStatus.OK

    def touch(self, addresses: Sequence[Address]) -> None:
        """As in `Tier`; no I/O."""
        self._index.touch(self._packed(addresses))

    def delete(self, addresses: Sequence[Address]) -> int:
        """As in `Tier`. Their bytes go with their segment; the erased map keeps them away after a restart."""
        pages: dict[int, list[int]] = {}
        for packed in self._packed(addresses):
            place = self._index.remove(packed)
            if place is not None:
                pages.setdefault(place.segment, []).append(place.page)
        for ident, listed in pages.items():
            segment = self._catalog.get(ident)
            if segment is not None:
                self._catalog.mark(segment, listed, DELETED)
        self._report_gone()
        return sum(len(listed) for listed in pages.values())

    def quarantine(self, addresses: Sequence[Address], reason: str) -> None:
        """As in `QuarantiningTier`."""
        packed = self._packed(addresses)
        for address, place in zip(packed, self._index.find(packed), strict=True):
            segment = None if place is None else self._catalog.get(place.segment)
            if place is not None and segment is not None:
                self._quarantine.condemn(segment, address, place, reason)
        self._report_gone()

    # ---- for people's questions

    def describe(self, addresses: Sequence[Address], deadline_s: float) -> list[Description | None]:
        """As in `DescribingTier`; no I/O, so no names."""
        if not self._attached:
            raise TierUnavailable(self.name, "describe", "closed" if self._closed else self._down)
        return self._listing.describe(self._packed(addresses))

    def names(self, addresses: Sequence[Address], deadline_s: float) -> list[BlockName | None]:
        """From the headers of those records that are there; None where it could not be read in time."""
        packed = self._packed(addresses)
        found = self._listing.names(packed, deadline_s)
        return [found.get(address) for address in packed]

    def records(self, deadline_s: float) -> Iterator[ListedRecord]:
        """As in `ListingTier`."""
        if not self._attached:
            raise TierUnavailable(self.name, "list", "closed" if self._closed else self._down)
        return self._listing.records(deadline_s, self.name)

    def report_removed(self, callback: Callable[[Sequence[bytes]], None]) -> None:
        """As in `ReportingTier`. What other processes evict is noticed as it is followed."""
        self._index.take_gone()
        self._on_removed = callback

    def _report_gone(self) -> None:
        if self._on_removed is not None and (gone := self._index.take_gone()):
            self._on_removed([address[:KEY_BYTES] for address in gone])

    def put_identity(self, domain: bytes, encoded: bytes) -> None:
        """As in `Tier`. One that cannot be written now is written before the next put, or when the folder is back."""
        with self._write_lock:
            self._identities[domain] = encoded
            self._unkept[domain] = None
            if self._attached:
                self._try_keep_identities(self._files.now_s() + ROOM_S)

    def _try_keep_identities(self, deadline_s: float) -> None:
        try:
            self._keep_identities(deadline_s)
        except OSError as error:
            log.warning("nvme tier at %s could not keep an identity (%s)", self.path, error)

    def _keep_identities(self, deadline_s: float) -> None:
        """Write what this process wants kept and is not there; under the write lock. Raises OSError."""
        for domain in list(self._unkept):
            encoded = self._identities[domain]
            if not self._folder.has_identity(domain, encoded):
                with self._log.room(round_up(len(encoded)) + BLOCK_BYTES, deadline_s) as has_room:
                    if not has_room:
                        return
                    self._folder.put_identity(domain, encoded)
            del self._unkept[domain]

    def identities(self) -> dict[bytes, bytes]:
        """As in `Tier`."""
        try:
            return self._folder.identities()
        except OSError as error:
            log.warning("nvme tier at %s could not list identities (%s)", self.path, error)
            return {}

    def counters(self) -> TierCounters:
        """As in `Tier`. `nbytes` is what the present records take on disk, those of other writers included."""
        return TierCounters(
            blocks=len(self._index),
            nbytes=self._index.nbytes,
            capacity_bytes=self._capacity_bytes,
            evictions=self._log.evictions,
            errors=self._reader.errors + self._scrubber.errors + self._write_errors,
            corrupt=self._quarantine.num_condemned,
            quarantined=self._quarantine.num_kept,
            scrubbed_bytes=self._scrubber.bytes_read,
            bytes_read=self._reader.bytes_read,
            bytes_written=self._log.bytes_written,
            is_down=not self._attached and not self._closed,
        )

    def check(self) -> None:
        """As in `Tier`: index and segments agree, no records overlap, and PATH is within its cap."""
        with self._write_lock:
            self._index.check()
            self._catalog.check()
            if self._attached:
                try:
                    used = self._folder.physical_bytes()
                except OSError:
                    return  # the disk's fault, not ours
                assert used <= self._capacity_bytes, f"{self.path} takes {used} of {self._capacity_bytes} bytes"

    def close(self) -> None:
        """As in `Tier`. Closes the open segment, so that the next start reads footers only."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self._scrubber.close()
        with self._write_lock:
            if self._closed:
                return
            closed = self._log.close_open()
            if self._attached:
                self._catalog.renew_mtimes(closed)
                self._keep_damaged()
            self._closed, self._attached = True, False
            self._log.sync_closed()
            self._log.close()
            self._catalog.clear()
            self._folder.detach()
            self._handles.close()

    def __enter__(self) -> NvmeTier:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _validate(capacity_bytes: int, domain: bytes, io: str, fsync: str) -> None:
    if io not in IO_MODES:
        raise ConfigError.unknown_name("--kv-nvme-io", io, IO_MODES)
    if fsync not in FSYNC_MODES:
        raise ConfigError.unknown_name("--kv-nvme-fsync", fsync, FSYNC_MODES)
    if capacity_bytes < MIN_CAPACITY_BYTES:
        raise ConfigError.bad_value("--kv-nvme-size", capacity_bytes, f"at least {MIN_CAPACITY_BYTES} bytes")
    if len(domain) != KEY_BYTES:
        raise ConfigError.bad_value("domain", domain.hex(), f"{KEY_BYTES} bytes")


def _default_segment_bytes(capacity_bytes: int) -> int:
    """A 256th of the cap, so that a start reads few files and an eviction takes little; 64 MiB to 1 GiB, and never
    more than an eighth of the cap.
    """
    return max(8 * PAGE_BYTES, min(max(64 << 20, min(capacity_bytes // 256, 1 << 30)), capacity_bytes // 8))


def _mark(statuses: list[BlockStatus], records: Sequence[tuple[int, Pending]], status: BlockStatus) -> None:
    for i, _ in records:
        statuses[i] = status
