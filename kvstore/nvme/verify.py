"""Reading every record of an NVMe folder from outside, beside the processes that use it.

Takes no lock and writes nothing, unless it is to repair: then damaged records are marked as quarantined for good and
copies of some are kept, as a tier does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from mmap import mmap
from pathlib import Path

from pagetier.kvstore.checked import Checked, Verdict, judge
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.nvme.audit import read_record
from pagetier.kvstore.nvme.catalog import Catalog
from pagetier.kvstore.nvme.files import Files
from pagetier.kvstore.nvme.folder import Folder
from pagetier.kvstore.nvme.handles import Handles, Segment
from pagetier.kvstore.nvme.index import Place, RecordIndex
from pagetier.kvstore.nvme.log import MAX_QUARANTINE_BYTES, MIN_QUARANTINE_BYTES
from pagetier.kvstore.nvme.quarantine import Quarantine
from pagetier.kvstore.nvme.segment import read_commit, round_up, walk_headers
from pagetier.kvstore.record import PAGE_BYTES


class FolderAudit:
    """One folder as it was when this began. Raises ConfigError for a path that is no folder of an NVMe tier."""

    def __init__(self, path: Path, mac_key: bytes | None = None, files: Files | None = None) -> None:
        self._files, self._mac_key = files or Files(), mac_key
        self._folder, self._index, self._handles = Folder(self._files, path), RecordIndex(), Handles(self._files)
        self._catalog = Catalog(self._files, self._folder, self._index, self._handles)
        self._quarantine = Quarantine(self._files, self._folder, self._catalog, self._index, self._handles)
        self._buffer = memoryview(mmap(-1, PAGE_BYTES))
        self.num_quarantined = 0
        try:
            writers = self._folder.writers()
            if not writers and not (path / "identities").is_dir():
                raise ConfigError(f"{path} is no folder of an NVMe tier; give what --kv-nvme-path was")
            self._catalog.refresh()
            known = {segment.path for segment in self._catalog.segments()}
            self._strangers = [p for w in writers for p in self._folder.segment_paths(w) if p not in known]
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({error.strerror}); give a folder of --kv-nvme-path that you may read"
            ) from None

    @property
    def num_records(self) -> int:
        return len(self._index) + len(self._strangers)

    def check(self, *, repair: bool = False) -> Iterator[Checked]:
        """Every record, one by one; what was evicted meanwhile is left out. repair: damaged ones are quarantined."""
        for path in self._strangers:
            if self._files_size(path):
                yield Checked(Verdict.DAMAGED, str(path), 0, reason="is no segment of this version; a server evicts it")
        for segment in sorted(self._catalog.segments(), key=lambda one: one.path):
            for address, place in self._index.records_in(segment.ident):
                checked = self._check(segment, address, place)
                if checked is None:
                    continue
                if repair and checked.verdict is Verdict.DAMAGED:
                    self._quarantine.condemn(segment, address, place, "verify")
                    self.num_quarantined += 1
                yield checked
            if (hidden := self._hidden(segment)) is not None:
                yield hidden
        if repair and self.num_quarantined:
            self._keep_copies()

    def close(self) -> None:
        """Let go of all files. Idempotent."""
        self._catalog.clear()
        self._folder.detach()
        self._handles.close()

    def _check(self, segment: Segment, address: bytes, place: Place) -> Checked | None:
        nbytes = place.end - place.offset
        if nbytes > len(self._buffer):
            self._buffer = memoryview(mmap(-1, round_up(nbytes)))
        where = f"{segment.path.parent.name}/{segment.path.name}, page {place.page}"
        try:
            fd, handle = self._handles.acquire(segment)
            try:
                found = read_record(self._files, fd, address, place, mac_key=self._mac_key, buffer=self._buffer)
            finally:
                self._handles.release(handle)
        except FileNotFoundError:
            return None
        except OSError as error:
            return Checked(Verdict.DAMAGED, where, nbytes, address[:32], reason=f"cannot be read ({error.strerror})")
        verdict, reason = judge(found.status, found.header, self._mac_key is not None)
        if verdict is not Verdict.OK and self._quarantine.is_evicted(segment, address, place):
            return None
        domain = None if found.header is None else found.header.domain
        return Checked(verdict, where, nbytes, address[:32], domain, reason)

    def _hidden(self, segment: Segment) -> Checked | None:
        """Records of an open segment that cannot be found any more, because a header in front of them is damaged."""
        try:
            fd, handle = self._handles.acquire(segment)
            try:
                commit = read_commit(self._files, fd)
                if commit is None or commit.closed or commit.end <= segment.end:
                    return None
                _, end = walk_headers(self._files, fd, segment.end, min(commit.end, segment.size))
            finally:
                self._handles.release(handle)
        except OSError:
            return None  # gone, or told with its records
        if end > segment.end:
            return None  # written since
        where = f"{segment.path.parent.name}/{segment.path.name}, page {end // PAGE_BYTES}"
        num_found = len(self._index.records_in(segment.ident))
        reason = f"a damaged header hides {max(1, commit.num_records - num_found):,} records from whoever starts now"
        return Checked(Verdict.DAMAGED, where, commit.end - end, reason=reason)

    def _files_size(self, path: Path) -> int:
        """0 for a file that is gone or on its way out."""
        try:
            return self._files.stat(path).st_size
        except OSError:
            return 0

    def _keep_copies(self) -> None:
        """Keep copies of damaged records, within the share of the folder that is set aside for them."""
        try:
            self._folder.attach()
            used = self._folder.physical_bytes()
            max_bytes = min(MAX_QUARANTINE_BYTES, max(MIN_QUARANTINE_BYTES, used // 64))
            self._quarantine.keep_waiting(max_bytes, used + max_bytes)
        except OSError:
            return  # they are out of use, which is what counts
