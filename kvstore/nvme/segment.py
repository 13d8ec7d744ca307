"""The bytes of a segment file: layout, header, commit block, erased map, footer, and how to load one.

As in proto/FORMAT.md, section "NVMe". Knows no index, no cap and no locks.
"""

from __future__ import annotations

import os
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from pagetier.kvstore.block import Address
from pagetier.kvstore.nvme.files import Files, read_bytes
from pagetier.kvstore.record import PAGE_BYTES, address_bytes, parse_header

ADDRESS_BYTES = 40
COMMIT_AT = 512
LIVE, DELETED, QUARANTINED = 0, 1, 2  # bytes of the erased map
SUFFIX = ".seg"

_HEADER = struct.Struct("<8sIIQQ")
_COMMIT = struct.Struct("<8sIIQQ16s8x")
_FOOTER = struct.Struct("<8sII")
_HEADER_MAGIC, _COMMIT_MAGIC, _FOOTER_MAGIC = b"PGTSEG1\n", b"PGTCMT1\n", b"PGTFTR1\n"
_VERSION = 1
_COMMIT_BYTES = _COMMIT.size + 8
_WALK_BYTES = 256 << 10  # one read of the header walk when records are small


def round_up(nbytes: int) -> int:
    """To whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def record_bytes(payload_bytes: int) -> int:
    """What a record takes in a segment."""
    return PAGE_BYTES + round_up(payload_bytes)


def data_start(size: int) -> int:
    """Where records begin in a segment of full size `size`: behind page 0 and the erased map."""
    return PAGE_BYTES + round_up(size // PAGE_BYTES // 2)


def footer_bytes(count: int) -> int:
    """Size of the footer for `count` records."""
    return round_up(_FOOTER.size + count * (ADDRESS_BYTES + 8))


def smallest_segment(payload_bytes: int) -> int:
    """Full size of the smallest segment that can hold one such record."""
    need = record_bytes(payload_bytes) + footer_bytes(1)
    size = PAGE_BYTES + need
    while data_start(size) + need > size:
        size += PAGE_BYTES
    return size


def erased_at(page: int) -> int:
    """Offset of the erased-map byte of the record whose header is in page `page`."""
    return PAGE_BYTES + page // 2


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit block: what of the segment exists. Sizes in bytes."""

    closed: bool
    num_records: int
    end: int
    footer_bytes: int = 0
    footer_digest: bytes = bytes(16)

    def pack(self) -> bytes:
        body = _COMMIT.pack(
            _COMMIT_MAGIC, int(self.closed), self.num_records, self.end, self.footer_bytes, self.footer_digest
        )
        return body + xxhash.xxh3_64_digest(body)

    @classmethod
    def parse(cls, data: bytes) -> Commit | None:
        """None when the block is torn or none."""
        body, check = data[: _COMMIT.size], data[_COMMIT.size : _COMMIT_BYTES]
        if len(body) < _COMMIT.size or xxhash.xxh3_64_digest(body) != check:
            return None
        magic, state, num_records, end, size, digest = _COMMIT.unpack(body)
        return cls(state == 1, num_records, end, size, digest) if magic == _COMMIT_MAGIC and state in (0, 1) else None


def pack_first_page(size: int, created_ns: int, commit: Commit) -> bytes:
    """Page 0 of a segment of full size `size`."""
    header = _HEADER.pack(_HEADER_MAGIC, _VERSION, 0, size, created_ns)
    header += xxhash.xxh3_64_digest(header)
    return (header.ljust(COMMIT_AT, b"\0") + commit.pack()).ljust(PAGE_BYTES, b"\0")


def parse_segment_header(page: bytes) -> int | None:
    """The full size that page 0 states; None when it is no segment's."""
    body, check = page[: _HEADER.size], page[_HEADER.size : _HEADER.size + 8]
    if len(body) < _HEADER.size or xxhash.xxh3_64_digest(body) != check:
        return None
    magic, version, _, size, _ = _HEADER.unpack(body)
    fits = magic == _HEADER_MAGIC and version == _VERSION and size % PAGE_BYTES == 0 and size > data_start(size)
    return size if fits else None


