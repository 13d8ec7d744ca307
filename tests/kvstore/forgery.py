"""Records as someone who can write to a medium might leave them there, and the media to leave them on.

A forger knows the format: checks that need no key are always right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from pagetier.kvstore.block import Address
from pagetier.kvstore.nvme.files import Files
from pagetier.kvstore.nvme.folder import Folder
from pagetier.kvstore.nvme.segment import (
    Commit,
    Entries,
    data_start,
    digest_of,
    pack_first_page,
    record_bytes,
    round_up,
    smallest_segment,
)
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.record import FIXED_BYTES, PAGE_BYTES, address_bytes, redis_name
from pagetier.kvstore.redis.tier import RedisTier
from pagetier.kvstore.tier import Tier
from tests.kvstore.tier_contract import DOMAIN
from tests.kvstore.valkey import Valkey

CHECKSUM_AT, HEADER_CHECK_AT = 192, 208


def checks_redone(header: bytes, payload: bytes, mac_key: bytes | None = None) -> bytes:
    """The header with checksum and header check that fit everything else in it; by a MAC of the forger's own key, if
    given.
    """
    fields, tokens = header[:CHECKSUM_AT], header[FIXED_BYTES:]
    if mac_key is None:
        checksum = xxhash.xxh3_128_digest(fields + tokens + payload)
    else:
        keyed = hashlib.blake2b(fields + tokens + payload, digest_size=16, key=mac_key, person=b"pgt1-record")
        checksum = keyed.digest()
    return fields + checksum + xxhash.xxh3_64_digest(fields + checksum + tokens) + tokens


@dataclass(frozen=True)
class Medium:
    """A tier over what a forger wrote. plant: (address, header, payload) of one record; then `open` gives the tier."""

    plant: Callable[[Address, bytes, bytes], None]
    open: Callable[[bytes | None], Tier]  # of this MAC key


def nvme_medium(path: Path) -> Medium:
    def plant(address: Address, header: bytes, payload: bytes) -> None:
        folder = Folder(Files(), path)
        folder.attach()
        if folder.writer is None:
            folder.add_writer()
        assert folder.writer is not None
        (folder.writer / f"{1:016x}.seg").write_bytes(closed_segment(address, header, payload))
        folder.detach()

    def opened(mac_key: bytes | None) -> Tier:
        return NvmeTier(path, 8 << 20, DOMAIN, refresh_s=0, fsync="none", mac_key=mac_key)

    return Medium(plant, opened)


def closed_segment(address: Address, header: bytes, payload: bytes) -> bytes:
    """A segment whose footer finds one record at `address`, whatever its header says."""
    size = smallest_segment(len(payload))
    start = data_start(size)
    entries = Entries()
    entries.append(address_bytes(address), start // PAGE_BYTES, len(payload))
    footer = entries.pack_footer()
    commit = Commit(True, 1, start + record_bytes(len(payload)), len(footer), digest_of(footer))
    body = header.ljust(PAGE_BYTES, b"\0") + payload.ljust(round_up(len(payload)), b"\0")
    return pack_first_page(size, 1, commit).ljust(start, b"\0") + body + footer


def redis_medium(server: Valkey) -> Medium:
    def plant(address: Address, header: bytes, payload: bytes) -> None:
        server.client().set(redis_name(DOMAIN, address), header + payload, px=60_000)

    return Medium(plant, lambda mac_key: RedisTier(server.url, DOMAIN, mac_key=mac_key))
