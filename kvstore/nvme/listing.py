"""Going through what an NVMe folder holds, by headers: for people's questions, never on the engine's way.

Reads one page a record and no payload; changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from pagetier.kvstore.block import BlockName
from pagetier.kvstore.errors import TierUnavailable
from pagetier.kvstore.nvme.catalog import Catalog
from pagetier.kvstore.nvme.files import Files, read_bytes
from pagetier.kvstore.nvme.handles import Handles, Segment
from pagetier.kvstore.nvme.index import Place, RecordIndex
from pagetier.kvstore.record import PAGE_BYTES, Header, parse_header
from pagetier.kvstore.tier import Description, ListedRecord


class Listing:
    """Over one tier's index and segments. Thread-safe: all state is theirs."""

    def __init__(self, files: Files, catalog: Catalog, index: RecordIndex, handles: Handles) -> None:
        self._files, self._catalog, self._index, self._handles = files, catalog, index, handles

    def describe(self, addresses: Sequence[bytes]) -> list[Description | None]:
        """Without I/O: sizes, and when the segment that a record lies in was begun."""
        found = self._index.find(addresses)
        return [None if place is None else self._description(place) for place in found]

    def _description(self, place: Place) -> Description:
        segment = self._catalog.get(place.segment)
        return Description(place.payload_bytes, None, None if segment is None else int(segment.path.stem, 16) / 1e9)

    def names(self, addresses: Sequence[bytes], deadline_s: float) -> dict[bytes, BlockName]:
        """Names by address, of those records that are there and whose headers can be read in time."""
        placed = [
            (address, place)
            for address, place in zip(addresses, self._index.find(addresses), strict=True)
            if place is not None
        ]
        placed.sort(key=lambda found: (found[1].segment, found[1].page))
        names: dict[bytes, BlockName] = {}
        for ident, records in groupby(placed, key=lambda found: found[1].segment):
            segment = self._catalog.get(ident)
            if segment is None or self._files.now_s() >= deadline_s:
                continue
            try:
                for address, _, header in self._headers(segment, list(records)):
                    names[address] = header.name
            except OSError:  # it was evicted meanwhile, or cannot be read: then its names are not known
                continue
        return names

    def records(self, deadline_s: float, name: str) -> Iterator[ListedRecord]:
        """Every record, segment by segment, the last used ones first. Raises TierUnavailable, in the tier's `name`,
        when the disk fails or time is up.
        """
        ticks = self._index.segment_ticks()
        known = [segment for segment in self._catalog.segments() if segment.ident in ticks]
        for segment in sorted(known, key=lambda segment: ticks[segment.ident].hottest, reverse=True):
            try:
                for _, place, header in self._headers(segment, self._index.records_in(segment.ident)):
                    if self._files.now_s() >= deadline_s:
                        raise TierUnavailable(name, "list", "not done in time")
                    yield ListedRecord(header.name, header.part, place.payload_bytes, header.domain)
            except FileNotFoundError:  # evicted meanwhile
                continue
            except OSError as error:
                raise TierUnavailable(name, "list", str(error)) from error

    def _headers(
        self, segment: Segment, records: Sequence[tuple[bytes, Place]]
    ) -> Iterator[tuple[bytes, Place, Header]]:
        """The headers that can be parsed. Raises OSError."""
        if not records:
            return
        fd, handle = self._handles.acquire(segment)
        try:
            for address, place in records:
                header = parse_header(read_bytes(self._files, fd, PAGE_BYTES, place.offset))
                if header is not None:
                    yield address, place, header
        finally:
            self._handles.release(handle)
