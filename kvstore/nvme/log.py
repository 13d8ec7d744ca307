"""The writing end: appends records to the open segment, closes it, makes room and opens the next.

Order of operations: room is made before a segment is created, a segment is allocated in full before anything is
written, the commit block follows the bytes, the index follows the commit block. Called under the tier's write lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pagetier.kvstore.block import BlockStatus
from pagetier.kvstore.nvme.audit import read_record
from pagetier.kvstore.nvme.catalog import Catalog
from pagetier.kvstore.nvme.files import Buffer, Files, close_quietly, sync_folder, write_full
from pagetier.kvstore.nvme.folder import TEMPORARY, Folder
from pagetier.kvstore.nvme.handles import Handles, Segment
from pagetier.kvstore.nvme.index import Place, RecordIndex
from pagetier.kvstore.nvme.overlap import OverlappedWriter, Piece
from pagetier.kvstore.nvme.segment import (
    COMMIT_AT,
    SUFFIX,
    Commit,
    Entries,
    LoadedSegment,
    data_start,
    digest_of,
    footer_bytes,
    pack_first_page,
    record_bytes,
    round_up,
    smallest_segment,
)
from pagetier.kvstore.record import (
    PAGE_BYTES,
    RecordStatus,
    header_bytes,
    parse_header,
    part_tag,
)

log = logging.getLogger(__name__)

WRITE_BYTES = 64 << 20  # most that is written before a commit block
PIECE_BYTES = 2 << 20  # of which so much goes out at once, while the next piece's checksums are made
_MAX_RECORDS = 256  # before a commit block: three buffers each stay below IOV_MAX
_HOT_BYTES = 32 << 20  # most that is held in memory while hot records move to a new segment
_MAX_FAILURES = 3  # failed writes in a row after which a segment is given up
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ROOM_S = 1.0  # that a start or an identity waits for another process that makes room
_MAX_LEFT_UNSYNCED = 2  # a process syncs a segment while it fills the next one
MAX_QUARANTINE_BYTES = 8 << 20  # some twenty blocks of a 135M model
MIN_QUARANTINE_BYTES = 16 << 10
_CLOSE_S = 10.0
_ZEROS = bytes(PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class LogSettings:
    """capacity_bytes: for all of PATH, in disk blocks. segment_bytes: full size of a segment unless one record needs
    more. mac_key: of the records.

    fsync: what is brought to the disk, and so what a power cut may cost. none: nothing; whatever the kernel had not yet
    written. segment: the folder when a segment is created, a segment when it is closed; the open segment. always: also
    the open segment before a put is answered; nothing that was answered OK. What is lost is missing, never wrong.
    """

    capacity_bytes: int
    segment_bytes: int
    fsync: str
    mac_key: bytes | None = None

    @property
    def quarantine_bytes(self) -> int:
        """Set aside for damaged records that are kept for a look; a small cap leaves none."""
        share = min(MAX_QUARANTINE_BYTES, self.capacity_bytes // 64) // PAGE_BYTES * PAGE_BYTES
        return share if share >= MIN_QUARANTINE_BYTES else 0

    @property
    def slack_bytes(self) -> int:
        """Left free by a new segment for what needs little, seldom: identities, folders, file system metadata."""
        return min(128 << 10, max(16 << 10, round_up(self.capacity_bytes // 64)))


class Pending(NamedTuple):
    """A record on its way to the log. address, parent: 40 bytes each. nbytes: what it takes in a segment. make_header:
    reads the whole payload for its checksum, so it is called once, right before the write.
    """

    address: bytes
    parent: bytes
    nbytes: int
    make_header: Callable[[], bytes]
    payload: memoryview


def is_aligned(view: memoryview) -> bool:
    """Whether direct I/O may use this memory."""
    if view.nbytes % PAGE_BYTES or not view.nbytes:
        return False
    if not view.readonly:  # an eighth of the time
        return ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE_BYTES == 0
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address % PAGE_BYTES == 0


class SegmentLog:
    """Appends for one process. Not thread-safe: all calls come under the tier's write lock.

    `direct`: aligned payloads bypass the page cache. `evictions`, `bytes_written`: counts since start.
    """

    def __init__(
        self,
        files: Files,
        folder: Folder,
        catalog: Catalog,
        index: RecordIndex,
        handles: Handles,
        settings: LogSettings,
    ) -> None:
        self._files, self._folder, self._catalog = files, folder, catalog
        self._index, self._handles, self._settings = index, handles, settings
        self.direct = False
        self.evictions = 0
        self.bytes_written = 0
        self.sync_later: Callable[[], None] | None = None  # called when there is something for `sync_closed`
        self._unsynced: deque[Segment] = deque()
        self._open: Segment | None = None
        self._entries = Entries()  # of the open segment
        self._failures = 0  # in a row, of the open segment
        self._last_number = 0  # in the name of a segment of ours
        self._headers = memoryview(mmap(-1, _MAX_RECORDS * PAGE_BYTES))
        self._writer = OverlappedWriter(files)
        self.contains: Callable[[bytes], bool] = index.contains  # whether a record stays, for its children's sake
        self._piece_bytes = WRITE_BYTES if files.depth == 1 else PIECE_BYTES

    def batch(self, records: Sequence[Pending]) -> int:
        """How many leading records the open segment takes in one operation; 0: `roll` first."""
        if self._open is None or self._catalog.get(self._open.ident) is None:  # none yet, or removed under us
            self._forget_open()
            return 0
        room = self._open.size - self._open.end
        most, before = min(len(records), _MAX_RECORDS), len(self._entries)
        count = nbytes = 0
        while count < most:
            nbytes += records[count].nbytes
            if nbytes + footer_bytes(before + count + 1) > room or (count and nbytes > WRITE_BYTES):
                break
            count += 1
        return count

    def append(self, records: Sequence[Pending]) -> None:
        """Write a `batch`, then make it visible. Raises OSError with nothing visible."""
        segment = self._open
        assert segment is not None, "append without a segment"
        direct = self.direct and all(is_aligned(record.payload) for record in records)
        start, at = segment.end, segment.end
        places = []
        for record in records:
            places.append(Place(segment.ident, at // PAGE_BYTES, record.payload.nbytes))
            at += record.nbytes
        assert at + footer_bytes(len(self._entries) + len(records)) <= segment.size, "append without room"
        fd, handle = self._handles.acquire(segment)
        try:
            self._write(segment, fd, self._pieces(records, start), direct)
            commit = Commit(False, len(self._entries) + len(records), at)
            write_full(self._files, fd, [commit.pack()], COMMIT_AT)
            if self._settings.fsync == "always":
                self._files.sync(fd)
        except OSError:
            self._failures += 1
            self._withdraw(segment, fd, start)
            raise
        finally:
            self._handles.release(handle)
        self._failures = 0
        self.bytes_written += at - start
        with self._catalog.lock:
            if self._catalog.get(segment.ident) is None:
                raise FileNotFoundError(errno.ENOENT, "was removed while it was written", str(segment.path))
            segment.end = at
            for record, place in zip(records, places, strict=True):
                self._entries.append(record.address, place.page, place.payload_bytes)
            self._index.add_all(
                (record.address, record.parent, place) for record, place in zip(records, places, strict=True)
            )

    def _pieces(self, records: Sequence[Pending], offset: int) -> Iterator[Piece]:
        """Runs of records as buffers; headers are made as a piece is asked for. Each has a page of its own."""
        buffers: list[Buffer] = []
        nbytes = 0
        for i, record in enumerate(records):
            payload, page = record.payload, self._headers[i * PAGE_BYTES : (i + 1) * PAGE_BYTES]
            page[:] = record.make_header().ljust(PAGE_BYTES, b"\0")
            padding = round_up(payload.nbytes) - payload.nbytes
            buffers += [page, payload, _ZEROS[:padding]] if padding else [page, payload]
            nbytes += record.nbytes
            if nbytes >= self._piece_bytes or i == len(records) - 1:
                yield buffers, offset
                buffers, offset, nbytes = [], offset + nbytes, 0

    def _write(self, segment: Segment, fd: int, pieces: Iterator[Piece], direct: bool) -> None:
        if not direct:
            self._writer.write(fd, pieces)
            return
        direct_fd, handle = self._handles.acquire(segment, direct=True)
        try:
            self._writer.write(direct_fd, pieces)
        finally:
            self._handles.release(handle)

    def _withdraw(self, segment: Segment, fd: int, start: int) -> None:
        """After a failed write: what was written does not exist, on disk either."""
        try:
            write_full(self._files, fd, [Commit(False, len(self._entries), start).pack()], COMMIT_AT)
            write_full(self._files, fd, [_ZEROS], start)
        except OSError as error:
            log.warning("%s: a failed write could not be undone (%s)", segment.path, error)
            self._failures = _MAX_FAILURES
        if self._failures >= _MAX_FAILURES:
            self._abandon(segment)

    def _abandon(self, segment: Segment) -> None:
        """Write no more to a segment that takes no writes; what was committed stays readable."""
        log.warning("%s takes no writes; going on with another segment", segment.path)
        self._forget_open()

    def _forget_open(self) -> None:
        self._open, self._entries, self._failures = None, Entries(), 0

    def roll(self, payload_bytes: int, deadline_s: float) -> BlockStatus:
        """Close the open segment, make room and open one that takes a record of `payload_bytes`.

        OK; DROPPED when there is no room to be had; TIMEOUT. Raises OSError when the disk refuses.
        """
        self.close_open()
        if self._folder.writer is None:
            return BlockStatus.DROPPED
        size = max(self._settings.segment_bytes, smallest_segment(payload_bytes))
        set_aside = self._settings.slack_bytes + self._settings.quarantine_bytes
        if size + set_aside > self._settings.capacity_bytes:
            return BlockStatus.DROPPED
        hot: list[Pending] = []
        with self._folder.room_lock(deadline_s) as held:
            if not held:
                return BlockStatus.TIMEOUT
            with self._catalog.lock:
                self._folder.sweep()
                self._catalog.refresh()
                limit = self._settings.capacity_bytes - set_aside - size
                while self._folder.working_bytes() > limit:
                    if not self._evict(size, hot):
                        return BlockStatus.DROPPED
                self._open = self._create(size, hot, limit)
        self._entries = Entries()
        self._rewrite(hot, payload_bytes)
        return BlockStatus.OK

    def trim(self) -> None:
        """Evict while PATH takes more than its cap, as after a power cut that brought back what was evicted. For the
        start, with no segment open. Raises OSError.
        """
        if self._taken_bytes() > self._settings.capacity_bytes:
            with self.room(0, self._files.now_s() + ROOM_S):
                pass

    @contextlib.contextmanager
    def room(self, nbytes: int, deadline_s: float) -> Iterator[bool]:
        """Hold PATH/lock with room for that many bytes below the cap, for which closed segments go if need be; False
        when there is none to be had or the deadline passed first. Under the tier's write lock.

        Whatever takes blocks of PATH besides segments asks here: nobody knows how much of the slack is left. After a
        power cut that brought back evicted segments it may be none.
        """
        with self._folder.room_lock(deadline_s) as held:
            yield held and self._has_room(nbytes)

    def _has_room(self, nbytes: int) -> bool:
        with self._catalog.lock:
            if self._taken_bytes() + nbytes > self._settings.capacity_bytes:
                self._folder.sweep()
                self._catalog.refresh()
            while self._taken_bytes() + nbytes > self._settings.capacity_bytes:
                if not self._evict(0, []):
                    return False
            return True

    def _taken_bytes(self) -> int:
        """Disk blocks of PATH, with the whole of what is set aside for damaged records."""
        return self._folder.working_bytes() + max(self._folder.quarantined_bytes(), self._settings.quarantine_bytes)

    def _create(self, size: int, hot: list[Pending], limit: int) -> Segment:
        while True:
            try:
                return self._create_once(size)
            except OSError as error:
                if error.errno not in _FULL or not self._evict(size, hot):
                    raise
                self._folder.sweep()
                if self._folder.working_bytes() > limit:  # the failed one is still there
                    raise

    def _create_once(self, size: int) -> Segment:
        writer = self._folder.writer
        assert writer is not None, "no folder to write to"
        paths = self._folder.segment_paths(writer)
        created_ns = self._files.time_ns()
        # Never a name that there was: a reader that still knows the old file by it would take the new one for it.
        number = max(created_ns, self._last_number + 1, int(paths[-1].stem, 16) + 1 if paths else 1)
        path = writer / f"{number:016x}{SUFFIX}"
        partial = path.with_suffix(TEMPORARY)
        start = data_start(size)
        fd = self._files.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            self._files.allocate(fd, size)
            write_full(self._files, fd, [pack_first_page(size, created_ns, Commit(False, 0, start))], 0)
            inode = self._files.stat(fd).st_ino
            self._files.rename(partial, path)
            self._last_number = number
            if self._settings.fsync != "none":
                for folder in (writer, self._folder.path):  # the writer's folder may be as new as the segment
                    sync_folder(self._files, folder)
        except OSError:
            with contextlib.suppress(OSError):
                self._files.unlink(partial)
            raise
        finally:
            close_quietly(self._files, fd)
        return self._catalog.adopt(path, size, inode, own=True, end=start, closed=False)

    def _evict(self, room: int, hot: list[Pending]) -> bool:
        """Remove the coldest segment that may go, its hot records first copied into `hot`; False when there is none.

        The open one stays. Coldest by its middle record: a few hot ones move on and do not hold up the rest.
        Of equally cold ones the latest goes: it holds the tails of chains.
        """
        ticks = self._index.segment_ticks()
        ranked: list[tuple[int, int, Path, Segment | None]] = []
        for writer in self._folder.writers():
            for path in self._folder.segment_paths(writer):
                segment = self._catalog.at(path)
                tick = ticks[segment.ident].median if segment is not None and segment.ident in ticks else 0
                ranked.append((tick, -int(path.stem, 16), path, segment))
        ranked.sort(key=lambda entry: entry[:3])
        for _, _, path, segment in ranked:
            if segment is not None and segment is self._open:
                continue
            if path.parent == self._folder.writer or (segment is not None and segment.closed):
                return self._remove(path, segment, room, hot)
            if (fd := self._folder.try_lock(path.parent)) is not None:  # its writer is gone
                try:
                    return self._remove(path, segment, room, hot)
                finally:
                    close_quietly(self._files, fd)
        return False

    def _remove(self, path: Path, segment: Segment | None, room: int, hot: list[Pending]) -> bool:
        if segment is not None:
            budget = min(_HOT_BYTES, room // 2) - sum(record.nbytes for record in hot)
            kept = self._hot_of(segment, budget)
            hot += kept
            self.evictions += self._catalog.drop(segment) - len(kept)
        self._delete(path)
        return True

    def _delete(self, path: Path) -> None:
        self._files.truncate(path, 0)  # frees the blocks even while another process has the file open
        self._files.unlink(path)

    def _hot_of(self, segment: Segment, max_bytes: int) -> list[Pending]:
        """Copies of the records worth keeping of a segment about to go: recently used, whole, and with a parent that
        stays, since a child without its parent is never found.
        """
        kept: list[Pending] = []
        leaving, stays = self._index.addresses_in(segment.ident), set[bytes]()
        try:
            fd, handle = self._handles.acquire(segment)
        except OSError:
            return kept
        try:
            for address, place in self._index.hot_records(segment.ident, max(0, max_bytes)):
                record = self._copy(fd, address, place)
                if record is None:
                    continue
                parent_stays = record.parent in stays or (record.parent not in leaving and self.contains(record.parent))
                if parent_stays or _is_head(record):
                    stays.add(address)
                    kept.append(record)
        except OSError as error:
            log.warning("%s: hot records could not be kept (%s)", segment.path, error)
        finally:
            self._handles.release(handle)
        return kept

    def _copy(self, fd: int, address: bytes, place: Place) -> Pending | None:
        """A verified copy of a record, of whatever domain; None when it is damaged."""
        found = read_record(self._files, fd, address, place, mac_key=self._settings.mac_key)
        header = found.header
        if header is None or found.status is not RecordStatus.OK:
            return None
        parent = header.name.parent + part_tag(header.part)
        packed = bytes(found.page[: header_bytes(header.name.num_tokens)])
        return Pending(address, parent, record_bytes(found.payload.nbytes), lambda: packed, found.payload)

    def _rewrite(self, hot: list[Pending], payload_bytes: int) -> None:
        """Append kept records to the new segment as long as the record that asked for it still fits."""
        segment = self._open
        assert segment is not None, "no segment to write to"
        spare = segment.size - segment.end - record_bytes(payload_bytes) - footer_bytes(len(hot) + 1)
        fitting: list[Pending] = []
        for record in hot:
            spare -= record.nbytes
            if spare < 0:
                break
            fitting.append(record)
        self.evictions += len(hot) - len(fitting)
        try:
            while fitting and (count := self.batch(fitting)):
                self.append(fitting[:count])
                del fitting[:count]
        except OSError as error:
            log.warning("hot records could not be rewritten (%s)", error)
        self.evictions += len(fitting)

    def close_open(self) -> Segment | None:
        """Close the open segment, and which that was. Never raises: what cannot be closed is recovered like after a
        crash.
        """
        segment, entries = self._open, self._entries
        self._forget_open()
        if segment is None:
            return None
        try:
            if len(entries):
                self._close_segment(segment, entries)
            else:
                with self._catalog.lock:
                    self._catalog.drop(segment)
                    self._delete(segment.path)
        except OSError as error:
            log.warning("%s could not be closed (%s); the next start recovers it", segment.path, error)
        return segment

    def _close_segment(self, segment: Segment, entries: Entries) -> None:
        footer = entries.pack_footer()
        if segment.end + len(footer) > segment.size:
            return
        fd, handle = self._handles.acquire(segment)
        try:
            write_full(self._files, fd, [footer], segment.end)
            commit = Commit(True, len(entries), segment.end, len(footer), digest_of(footer))
            write_full(self._files, fd, [commit.pack()], COMMIT_AT)
            self._files.truncate(fd, segment.end + len(footer))
        finally:
            self._handles.release(handle)
        segment.closed = True
        if self._settings.fsync != "none":
            self._unsynced.append(segment)
            if self.sync_later is None:
                self.sync_closed()
            else:
                self.sync_later()

    def sync_closed(self) -> None:
        """Bring closed segments to the disk. Any thread: up to a second for a segment, too long to hold up a put.
        Never raises.
        """
        while self._unsynced:
            with contextlib.suppress(IndexError):
                segment = self._unsynced.popleft()
                try:
                    fd, handle = self._handles.acquire(segment)
                    try:
                        self._files.sync(fd)
                    finally:
                        self._handles.release(handle)
                except OSError as error:
                    log.warning("%s could not be synced (%s); a power cut may cost its records", segment.path, error)

    def close(self) -> None:
        """End the threads, after `close_open`. Idempotent."""
        self._writer.close(_CLOSE_S)

    def recover(self, found: Sequence[tuple[Segment, LoadedSegment]]) -> None:
        """Close segments of our NN that a crash left open, and sync what it may have left. Never raises."""
        for segment, loaded in found:
            try:
                if len(loaded.entries):
                    self._close_segment(segment, loaded.entries)
                    self._files.set_mtime(segment.path, loaded.stat.st_mtime_ns)  # recovery is no use
                else:
                    with self._catalog.lock:
                        self._catalog.drop(segment)
                        self._delete(segment.path)
            except OSError as error:
                log.warning("%s could not be recovered (%s)", segment.path, error)
        self._sync_last()

    def _sync_last(self) -> None:
        """Who wrote here before us may have been killed between closing a segment and bringing it to the disk."""
        if self._settings.fsync != "none":
            closed = [segment for segment in self._catalog.segments() if segment.own and segment.closed]
            self._unsynced.extend(sorted(closed, key=lambda segment: segment.path)[-_MAX_LEFT_UNSYNCED:])
            if self.sync_later is None:
                self.sync_closed()
            else:
                self.sync_later()


def _is_head(record: Pending) -> bool:
    """Whether a record starts its chain: its parent is the root."""
    header = parse_header(record.make_header())
    return header is not None and header.name.parent == header.name.root
