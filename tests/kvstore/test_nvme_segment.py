"""Segment bytes are fixed, and damage to any of them costs records, never their truth."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import xxhash

from pagetier.kvstore.nvme.files import Files
from pagetier.kvstore.nvme.segment import (
    Commit,
    Entries,
    data_start,
    digest_of,
    erased_at,
    footer_bytes,
    load_segment,
    pack_first_page,
    parse_segment_header,
    record_bytes,
    smallest_segment,
)
from pagetier.kvstore.record import PAGE_BYTES, address_bytes, pack_header
from tests.kvstore.tier_contract import DOMAIN, PART, addresses, chain, payload_of

SIZE = 1 << 20


def entries_of(count: int) -> Entries:
    entries = Entries()
    for i in range(count):
        entries.append(bytes([i]) * 40, 3 + 2 * i, 4096)
    return entries


def test_golden_first_page() -> None:
    page = pack_first_page(SIZE, 0x1122334455667788, Commit(False, 0, data_start(SIZE)))
    header = b"PGTSEG1\n" + bytes.fromhex("01000000 00000000 0000100000000000 8877665544332211")
    assert page[:40] == header + xxhash.xxh3_64_digest(header)
    commit = b"PGTCMT1\n" + struct.pack("<IIQQ", 0, 0, 8192, 0) + bytes(24)
    assert page[512:576] == commit + xxhash.xxh3_64_digest(commit)
    assert not any(page[40:512]) and not any(page[576:]) and len(page) == PAGE_BYTES
    assert parse_segment_header(page) == SIZE


def test_golden_footer_and_closing_commit() -> None:
    footer = entries_of(2).pack_footer()
    expected = (
        b"PGTFTR1\n" + struct.pack("<II", 1, 2) + b"\0" * 40 + b"\1" * 40 + struct.pack("<IIII", 3, 5, 4096, 4096)
    )
    assert footer == expected.ljust(4096, b"\0")
    packed = Commit(True, 2, 20480, len(footer), digest_of(footer)).pack()
    body = b"PGTCMT1\n" + struct.pack("<IIQQ", 1, 2, 20480, 4096) + xxhash.xxh3_128_digest(footer) + bytes(8)
    assert packed == body + xxhash.xxh3_64_digest(body)


def test_every_flipped_byte_of_page_0_is_found() -> None:
    page = bytearray(pack_first_page(SIZE, 1, Commit(True, 5, 65536, 4096, b"d" * 16)))
    for at in (*range(40), *range(512, 576)):
        page[at] ^= 0x40
        header, commit = parse_segment_header(bytes(page)), Commit.parse(bytes(page[512:]))
        assert (header is None) == (at < 40) and (commit is None) == (at >= 512), f"byte {at}"
        page[at] ^= 0x40


def test_every_flipped_byte_of_a_footer_is_found() -> None:
    footer = bytearray(entries_of(3).pack_footer())
    digest = digest_of(bytes(footer))
    assert Entries.parse_footer(bytes(footer), digest) is not None
    for at in range(len(footer)):
        footer[at] ^= 1
        assert Entries.parse_footer(bytes(footer), digest) is None
        footer[at] ^= 1
    for size in (0, 7, 16, 100, 4095):
        assert Entries.parse_footer(bytes(footer[:size]), digest_of(bytes(footer[:size]))) is None


def test_sizes_leave_room_for_map_and_footer() -> None:
    for payload in (0, 1, 4096, 4097, 368_640, 2 << 20):
        size = smallest_segment(payload)
        assert data_start(size) + record_bytes(payload) + footer_bytes(1) <= size
        assert size % PAGE_BYTES == 0
    last_page = SIZE // PAGE_BYTES - 1
    assert erased_at(last_page) < data_start(SIZE)


def write_segment(path: Path, num_records: int, *, commit: Commit | None = None, closed: bool = False) -> list[bytes]:
    """A segment file as the log writes it; its addresses."""
    names, at, entries = chain(num_records), data_start(SIZE), Entries()
    blob = bytearray(SIZE)
    for name, address in zip(names, addresses(names), strict=True):
        payload = payload_of(name, nbytes=5000)
        blob[at : at + PAGE_BYTES] = pack_header(DOMAIN, name, PART, payload).ljust(PAGE_BYTES, b"\0")
        blob[at + PAGE_BYTES : at + PAGE_BYTES + len(payload)] = payload
        entries.append(address_bytes(address), at // PAGE_BYTES, len(payload))
        at += record_bytes(len(payload))
    if closed:
        footer = entries.pack_footer()
        blob[at : at + len(footer)] = footer
        commit = Commit(True, num_records, at, len(footer), digest_of(footer))
        del blob[at + len(footer) :]
    blob[:PAGE_BYTES] = pack_first_page(SIZE, 1, commit or Commit(False, num_records, at))
    path.write_bytes(blob)
    return entries.address_list()


@pytest.mark.parametrize("closed", [False, True])
def test_footer_and_header_walk_tell_the_same(tmp_path: Path, closed: bool) -> None:
    path = tmp_path / "s"
    expected = write_segment(path, 7, closed=closed)
    loaded = load_segment(Files(), path)
    assert loaded is not None
    assert loaded.entries.address_list() == expected
    assert list(loaded.entries.payload_bytes) == [5000] * 7
    assert loaded.end == data_start(SIZE) + 7 * record_bytes(5000)


def test_a_damaged_footer_falls_back_to_the_headers(tmp_path: Path) -> None:
    path = tmp_path / "s"
    expected = write_segment(path, 7, closed=True)
    blob = bytearray(path.read_bytes())
    blob[-PAGE_BYTES + 20] ^= 1
    path.write_bytes(blob)
    loaded = load_segment(Files(), path)
    assert loaded is not None and loaded.entries.address_list() == expected


def test_what_lies_past_the_commit_does_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "s"
    start = data_start(SIZE)
    expected = write_segment(path, 7, commit=Commit(False, 4, start + 4 * record_bytes(5000)))
    loaded = load_segment(Files(), path)
    assert loaded is not None and loaded.entries.address_list() == expected[:4]


def test_every_truncation_of_a_file_loads_a_prefix_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s"
    expected = write_segment(path, 4, closed=True)
    blob = path.read_bytes()
    for size in range(0, len(blob), 512):
        path.write_bytes(blob[:size])
        loaded = load_segment(Files(), path)
        if loaded is not None:
            found = loaded.entries.address_list()
            assert found == expected[: len(found)]


def test_garbage_is_no_segment(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for blob in (b"", b"x", bytes(PAGE_BYTES), b"\xff" * 3 * PAGE_BYTES):
        path.write_bytes(blob)
        assert load_segment(Files(), path) is None
