"""Lossless codecs of a record's payload (proto/FORMAT.md, "Codecs"). Pure functions over buffers, without the GIL.

Bytes of equal significance lie together, and each of these planes is compressed if that makes it smaller. Of floating
point numbers only the planes with sign and exponent do; mantissas are noise. Four planes serve two-byte types, too:
even and odd elements apart compress as well as together.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import zstandard

from pagetier.kvstore.errors import ConfigError

NONE, PLANES_ZSTD = 0, 1  # ids in records
CODECS = {"none": NONE, "planes-zstd": PLANES_ZSTD}
NUM_PLANES = 4
MAX_WINDOW_BYTES = 8 << 20  # of a frame; more is no payload of ours
LEVEL = 1  # higher ones take longer and gain nothing: measured on KV of SmolLM2 (docs/benchmarks.md)

_LENGTHS = struct.Struct(f"<{NUM_PLANES}I")


def encode(payload: memoryview, codec: int) -> memoryview | None:
    """The payload as `codec` stores it; None when that is not smaller."""
    if codec != PLANES_ZSTD:
        return None
    raw = np.frombuffer(payload, np.uint8)
    size, rest = divmod(len(raw), NUM_PLANES)
    planes = np.ascontiguousarray(raw[: size * NUM_PLANES].reshape(size, NUM_PLANES).T)
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=False)
    pieces: list[bytes | memoryview] = []
    for plane in planes:
        packed = compressor.compress(plane)
        pieces.append(packed if len(packed) < size else plane.data)
    encoded = b"".join([_LENGTHS.pack(*map(len, pieces)), *pieces, raw[len(raw) - rest :].data])
    return memoryview(encoded) if len(encoded) < len(raw) else None


class Coding(NamedTuple):
    """How a payload is stored: by which codec, and its bytes after decoding."""

    codec: int
    raw_bytes: int


def stored_as(payload: memoryview, codec: int) -> tuple[memoryview, Coding | None]:
    """What to store of a payload, and how: itself, unless `codec` makes it smaller."""
    encoded = encode(payload, codec)
    return (payload, None) if encoded is None else (encoded, Coding(codec, payload.nbytes))


def decode(stored: memoryview, destination: memoryview, codec: int) -> bool:
    """Fill `destination`, which may hold `stored` itself, with what was encoded; False when `stored` is nothing that
    `encode` makes of a payload of this size. Takes little more memory than the
    destination's, whatever `stored` claims.
    """
    raw = np.frombuffer(destination, np.uint8)
    size, rest = divmod(len(raw), NUM_PLANES)
    if codec != PLANES_ZSTD or len(stored) < _LENGTHS.size + rest:
        return False
    lengths = _LENGTHS.unpack_from(stored)
    if _LENGTHS.size + sum(lengths) + rest != len(stored):
        return False
    planes, tail = np.empty((NUM_PLANES, size), np.uint8), bytes(stored[len(stored) - rest :]) if rest else b""
    at = _LENGTHS.size
    for plane, length in zip(planes, lengths, strict=True):
        piece = stored[at : at + length]
        at += length
        if length == size:
            plane[:] = np.frombuffer(piece, np.uint8)
        elif length > size or not _inflate(piece, plane.data):
            return False
    raw[: size * NUM_PLANES].reshape(size, NUM_PLANES)[:] = planes.T
    raw[len(raw) - rest :] = np.frombuffer(tail, np.uint8)
    return True


def _inflate(piece: memoryview, plane: memoryview) -> bool:
    """Decompress one frame that fills `plane` exactly."""
    try:
        with zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(piece) as reader:
            return reader.readinto(plane) == len(plane) and not reader.read(1)
    except zstandard.ZstdError:
        return False


def parse_codecs(text: str, tiers: tuple[str, ...], flag: str = "--kv-codec") -> dict[str, int]:
    """Codec ids by tier of "redis=planes-zstd". Raises ConfigError."""
    found: dict[str, int] = {}
    for part in text.split(",") if text.strip() else ():
        tier, _, name = (word.strip() for word in part.partition("="))
        if tier not in tiers or tier in found:
            raise ConfigError.bad_value(flag, text, f"TIER=CODEC of {', '.join(tiers)}, each once")
        if name not in CODECS:
            raise ConfigError.unknown_name(f"{flag} {tier}", name, CODECS)
        found[tier] = CODECS[name]
    return found
