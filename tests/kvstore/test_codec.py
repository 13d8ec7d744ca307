"""What is encoded comes back to the byte, in every tier, whoever reads it; what no block is encoded as is refused."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pagetier.kvstore.block import BlockStatus
from pagetier.kvstore.codec import NONE, NUM_PLANES, PLANES_ZSTD, Coding, decode, encode
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.record import CHECK_XXH3, PAGE_BYTES, RecordStatus, pack_header, parse_header, unpack
from pagetier.kvstore.redis.tier import RedisTier
from pagetier.kvstore.tier import BlockRead, BlockWrite, Tier
from tests.kvstore.tier_contract import DOMAIN, PART, chain, soon
from tests.kvstore.valkey import Valkey, valkey, valkey_server  # noqa: F401

NBYTES = 16384


def numbers(seed: int, dtype: str = "float32", nbytes: int = NBYTES) -> bytes:
    """Such as KV has: normal, so that exponents are few. bfloat16 is the upper half of float32."""
    floats = np.random.default_rng(seed).standard_normal(nbytes // (4 if dtype == "float32" else 2), np.float32)
    return floats.tobytes() if dtype == "float32" else (floats.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def decoded(stored: bytes, nbytes: int = NBYTES) -> bytes | None:
    destination = bytearray(nbytes)
    return bytes(destination) if decode(memoryview(stored), memoryview(destination), PLANES_ZSTD) else None


@pytest.mark.parametrize(("dtype", "share"), [("float32", 0.90), ("bfloat16", 0.75)])
def test_numbers_get_smaller_and_come_back(dtype: str, share: float) -> None:
    raw = numbers(1, dtype, 1 << 18)
    encoded = encode(memoryview(raw), PLANES_ZSTD)
    assert encoded is not None and len(encoded) < share * len(raw)
    assert decoded(bytes(encoded), len(raw)) == raw


@given(st.binary(max_size=200), st.integers(0, 40), st.integers(0, 3))
def test_whatever_gets_smaller_comes_back(piece: bytes, times: int, rest: int) -> None:
    raw = piece * times + bytes(range(rest))
    encoded = encode(memoryview(raw), PLANES_ZSTD)
    if encoded is not None:
        assert len(encoded) < len(raw) and decoded(bytes(encoded), len(raw)) == raw


def test_it_is_decoded_in_place() -> None:
    """A tier receives it into the destination itself."""
    raw = numbers(2)
    encoded, destination = encode(memoryview(raw), PLANES_ZSTD), bytearray(NBYTES)
    assert encoded is not None
    destination[: len(encoded)] = encoded
    assert decode(memoryview(destination)[: len(encoded)], memoryview(destination), PLANES_ZSTD)
    assert destination == raw


def test_noise_is_stored_as_it_is() -> None:
    assert encode(memoryview(random.Random(3).randbytes(NBYTES)), PLANES_ZSTD) is None
    assert encode(memoryview(bytes(NBYTES)), NONE) is None


def lengths(*counts: int) -> bytes:
    return b"".join(count.to_bytes(4, "little") for count in counts)


def frame(data: bytes, window_log: int | None = None) -> bytes:
    if window_log is None:
        return zstandard.ZstdCompressor(level=1, write_content_size=False).compress(data)
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=window_log, write_content_size=0)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(data) + compressor.flush()


def of_frame(packed: bytes, nbytes: int = NBYTES) -> bytes:
    """An encoding whose first plane is `packed`, the others raw."""
    size = nbytes // NUM_PLANES
    return lengths(len(packed), size, size, size) + packed + bytes(3 * size)


SIZE = NBYTES // NUM_PLANES
HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "lengths only": lambda: lengths(0, 0, 0, 0),
    "lengths beyond the end": lambda: lengths(2**32 - 1, SIZE, SIZE, SIZE) + bytes(NBYTES - 1),
    "a plane too long": lambda: lengths(SIZE + 1, SIZE, SIZE, SIZE) + bytes(NBYTES + 1),
    "no frame": lambda: of_frame(b"\xff" * 100),
    "an empty frame": lambda: of_frame(frame(b"")),
    "a frame one byte short": lambda: of_frame(frame(bytes(SIZE - 1))),
    "a frame one byte long": lambda: of_frame(frame(bytes(SIZE + 1))),
    "a frame of a gigabyte": lambda: of_frame(frame(bytes(1 << 30))[: SIZE - 1]),
    "a frame with a window of 128 MiB": lambda: of_frame(frame(bytes(SIZE), window_log=27)),
    "a frame cut short": lambda: of_frame(frame(bytes(SIZE))[:-1]),
}


@pytest.mark.parametrize("case", [case for case in HOSTILE if "gigabyte" not in case])
def test_what_is_no_encoding_of_a_block_is_refused(case: str) -> None:
    stored = HOSTILE[case]()
    tracemalloc.start()
    try:
        assert decoded(stored) is None
        assert tracemalloc.get_traced_memory()[1] < 4 * NBYTES + (1 << 20)
    finally:
        tracemalloc.stop()


def test_a_frame_that_never_ends_is_read_no_further_than_its_plane() -> None:
    bomb = frame(bytes(64 << 20))
    assert len(bomb) < SIZE and decoded(of_frame(bomb)) is None


@pytest.mark.parametrize("seed", range(4))
def test_damage_is_refused_or_decodes_and_never_raises(seed: int) -> None:
    rng, encoded = random.Random(seed), encode(memoryview(numbers(seed)), PLANES_ZSTD)
    assert encoded is not None
    for _ in range(500):
        spoilt = bytearray(encoded)
        for _ in range(rng.randrange(1, 4)):
            spoilt[rng.randrange(len(spoilt) if rng.random() < 0.7 else 16)] ^= rng.randrange(1, 256)
        decoded(bytes(spoilt[: rng.randrange(len(spoilt)) if rng.random() < 0.2 else len(spoilt)]))


def test_a_record_is_decoded_only_when_it_is_verified_and_as_long_as_it_says() -> None:
    (name,), raw = chain(1), numbers(5)
    encoded = encode(memoryview(raw), PLANES_ZSTD)
    assert encoded is not None

    def status(stored: bytes, header: bytes, nbytes: int = NBYTES) -> RecordStatus:
        destination = bytearray(nbytes)
        destination[: len(stored)] = stored
        view = memoryview(destination)
        return unpack(header, view[: len(stored)], view, DOMAIN, name, PART)

    def header(stored: bytes, codec: int = PLANES_ZSTD, nbytes: int = NBYTES) -> bytes:
        return pack_header(DOMAIN, name, PART, stored, Coding(codec, nbytes))

    good = bytes(encoded)
    assert status(good, header(good)) is RecordStatus.OK
    assert status(good[:-1] + b"?", header(good)) is RecordStatus.CHECKSUM
    assert status(good, header(good), NBYTES + 4) is RecordStatus.MISMATCH, "a block of another size"
    assert status(good, header(good, codec=7)) is RecordStatus.UNDECODABLE
    assert status(good, header(good, codec=NONE)) is RecordStatus.MISMATCH
    assert status(HOSTILE["no frame"](), header(HOSTILE["no frame"]())) is RecordStatus.UNDECODABLE
    assert status(good, b"") is RecordStatus.GARBAGE
    parsed = parse_header(header(good))
    assert parsed is not None and (parsed.coding, parsed.check) == (Coding(PLANES_ZSTD, NBYTES), CHECK_XXH3)


@pytest.fixture(params=["nvme", "nvme direct", "redis"])
def opened(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    valkey: Valkey,  # noqa: F811
) -> Iterator[Callable[[int], Tier]]:
    """Opens the same medium with a codec; each one is closed before the next."""
    tiers: list[Tier] = []

    def make(codec: int) -> Tier:
        for tier in tiers:
            tier.close()
        if request.param == "redis":
            tiers.append(RedisTier(valkey.url, DOMAIN, codec=codec))
        else:
            io = "auto" if "direct" in request.param else "buffered"
            tiers.append(NvmeTier(tmp_path / "nvme", 8 << 20, DOMAIN, io=io, refresh_s=0, codec=codec))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


def test_tiers_store_less_and_read_what_any_codec_made(opened: Callable[[int], Tier]) -> None:
    names = chain(6)
    raw = [numbers(seed, "bfloat16") if seed % 3 else random.Random(seed).randbytes(NBYTES) for seed in range(6)]
    writes = [BlockWrite(name, PART, memoryview(data)) for name, data in zip(names, raw, strict=True)]
    tier = opened(PLANES_ZSTD)
    assert tier.put(writes[:4], soon()) == [BlockStatus.OK] * 4
    assert tier.counters().bytes_written <= 4 * (NBYTES + PAGE_BYTES) - 2 * PAGE_BYTES
    assert tier.put(writes[:4], soon()) == [BlockStatus.EXISTS] * 4
    tier = opened(NONE)
    assert tier.put(writes[4:], soon()) == [BlockStatus.OK] * 2
    for codec in (NONE, PLANES_ZSTD):
        tier = opened(codec)
        buffers = [memoryview(bytearray(NBYTES)) for _ in names]
        reads = [BlockRead(name, PART, buffer) for name, buffer in zip(names, buffers, strict=True)]
        assert tier.get(reads, soon()) == [BlockStatus.OK] * 6
        assert [bytes(buffer) for buffer in buffers] == raw
        assert tier.counters().corrupt == 0
        tier.check()


def test_a_block_of_another_size_is_corrupt_whatever_was_stored(opened: Callable[[int], Tier]) -> None:
    (name,), raw = chain(1), numbers(1)
    for nbytes in (NBYTES // 2, 2 * NBYTES):
        tier = opened(PLANES_ZSTD)
        assert tier.put([BlockWrite(name, PART, memoryview(raw))], soon()) == [BlockStatus.OK]
        read = BlockRead(name, PART, memoryview(bytearray(nbytes)))
        assert tier.get([read], soon()) == [BlockStatus.CORRUPT]
        assert tier.counters().corrupt == 1
        assert tier.get([read], soon()) == [BlockStatus.MISS]
