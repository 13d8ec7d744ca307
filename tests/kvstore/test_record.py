"""A record is what was asked for, in every field and every byte, or it is not served."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pagetier.kvstore.block import Address, BlockName, Part
from pagetier.kvstore.codec import Coding
from pagetier.kvstore.record import (
    FIXED_BYTES,
    MAX_TOKENS,
    PAGE_BYTES,
    RecordStatus,
    address_bytes,
    header_bytes,
    mismatched_fields,
    pack_header,
    parse_header,
    part_text,
    redis_name,
    redis_namespace,
    verify,
)

DOMAIN = bytes(range(32))
PART = Part(0, 2, 30, 1, 3)
NAME = BlockName(
    key=b"k" * 32, parent=b"p" * 32, root=b"r" * 32, position=48, tokens=struct.pack("<4I", 7, 8, 9, 2**32 - 1)
)
PAYLOAD = bytes(range(256)) * 4
HEADER = pack_header(DOMAIN, NAME, PART, PAYLOAD)
OK, GARBAGE, MISMATCH, CHECKSUM, _ = RecordStatus


def test_golden_bytes() -> None:
    fields = (
        b"PGTREC1\n"
        + bytes.fromhex("0100 0000 e8000000 0004000000000000 0004000000000000 3000000000000000 04000000")
        + bytes.fromhex("00000000 02000000 1e000000 01000000 03000000")
        + DOMAIN
        + b"r" * 32
        + b"k" * 32
        + b"p" * 32
    )
    assert len(fields) == 192
    assert HEADER[:192] == fields
    assert HEADER[192:208] == xxhash.xxh3_128_digest(fields + NAME.tokens + PAYLOAD)
    assert HEADER[208:216] == xxhash.xxh3_64_digest(HEADER[:208] + NAME.tokens)
    assert HEADER[216:] == bytes.fromhex("07000000 08000000 09000000 ffffffff")
    assert HEADER[192:216].hex() == "7d33d219260efee5e0257d6d562433a8e58f16aeb6ac81be"


def test_golden_address_and_names() -> None:
    address = Address(NAME.key, PART)
    packed = struct.pack("<5I", 0, 2, 30, 1, 3)
    assert address_bytes(address) == NAME.key + xxhash.xxh3_64_digest(packed)
    assert address_bytes(address)[32:].hex() == "1a72bb67f18bdc9f"
    assert part_text(PART) == "0.2-30.1-3"
    assert redis_name(DOMAIN, address) == "pgt1:0001020304050607:{" + "6b" * 32 + "}:0.2-30.1-3"
    assert redis_name(DOMAIN, address).startswith(redis_namespace(DOMAIN))


def test_a_whole_record_verifies_padded_or_not() -> None:
    assert verify(HEADER, PAYLOAD, DOMAIN, NAME, PART) is OK
    page = HEADER.ljust(PAGE_BYTES, b"\0")
    assert verify(memoryview(bytearray(page)), memoryview(PAYLOAD), DOMAIN, NAME, PART) is OK
    parsed = parse_header(page)
    assert parsed is not None
    assert (parsed.domain, parsed.name, parsed.part, parsed.codec) == (DOMAIN, NAME, PART, 0)
    assert parsed.payload_bytes == parsed.raw_bytes == len(PAYLOAD)


def test_every_flipped_bit_of_a_header_page_is_found() -> None:
    page = bytearray(HEADER.ljust(PAGE_BYTES, b"\0"))
    for at in range(PAGE_BYTES):
        for bit in range(8) if at < len(HEADER) else (at % 8,):
            page[at] ^= 1 << bit
            assert verify(page, PAYLOAD, DOMAIN, NAME, PART) is not OK, f"byte {at} bit {bit}"
            assert at >= len(HEADER) or parse_header(page) is None, f"byte {at} bit {bit}"
            page[at] ^= 1 << bit
    assert verify(page, PAYLOAD, DOMAIN, NAME, PART) is OK


def test_every_flipped_byte_of_the_payload_is_found() -> None:
    payload = bytearray(PAYLOAD)
    for at in range(len(payload)):
        payload[at] ^= 0x10
        assert verify(HEADER, payload, DOMAIN, NAME, PART) is CHECKSUM
        payload[at] ^= 0x10


def test_every_truncation_is_found() -> None:
    for size in range(len(HEADER)):
        assert verify(HEADER[:size], PAYLOAD, DOMAIN, NAME, PART) is GARBAGE
        assert parse_header(HEADER[:size]) is None
    for size in range(len(PAYLOAD)):
        assert verify(HEADER, PAYLOAD[:size], DOMAIN, NAME, PART) is not OK


@pytest.mark.parametrize(
    ("field", "domain", "name", "part"),
    [
        ("domain", b"x" * 32, NAME, PART),
        ("root", DOMAIN, NAME._replace(root=b"x" * 32), PART),
        ("key", DOMAIN, NAME._replace(key=b"x" * 32), PART),
        ("parent", DOMAIN, NAME._replace(parent=b"x" * 32), PART),
        ("position", DOMAIN, NAME._replace(position=64), PART),
        ("tokens", DOMAIN, NAME._replace(tokens=bytes(16)), PART),
        ("tokens", DOMAIN, NAME._replace(tokens=NAME.tokens[:8]), PART),
        ("tokens", DOMAIN, NAME._replace(tokens=NAME.tokens + bytes(4)), PART),
        *[("part", DOMAIN, NAME, PART._replace(**{field: 9})) for field in Part._fields],
    ],
)
def test_a_sound_record_of_another_name_is_a_mismatch(field: str, domain: bytes, name: BlockName, part: Part) -> None:
    page = HEADER.ljust(PAGE_BYTES, b"\0")
    assert verify(page, PAYLOAD, domain, name, part) is MISMATCH
    parsed = parse_header(HEADER)
    assert parsed is not None
    assert mismatched_fields(parsed, domain, name, part, len(PAYLOAD)) == [field]


def test_another_codec_or_size_is_a_mismatch() -> None:
    coded = pack_header(DOMAIN, NAME, PART, PAYLOAD, Coding(1, len(PAYLOAD)))
    assert verify(coded, PAYLOAD, DOMAIN, NAME, PART) is MISMATCH
    assert verify(HEADER, PAYLOAD + b"\0", DOMAIN, NAME, PART) is MISMATCH


def test_what_is_no_record_cannot_be_packed() -> None:
    longest = NAME._replace(tokens=bytes(4 * MAX_TOKENS))
    assert len(pack_header(DOMAIN, longest, PART, b"")) <= PAGE_BYTES
    for bad in (
        NAME._replace(tokens=b""),
        NAME._replace(tokens=b"123"),
        NAME._replace(tokens=bytes(4 * MAX_TOKENS + 4)),
        NAME._replace(key=b"short"),
        NAME._replace(position=-1),
    ):
        with pytest.raises(ValueError):
            pack_header(DOMAIN, bad, PART, PAYLOAD)
    with pytest.raises(ValueError):
        pack_header(DOMAIN, NAME, PART._replace(group=-1), PAYLOAD)


digests = st.binary(min_size=32, max_size=32)
u32 = st.integers(0, 2**32 - 1)
parts = st.builds(Part, u32, u32, u32, u32, u32)
block_names = st.builds(
    BlockName,
    key=digests,
    parent=digests,
    root=digests,
    position=st.integers(0, 2**64 - 1),
    tokens=st.lists(u32, min_size=1, max_size=20).map(lambda ids: struct.pack(f"<{len(ids)}I", *ids)),
)


@given(domain=digests, name=block_names, part=parts, payload=st.binary(max_size=300))
def test_round_trip(domain: bytes, name: BlockName, part: Part, payload: bytes) -> None:
    header = pack_header(domain, name, part, payload)
    assert len(header) == header_bytes(name.num_tokens)
    parsed = parse_header(header + b"rest")
    assert parsed is not None
    assert mismatched_fields(parsed, domain, name, part, len(payload)) == []
    assert verify(header, payload, domain, name, part) is OK


@given(data=st.binary(max_size=FIXED_BYTES + 40), keep=st.integers(0, len(HEADER)))
def test_garbage_is_a_status(data: bytes, keep: int) -> None:
    for buffer in (data, HEADER[:keep] + data):
        parsed = parse_header(buffer)
        assert parsed is None or buffer.startswith(HEADER)
        assert verify(buffer, PAYLOAD, DOMAIN, NAME, PART) is (
            OK if buffer.startswith(HEADER) and not any(buffer[len(HEADER) :]) else GARBAGE
        )