class Entries:
    """Records of one segment as columns: addresses of 40 bytes, page of each header, payload bytes."""

    __slots__ = ("addresses", "pages", "payload_bytes")

    def __init__(self) -> None:
        self.addresses = bytearray()
        self.pages = array("I")
        self.payload_bytes = array("I")

    def __len__(self) -> int:
        return len(self.pages)

    def append(self, address: bytes, page: int, payload_bytes: int) -> None:
        self.addresses += address
        self.pages.append(page)
        self.payload_bytes.append(payload_bytes)

    def address_list(self) -> list[bytes]:
        listed: list[bytes] = np.frombuffer(bytes(self.addresses), dtype=f"V{ADDRESS_BYTES}").tolist()
        return listed

    def pack_footer(self) -> bytes:
        """The footer, whole pages."""
        head = _FOOTER.pack(_FOOTER_MAGIC, _VERSION, len(self))
        data = b"".join((head, self.addresses, self.pages.tobytes(), self.payload_bytes.tobytes()))
        return data.ljust(footer_bytes(len(self)), b"\0")

    @classmethod
    def parse_footer(cls, data: bytes, digest: bytes) -> Entries | None:
        """None when the footer is not what the commit block says."""
        if len(data) < _FOOTER.size or xxhash.xxh3_128_digest(data) != digest:
            return None
        magic, version, count = _FOOTER.unpack_from(data)
        if magic != _FOOTER_MAGIC or version != _VERSION or len(data) != footer_bytes(count):
            return None
        entries = cls()
        pages_at = _FOOTER.size + count * ADDRESS_BYTES
        entries.addresses = bytearray(data[_FOOTER.size : pages_at])
        entries.pages.frombytes(data[pages_at : pages_at + 4 * count])
        entries.payload_bytes.frombytes(data[pages_at + 4 * count : pages_at + 8 * count])
        return entries


def digest_of(footer: bytes) -> bytes:
    """What the commit block keeps of a footer."""
    return xxhash.xxh3_128_digest(footer)


@dataclass(slots=True)
class LoadedSegment:
    """A segment as found on disk. `end`: of the records found; `erased`: the map."""

    size: int
    stat: os.stat_result
    commit: Commit | None
    entries: Entries
    end: int
    erased: bytes


def load_segment(files: Files, path: Path) -> LoadedSegment | None:
    """Read what a segment holds: from its footer, else by walking headers. None when it is no segment (of this
    version). Raises OSError.
    """
    fd = files.open(path, os.O_RDONLY)
    try:
        stat = files.stat(fd)
        first = read_bytes(files, fd, PAGE_BYTES, 0)
        size = parse_segment_header(first)
        if size is None:
            return None
        start = data_start(size)
        erased = read_bytes(files, fd, start - PAGE_BYTES, PAGE_BYTES)
        commit = Commit.parse(first[COMMIT_AT:])
        if commit is not None and commit.closed:
            footer = (
                read_bytes(files, fd, commit.footer_bytes, commit.end)
                if commit.end + commit.footer_bytes <= size
                else b""
            )
            entries = Entries.parse_footer(footer, commit.footer_digest)
            if entries is not None and len(entries) == commit.num_records and _within(entries, start, commit.end):
                return LoadedSegment(size, stat, commit, entries, commit.end, erased)
        entries, end = walk_headers(files, fd, start, min(commit.end if commit else size, stat.st_size))
        return LoadedSegment(size, stat, commit, entries, end, erased)
    finally:
        files.close(fd)


def _within(entries: Entries, start: int, end: int) -> bool:
    """Whether all records lie between `start` and `end`."""
    pages = np.frombuffer(entries.pages, dtype="<u4").astype(np.int64) * PAGE_BYTES
    payloads = np.frombuffer(entries.payload_bytes, dtype="<u4").astype(np.int64)
    return bool(np.all(pages >= start) and np.all(pages + PAGE_BYTES + payloads <= end))


def walk_headers(files: Files, fd: int, start: int, end: int) -> tuple[Entries, int]:
    """Records from `start` on as their headers tell, up to the first that does not fit before `end`; and where that
    is. Raises OSError.
    """
    entries, at = Entries(), start
    chunk, chunk_at = b"", start
    small = True
    while at + PAGE_BYTES <= end:
        if at < chunk_at or at + PAGE_BYTES > chunk_at + len(chunk):
            chunk, chunk_at = read_bytes(files, fd, min(_WALK_BYTES if small else PAGE_BYTES, end - at), at), at
        header = parse_header(chunk[at - chunk_at : at - chunk_at + PAGE_BYTES])
        if header is None or at + record_bytes(header.payload_bytes) > end:
            break
        address = address_bytes(Address(header.name.key, header.part))
        entries.append(address, at // PAGE_BYTES, header.payload_bytes)
        at += record_bytes(header.payload_bytes)
        small = record_bytes(header.payload_bytes) <= _WALK_BYTES // 4
    return entries, at


def read_commit(files: Files, fd: int) -> Commit | None:
    """The present commit block of an open descriptor; None when torn. Raises OSError."""
    return Commit.parse(read_bytes(files, fd, _COMMIT_BYTES, COMMIT_AT))
