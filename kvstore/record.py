"""The record: one block's bytes with everything they are checked against (proto/FORMAT.md, section "Record").

Used by every tier that turns a block into bytes. Pure functions over buffers: no I/O, no state; garbage in gives a
status, never an exception. `mac_key` (kvstore/mac.py): records are made and checked with a keyed digest, and a record
whose digest is of the other kind is not the one that was asked for.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

import xxhash

from pagetier.kvstore import codec
from pagetier.kvstore.block import KEY_BYTES, TOKEN_BYTES, Address, BlockName, Part
from pagetier.kvstore.codec import Coding

Buffer: TypeAlias = bytes | bytearray | memoryview

MAGIC = b"PGTREC1\n"
VERSION = 1
CHECK_XXH3, CHECK_MAC = 0, 1  # what `checksum` is: xxh3-128, or keyed BLAKE2b-128
PAGE_BYTES = 4096

_FIXED = struct.Struct("<8sHBBIQQQI5I32s32s32s32s")
_MAC_PERSON = b"pgt1-record"
_PART = struct.Struct("<5I")
_CHECKSUM_AT = _FIXED.size  # 192
_HEADER_CHECK_AT = _CHECKSUM_AT + 16  # 208
FIXED_BYTES = _HEADER_CHECK_AT + 8  # 216; the tokens follow
MAX_TOKENS = (PAGE_BYTES - FIXED_BYTES) // TOKEN_BYTES  # 970: a header fits one page
MAX_PAYLOAD_BYTES = 2**32 - 1


class RecordStatus(StrEnum):
    """What became of checking bytes against the record that was asked for."""

    OK = "ok"
    GARBAGE = "garbage"  # not a record: magic, version, lengths or the header's own check are wrong, or it is cut short
    MISMATCH = "mismatch"  # a sound header, of another record than the one asked for
    CHECKSUM = "checksum"  # the right header, other payload or, with a MAC key, another key
    UNDECODABLE = "undecodable"  # verified, and yet nothing that its codec makes of such a block


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. `payload_bytes` is the stored length, `raw_bytes` the decoded one; `check`: CHECK_XXH3 or
    CHECK_MAC.
    """

    domain: bytes
    name: BlockName
    part: Part
    codec: int
    payload_bytes: int
    raw_bytes: int
    checksum: bytes
    check: int = CHECK_XXH3

    @property
    def coding(self) -> Coding:
        return Coding(self.codec, self.raw_bytes)


def header_bytes(num_tokens: int) -> int:
    """Size of the unpadded header of a block of `num_tokens`."""
    return FIXED_BYTES + num_tokens * TOKEN_BYTES


def pack_header(
    domain: bytes,
    name: BlockName,
    part: Part,
    payload: Buffer,
    coding: Coding | None = None,
    *,
    mac_key: bytes | None = None,
) -> bytes:
    """The unpadded header for a `payload` as it is stored; without `coding` the block's own bytes.

    Reads the whole payload for the checksum. Raises ValueError for a name that no record can have.
    """
    fields = _pack_fields(domain, name, part, _Stored.of(payload, coding, mac_key))
    checksum = _checksum(fields, name.tokens, payload, mac_key)
    return fields + checksum + _header_check(fields + checksum, name.tokens) + name.tokens


class _Stored(NamedTuple):
    """What a header says of its payload."""

    codec: int
    check: int
    payload_bytes: int
    raw_bytes: int

    @classmethod
    def of(cls, payload: Buffer, coding: Coding | None, mac_key: bytes | None) -> _Stored:
        nbytes = memoryview(payload).nbytes
        number, raw_bytes = coding or (codec.NONE, nbytes)
        return cls(number, CHECK_XXH3 if mac_key is None else CHECK_MAC, nbytes, raw_bytes)


def _pack_fields(domain: bytes, name: BlockName, part: Part, stored: _Stored) -> bytes:
    num_tokens, odd = divmod(len(name.tokens), TOKEN_BYTES)
    if odd or not 1 <= num_tokens <= MAX_TOKENS:
        raise ValueError(f"a record holds 1 to {MAX_TOKENS} tokens of 4 bytes, got {len(name.tokens)} bytes")
    if not all(len(field) == KEY_BYTES for field in (domain, name.root, name.key, name.parent)):
        raise ValueError("domain, root, key and parent have 32 bytes each")
    if stored.payload_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a payload holds at most {MAX_PAYLOAD_BYTES} bytes, got {stored.payload_bytes}")
    try:
        return _FIXED.pack(
            MAGIC,
            VERSION,
            stored.codec,
            stored.check,
            header_bytes(num_tokens),
            stored.payload_bytes,
            stored.raw_bytes,
            name.position,
            num_tokens,
            part.group,
            part.first_layer,
            part.end_layer,
            part.first_head,
            part.end_head,
            domain,
            name.root,
            name.key,
            name.parent,
        )
    except struct.error as error:
        raise ValueError(f"position, part or codec out of range: {error}") from None


def _checksum(fields: bytes, tokens: bytes, payload: Buffer, mac_key: bytes | None) -> bytes:
    hasher: Any = (
        xxhash.xxh3_128(fields)
        if mac_key is None
        else hashlib.blake2b(fields, digest_size=16, key=mac_key, person=_MAC_PERSON)
    )
    hasher.update(tokens)
    hasher.update(payload)
    digest: bytes = hasher.digest()
    return digest


def _header_check(checked: bytes, tokens: bytes) -> bytes:
    return xxhash.xxh3_64_digest(checked + tokens)


