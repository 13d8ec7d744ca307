"""The segments that this process knows, its own and those of other writers, kept up to date with the folder.

Fills the record index from footers and headers. Writes nothing but bytes of erased maps and modification times.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path

from pagetier.kvstore.nvme.files import Files, read_bytes, write_full
from pagetier.kvstore.nvme.folder import Folder
from pagetier.kvstore.nvme.handles import Handles, Segment
from pagetier.kvstore.nvme.index import RecordIndex
from pagetier.kvstore.nvme.segment import (
    LoadedSegment,
    data_start,
    erased_at,
    load_segment,
    read_commit,
    walk_headers,
)
from pagetier.kvstore.record import PAGE_BYTES

log = logging.getLogger(__name__)

_SETTLED_NS = 50_000_000  # a folder changed later than this before we listed it may change again unseen


class Catalog:
    """Segments by number and path. Thread-safe; `refresh` holds the lock over its I/O, `get` never waits for it."""

    def __init__(self, files: Files, folder: Folder, index: RecordIndex, handles: Handles) -> None:
        self._files, self._folder, self._index, self._handles = files, folder, index, handles
        self.lock = threading.RLock()  # held by whoever makes or removes segment files, until the catalog knows
        self._segments: dict[int, Segment] = {}  # changed under self.lock, read without
        self._by_path: dict[Path, Segment] = {}  # guarded by self.lock
        self._unfit: dict[Path, tuple[int, int]] = {}  # guarded by self.lock; files that are no segment of ours
        self._listed_ns: dict[Path, int] = {}  # guarded by self.lock; mtime of each NN when it was listed
        self._renewed: dict[int, int] = {}  # guarded by self.lock; segment -> tick its mtime stands for
        self._last_ident = 0  # guarded by self.lock

    def get(self, ident: int) -> Segment | None:
        """The segment with this number, None once it is gone."""
        return self._segments.get(ident)

    def segments(self) -> list[Segment]:
        with self.lock:
            return list(self._segments.values())

    def at(self, path: Path) -> Segment | None:
        with self.lock:
            return self._by_path.get(path)

    def adopt(self, path: Path, size: int, inode: int, *, own: bool, end: int, closed: bool) -> Segment:
        """Know a segment from now on."""
        with self.lock:
            self._last_ident += 1
            segment = Segment(self._last_ident, path, size, inode, own, end, closed)
            self._segments[segment.ident] = segment
            self._by_path[path] = segment
            return segment

    def drop(self, segment: Segment) -> int:
        """Forget a segment and its records; how many those were."""
        with self.lock:
            if self._segments.pop(segment.ident, None) is None:
                return 0
            self._by_path.pop(segment.path, None)
            self._renewed.pop(segment.ident, None)
            dropped = self._index.drop_segment(segment.ident)
            self._handles.discard(segment)
            return dropped

    def clear(self) -> None:
        """Forget all segments and what was learnt of the folder."""
        with self.lock:
            for segment in list(self._segments.values()):
                self.drop(segment)
            self._unfit.clear()
            self._listed_ns.clear()

    def refresh(self) -> list[tuple[Segment, LoadedSegment]]:
        """Learn of new, grown, closed and vanished segments; of our own NN's, those that nobody has closed and cut.

        A file that cannot be read now is tried again next time. Raises OSError when the folder cannot be listed.
        """
        with self.lock:
            fresh: list[tuple[Path, LoadedSegment]] = []
            present: set[Path] = set()
            for writer in self._folder.writers():
                present.add(writer)
                self._refresh_writer(writer, fresh)
            for segment in list(self._segments.values()):
                if segment.path.parent not in present:
                    self.drop(segment)
            fresh.sort(key=lambda found: (found[1].stat.st_mtime_ns, found[0]))
            return [found for path, loaded in fresh if (found := self._take(path, loaded)) is not None]

    def _refresh_writer(self, writer: Path, fresh: list[tuple[Path, LoadedSegment]]) -> None:
        ours = [segment for segment in self._segments.values() if segment.path.parent == writer]
        try:
            changed_ns = self._files.stat(writer).st_mtime_ns
            if self._listed_ns.get(writer) != changed_ns:
                paths = self._folder.segment_paths(writer)
                self._relist(ours, paths, fresh)
                if self._files.time_ns() - changed_ns > _SETTLED_NS:
                    self._listed_ns[writer] = changed_ns
        except FileNotFoundError:
            return
        for segment in ours:
            if not segment.own and not segment.closed and segment.ident in self._segments:
                self._follow(segment)

    def _relist(self, known: list[Segment], paths: list[Path], fresh: list[tuple[Path, LoadedSegment]]) -> None:
        there = set(paths)
        for segment in known:
            if segment.path in there:
                with contextlib.suppress(OSError):
                    if self._files.stat(segment.path).st_ino == segment.inode:
                        continue
            self.drop(segment)
        for path in paths:
            if path in self._by_path:
                continue
            try:
                found = self._files.stat(path)
                if self._unfit.get(path) == (found.st_size, found.st_mtime_ns):
                    continue
                loaded = load_segment(self._files, path)
            except OSError as error:
                log.warning("%s cannot be read (%s); its records are missing until it can", path, error)
                continue
            if loaded is None:
                self._unfit[path] = (found.st_size, found.st_mtime_ns)
                log.warning("%s is no segment of this version; it is ignored and evicted first", path)
            else:
                fresh.append((path, loaded))

    def _take(self, path: Path, loaded: LoadedSegment) -> tuple[Segment, LoadedSegment] | None:
        own = path.parent == self._folder.writer
        closed = loaded.commit is not None and loaded.commit.closed and loaded.commit.end == loaded.end
        inode = loaded.stat.st_ino
        segment = self.adopt(path, loaded.size, inode, own=own, end=loaded.end, closed=closed)
        self._index.load(segment.ident, loaded.entries, loaded.erased)
        cut = loaded.commit is not None and loaded.stat.st_size == loaded.end + loaded.commit.footer_bytes
        return (segment, loaded) if own and not (closed and cut) else None

    def _follow(self, segment: Segment) -> None:
        """Index what another writer has committed since we last looked."""
        try:
            fd, handle = self._handles.acquire(segment)
        except FileNotFoundError:
            self.drop(segment)
            return
        except OSError as error:
            log.warning("%s cannot be followed (%s)", segment.path, error)
            return
        try:
            commit = read_commit(self._files, fd)
            if commit is None:
                return
            if commit.end > segment.end:
                entries, segment.end = walk_headers(self._files, fd, segment.end, min(commit.end, segment.size))
                erased = read_bytes(self._files, fd, data_start(segment.size) - PAGE_BYTES, PAGE_BYTES)
                if len(entries) and len(erased) == data_start(segment.size) - PAGE_BYTES:
                    self._index.load(segment.ident, entries, erased)
            segment.closed = commit.closed and segment.end == commit.end
        except OSError as error:
            log.warning("%s cannot be followed (%s)", segment.path, error)
        finally:
            self._handles.release(handle)

    def mark(self, segment: Segment, pages: list[int], value: int) -> None:
        """Write bytes of a segment's erased map, so that its records stay away after a restart. Never raises."""
        try:
            fd = self._files.open(segment.path, os.O_RDWR)
            try:
                if self._files.stat(fd).st_ino == segment.inode:
                    for page in pages:
                        write_full(self._files, fd, [bytes([value])], erased_at(page))
            finally:
                self._files.close(fd)
        except OSError as error:
            log.warning(
                "%s: could not mark %d records (%s); a restart may list them again", segment.path, len(pages), error
            )

    def renew_mtimes(self, closed: Segment | None = None) -> None:
        """Let modification times say which segments were used, hotter ones later. Never raises.

        `closed`: one whose file was just written to without being used.
        """
        with self.lock:
            ticks = {ident: ticks.hottest for ident, ticks in self._index.segment_ticks().items()}
            wrong_from = ticks.get(closed.ident, 0) if closed is not None else None
            stale = [
                (tick, -ident)
                for ident, tick in ticks.items()
                if self._renewed.get(ident) not in (None, tick) or (wrong_from is not None and tick >= wrong_from)
            ]
            self._renewed.update({ident: tick for ident, tick in ticks.items() if ident in self._segments})
            now = self._files.time_ns() - len(stale)
            for i, (_, negative) in enumerate(sorted(stale)):
                segment = self._segments.get(-negative)
                if segment is not None:
                    with contextlib.suppress(OSError):
                        self._files.set_mtime(segment.path, now + i)

    def check(self) -> None:
        """Raise AssertionError, with paths, when records lie outside of their segment or on top of each other."""
        with self.lock:
            spans: dict[int, list[tuple[int, int]]] = {}
            for address, place in self._index.places():
                segment = self._segments.get(place.segment)
                assert segment is not None, f"{address.hex()[:16]} lies in unknown segment {place.segment}"
                inside = data_start(segment.size) <= place.offset and place.end <= segment.end <= segment.size
                assert inside, f"{address.hex()[:16]} lies outside of {segment.path}"
                spans.setdefault(place.segment, []).append((place.offset, place.end))
            for ident, listed in spans.items():
                listed.sort()
                for (_, end), (start, _) in zip(listed, listed[1:], strict=False):
                    assert end <= start, f"records overlap at {start} in {self._segments[ident].path}"
