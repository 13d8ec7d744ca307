"""Block keys: a hash chain over token ids below a root made of domain and salt (proto/FORMAT.md, section "Keys").

Nothing here depends on PYTHONHASHSEED, the process or the machine. The caller chooses where to hash: 100,000 tokens
take what the row `hash_and_match_100000_tokens` of `pagetier bench recovery` says.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from pagetier.kvstore.block import KEY_BYTES, TOKEN_BYTES, BlockName
from pagetier.kvstore.errors import ConfigError

Hash = Callable[[bytes], bytes]


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _xxh3_128(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data).ljust(KEY_BYTES, b"\0")


HASHES: dict[str, Hash] = {"sha256": _sha256, "xxh3-128": _xxh3_128}


def hash_named(name: str) -> Hash:
    """The 32-byte hash called `name`; ConfigError names the known ones. xxh3-128 is for trusted use only: an attacker
    can build its collisions."""
    if name not in HASHES:
        raise ConfigError.unknown_name("--kv-hash", name, HASHES)
    return HASHES[name]


def pack_tokens(token_ids: Sequence[int] | np.ndarray) -> bytes:
    """Token ids as u32 little-endian. Raises OverflowError for ids outside u32."""
    if isinstance(token_ids, np.ndarray):
        return token_ids.astype("<u4").tobytes()
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_tokens(tokens: bytes) -> np.ndarray:
    """The inverse of `pack_tokens`: u32 array (num_tokens,)."""
    return np.frombuffer(tokens, dtype="<u4")


def root_key(domain: bytes, salt: bytes = b"", hash_: Hash = _sha256) -> bytes:
    """The root below which a tenant's (`salt`) blocks of one cache identity (`domain`) hang."""
    return hash_(b"pgt1-root" + domain + struct.pack("<I", len(salt)) + salt)


_KEY_START = b"pgt1"
_AFTER_START = hashlib.sha256(_KEY_START)  # copied, never updated: cheaper than a new hash (OpenSSL looks each one up)


def _sha256_key(parent: bytes, count: bytes, tokens: bytes, extra: bytes) -> bytes:
    """`_sha256` of a key's content, in two thirds of the time."""
    hasher = _AFTER_START.copy()
    hasher.update(b"".join((parent, count, tokens, extra)))
    return hasher.digest()


def block_key(parent: bytes, tokens: bytes, extra: bytes = b"", hash_: Hash = _sha256) -> bytes:
    """The key of a block holding `tokens` (u32 LE) after `parent`. `extra` is other content it depends on."""
    num_tokens = len(tokens) // TOKEN_BYTES
    count, more = struct.pack("<I", num_tokens), struct.pack("<I", len(extra)) + extra
    if hash_ is _sha256:
        return _sha256_key(parent, count, tokens, more)
    return hash_(b"".join((_KEY_START, parent, count, tokens, more)))


def chain_names(
    root: bytes,
    token_ids: Sequence[int] | np.ndarray,
    block_size: int,
    *,
    parent: bytes | None = None,
    position: int = 0,
    hash_: Hash = _sha256,
) -> list[BlockName]:
    """Names of the *full* blocks of `token_ids`, which start at `position` after `parent` (None: the root)."""
    packed = pack_tokens(token_ids)
    step = block_size * TOKEN_BYTES
    previous = root if parent is None else parent
    count, no_extra = struct.pack("<I", block_size), struct.pack("<I", 0)
    names: list[BlockName] = []
    append, new = names.append, tuple.__new__  # new: half of what the class's own constructor takes
    for start in range(0, len(packed) - step + 1, step):
        tokens = packed[start : start + step]
        if hash_ is _sha256:
            key = _sha256_key(previous, count, tokens, no_extra)
        else:
            key = hash_(b"".join((_KEY_START, previous, count, tokens, no_extra)))
        append(new(BlockName, (key, previous, root, position, tokens)))
        position += block_size
        previous = key
    return names
