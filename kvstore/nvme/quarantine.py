"""Damaged records: out of use at once, for good, and a bounded number of them kept for somebody to look at.

Owns what is counted as corrupt and the folder NN/quarantine. Taking a record out of use is quick and may happen on any
thread; its bytes are copied later, by the tier's own thread.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from pathlib import Path
from typing import NamedTuple

from pagetier.kvstore.nvme.catalog import Catalog
from pagetier.kvstore.nvme.files import Files, close_quietly, read_bytes, write_full
from pagetier.kvstore.nvme.folder import BLOCK_BYTES, Folder
from pagetier.kvstore.nvme.handles import Handles, Segment
from pagetier.kvstore.nvme.index import Place, RecordIndex
from pagetier.kvstore.nvme.segment import QUARANTINED

log = logging.getLogger(__name__)

MAX_WAITING = 64  # condemned records whose bytes are yet to be kept; more are only counted
SUFFIX = ".rec"


class _Condemned(NamedTuple):
    segment: Segment
    place: Place
    reason: str


class Quarantine:
    """Thread-safe. `num_condemned`, `num_kept`: counts since start."""

    def __init__(self, files: Files, folder: Folder, catalog: Catalog, index: RecordIndex, handles: Handles) -> None:
        self._files, self._folder, self._catalog, self._index, self._handles = files, folder, catalog, index, handles
        self._lock = threading.Lock()
        self._waiting: deque[_Condemned] = deque(maxlen=MAX_WAITING)  # guarded by self._lock
        self.num_condemned = 0  # guarded by self._lock
        self.num_kept = 0  # owner: whoever calls `keep_waiting`

    def condemn(self, segment: Segment, address: bytes, place: Place, reason: str) -> None:
        """Take a record out of use for good, once. Never raises."""
        if self._index.remove(address, place) is None:
            return
        self._catalog.mark(segment, [place.page], QUARANTINED)
        log.warning("%s: record %s is quarantined (%s)", segment.path, address.hex()[:16], reason)
        with self._lock:
            self.num_condemned += 1
            self._waiting.append(_Condemned(segment, place, reason))

    def is_evicted(self, segment: Segment, address: bytes, place: Place) -> bool:
        """Whether bytes that do not verify were taken away while they were read, rather than damaged."""
        if self._catalog.get(segment.ident) is None or self._index.find([address]) != [place]:
            return True
        try:
            found = self._files.stat(segment.path)
        except OSError:
            return True
        return found.st_size == 0 or found.st_ino != segment.inode

    def keep_waiting(self, max_bytes: int, capacity_bytes: int) -> None:
        """Copy what was condemned since to NN/quarantine. Never raises; one thread at a time.

        max_bytes: of disk, for all that is kept below PATH; 0 keeps nothing. capacity_bytes: PATH's cap.
        """
        with self._lock:
            waiting, self._waiting = list(self._waiting), deque(maxlen=MAX_WAITING)
        if not waiting or self._folder.writer is None:
            return
        try:
            with self._folder.room_lock(self._files.now_s()) as held:
                for condemned in waiting if held else ():
                    self._keep(condemned, max_bytes, capacity_bytes)
        except OSError as error:
            log.warning("damaged records of %s could not be kept (%s)", self._folder.path, error)

    def trim(self, max_bytes: int) -> None:
        """Let kept records of our NN go, as after a start with a smaller cap. Raises OSError."""
        if self._folder.writer is not None and self._kept():
            self._make_room(0, max_bytes)

    def _keep(self, condemned: _Condemned, max_bytes: int, capacity_bytes: int) -> None:
        segment, place = condemned.segment, condemned.place
        nbytes = place.end - place.offset
        most_bytes = nbytes + BLOCK_BYTES  # with a folder for it
        if not self._make_room(nbytes, max_bytes) or self._folder.physical_bytes() + most_bytes > capacity_bytes:
            return
        try:
            fd, handle = self._handles.acquire(segment)
        except FileNotFoundError:
            return  # evicted meanwhile
        try:
            data = read_bytes(self._files, fd, nbytes, place.offset)
        finally:
            self._handles.release(handle)
        folder = self._folder.quarantine(None)
        reason = condemned.reason.replace(" ", "-")
        name = f"{segment.path.parent.name}-{segment.path.stem}-{place.page:08x}-{reason}{SUFFIX}"
        self._files.make_folder(folder)
        fd = self._files.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_full(self._files, fd, [data], 0)
        finally:
            close_quietly(self._files, fd)
        self.num_kept += 1

    def _make_room(self, nbytes: int, max_bytes: int) -> bool:
        """Let the oldest kept records of our NN go until one more fits; whether it does."""
        while self._folder.quarantined_bytes() + nbytes + BLOCK_BYTES > max_bytes:
            kept = self._kept()
            if not kept:
                return False
            self._files.unlink(kept[0])
        return True

    def _kept(self) -> list[Path]:
        """Kept records of our NN, oldest first."""
        folder = self._folder.quarantine(None)
        try:
            paths = [folder / name for name in self._files.listdir(folder)]
        except FileNotFoundError:
            return []
        return sorted(paths, key=lambda path: (self._files.stat(path).st_mtime_ns, path))