def parse_header(buffer: Buffer) -> Header | None:
    """The header at the start of `buffer`, or None when there is none that is whole and passes its own check.

    Says nothing of the payload.
    """
    view = memoryview(buffer).cast("B")
    if view.nbytes < FIXED_BYTES:
        return None
    fixed = bytes(view[:FIXED_BYTES])
    magic, version, number, check, size, *counts = _FIXED.unpack_from(fixed)
    payload_bytes, raw_bytes, position, num_tokens, *rest = counts
    if magic != MAGIC or version != VERSION or not 1 <= num_tokens <= MAX_TOKENS:
        return None
    if size != header_bytes(num_tokens) or view.nbytes < size or payload_bytes > MAX_PAYLOAD_BYTES:
        return None
    tokens = bytes(view[FIXED_BYTES:size])
    if _header_check(fixed[:_HEADER_CHECK_AT], tokens) != fixed[_HEADER_CHECK_AT:]:
        return None
    part, (domain, root, key, parent) = Part(*rest[:5]), rest[5:]
    name = BlockName(key, parent, root, position, tokens)
    return Header(domain, name, part, number, payload_bytes, raw_bytes, fixed[_CHECKSUM_AT:_HEADER_CHECK_AT], check)


def unpack(
    header: Buffer,
    stored: memoryview,
    destination: memoryview,
    domain: bytes,
    name: BlockName,
    part: Part,
    *,
    mac_key: bytes | None = None,
) -> RecordStatus:
    """`verify` a record, and fill `destination` with its block. stored: its payload, the first bytes of `destination`,
    all of them unless it is encoded.

    Nothing is decoded that was not verified.
    """
    if stored.nbytes == destination.nbytes:
        return verify(header, stored, domain, name, part, mac_key=mac_key)
    found = parse_header(header)
    if found is None:
        return RecordStatus.GARBAGE
    if found.codec == codec.NONE:
        return RecordStatus.MISMATCH
    coding = Coding(found.codec, destination.nbytes)
    status = verify(header, stored, domain, name, part, coding, mac_key=mac_key)
    if status is RecordStatus.OK and not codec.decode(stored, destination, found.codec):
        return RecordStatus.UNDECODABLE
    return status


def verify(
    header: Buffer,
    payload: Buffer,
    domain: bytes,
    name: BlockName,
    part: Part,
    coding: Coding | None = None,
    *,
    mac_key: bytes | None = None,
) -> RecordStatus:
    """Check a record as it is stored: its header (may be followed by zeros, nothing else) and its whole payload.

    Every field is compared with what was asked for, then the checksum. Reads the payload once; never raises for
    anything that is in `header` or `payload`. Raises ValueError when what is asked for is no possible record.
    """
    fields = _pack_fields(domain, name, part, _Stored.of(payload, coding, mac_key))
    size = header_bytes(name.num_tokens)
    found = bytes(memoryview(header).cast("B"))
    if len(found) < size:
        return RecordStatus.GARBAGE
    checksum, check = found[_CHECKSUM_AT:_HEADER_CHECK_AT], found[_HEADER_CHECK_AT:FIXED_BYTES]
    if found[:_CHECKSUM_AT] != fields or found[FIXED_BYTES:size] != name.tokens:
        return RecordStatus.GARBAGE if parse_header(found) is None else RecordStatus.MISMATCH
    if check != _header_check(fields + checksum, name.tokens) or found.count(0, size) != len(found) - size:
        return RecordStatus.GARBAGE
    expected = _checksum(fields, name.tokens, payload, mac_key)
    return RecordStatus.OK if hmac.compare_digest(checksum, expected) else RecordStatus.CHECKSUM


def mismatched_fields(header: Header, domain: bytes, name: BlockName, part: Part, payload_bytes: int) -> list[str]:
    """Names of the fields in which a parsed header differs from what was asked for; for log lines and `verify`."""
    pairs = {
        "domain": (header.domain, domain),
        "root": (header.name.root, name.root),
        "key": (header.name.key, name.key),
        "parent": (header.name.parent, name.parent),
        "part": (header.part, part),
        "position": (header.name.position, name.position),
        "tokens": (header.name.tokens, name.tokens),
        "payload_bytes": (header.payload_bytes, payload_bytes),
        "raw_bytes": (header.raw_bytes, payload_bytes),
        "codec": (header.codec, codec.NONE),
    }
    return [field for field, (found, asked) in pairs.items() if found != asked]


def part_tag(part: Part) -> bytes:
    """8 bytes that stand for a part in an address."""
    return xxhash.xxh3_64_digest(
        _PART.pack(part.group, part.first_layer, part.end_layer, part.first_head, part.end_head)
    )


def address_bytes(address: Address) -> bytes:
    """A record's address as 40 plain bytes: key, then `part_tag`."""
    return address.key + part_tag(address.part)


def part_text(part: Part) -> str:
    """A part as text, such as `0.0-30.0-3`."""
    return f"{part.group}.{part.first_layer}-{part.end_layer}.{part.first_head}-{part.end_head}"


def redis_namespace(domain: bytes) -> str:
    """What the names of all records of a domain start with."""
    return f"pgt1:{domain[:8].hex()}:"


def redis_name(domain: bytes, address: Address) -> str:
    """The name of a record's value in Redis; ASCII. The hash tag is the key: a block's parts share a Cluster slot."""
    return f"{redis_namespace(domain)}{{{address.key.hex()}}}:{part_text(address.part)}"


REDIS_IDENTITIES = "pgt1:identities"  # hash: 64 hex digits of the domain -> encoded identity
