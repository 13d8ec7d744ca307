"""What an NVMe folder holds, seen from outside, beside those who use it: identities, blocks by key, all blocks.

Takes no lock and writes nothing but, to purge, bytes of erased maps; and that only where no process writes to the
folder, since one that runs would go on serving what it knows.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path

from pagetier.kvstore.admin import BlockInfo, PurgeResult, refuse_other_tiers
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.nvme.catalog import Catalog
from pagetier.kvstore.nvme.files import Files, close_quietly, read_bytes
from pagetier.kvstore.nvme.folder import Folder
from pagetier.kvstore.nvme.handles import Handles
from pagetier.kvstore.nvme.index import Place, RecordIndex
from pagetier.kvstore.nvme.segment import DELETED
from pagetier.kvstore.record import PAGE_BYTES, Header, parse_header

TIER = "nvme"


class FolderReading:
    """One folder as it was when this began. Raises ConfigError for a path that is no folder of an NVMe tier."""

    counts_hits = False

    def __init__(self, path: Path, files: Files | None = None) -> None:
        self.path, self._files = path, files or Files()
        self._folder, self._index, self._handles = Folder(self._files, path), RecordIndex(), Handles(self._files)
        self._catalog = Catalog(self._files, self._folder, self._index, self._handles)
        try:
            if not self._folder.writers() and not (path / "identities").is_dir():
                raise ConfigError(f"{path} is no folder of an NVMe tier; give what --kv-nvme-path was")
            self._catalog.refresh()
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({error.strerror}); give a folder of --kv-nvme-path that you may read"
            ) from None
        self._places: dict[bytes, list[Place]] = {}
        for address, place in self._index.places():
            self._places.setdefault(address[:32], []).append(place)

    @property
    def shown(self) -> str:
        return str(self.path)

    def identities(self) -> dict[bytes, bytes]:
        """Domain -> encoded CacheIdentity."""
        try:
            return self._folder.identities()
        except OSError:
            return {}

    def blocks(self, domain: bytes, keys: Sequence[bytes]) -> list[BlockInfo]:
        """What is known of each block. A block whose parts lie apart takes what they take together."""
        found = {key: info for key, info, header in self._described(keys) if header.domain == domain}
        return [found.get(key, BlockInfo(key)) for key in keys]

    def known(self, domain: bytes) -> list[BlockInfo]:
        """Every block of a domain."""
        return [info for _, info, header in self._described(list(self._places)) if header.domain == domain]

    def purge(
        self, domain: bytes, keys: Collection[bytes] | None, root: bytes | None, tiers: Collection[str] = ()
    ) -> PurgeResult:
        """Remove a domain's records: all, those of `keys`, or those below `root`. Raises ConfigError while a process
        writes to the folder, and for other tiers than this."""
        refuse_other_tiers(TIER, tiers)
        self._refuse_used()
        num_removed = 0
        for segment in self._catalog.segments():
            pages = []
            for address, place in self._index.records_in(segment.ident):
                if keys is not None and address[:32] not in keys:
                    continue
                header = self._header(place)
                if header is not None and header.domain == domain and root in (None, header.name.root):
                    pages.append(place.page)
            self._catalog.mark(segment, pages, DELETED)
            num_removed += len(pages)
        return PurgeResult({TIER: num_removed})

    def close(self) -> None:
        """Let go of all files. Idempotent."""
        self._catalog.clear()
        self._handles.close()

    def _described(self, keys: Sequence[bytes]) -> list[tuple[bytes, BlockInfo, Header]]:
        now_s, found = time.time(), []
        for key in keys:
            places = self._places.get(key, [])
            header = next((h for place in places if (h := self._header(place)) is not None), None)
            if header is None:
                continue
            segments = [self._catalog.get(place.segment) for place in places]
            begun_s = [int(segment.path.stem, 16) / 1e9 for segment in segments if segment is not None]
            age_s = max(0.0, now_s - min(begun_s)) if begun_s else None
            nbytes = sum(place.payload_bytes for place in places)
            found.append((key, BlockInfo(key, (TIER,), nbytes, header.name, age_s), header))
        return found

    def _header(self, place: Place) -> Header | None:
        segment = self._catalog.get(place.segment)
        if segment is None:
            return None
        try:
            fd, handle = self._handles.acquire(segment)
            try:
                return parse_header(read_bytes(self._files, fd, PAGE_BYTES, place.offset))
            finally:
                self._handles.release(handle)
        except OSError:
            return None

    def _refuse_used(self) -> None:
        for writer in self._folder.writers():
            fd = self._folder.try_lock(writer)
            if fd is None:
                raise ConfigError(f"{self.path} is used by a server, which would go on serving; ask it with --url")
            close_quietly(self._files, fd)
