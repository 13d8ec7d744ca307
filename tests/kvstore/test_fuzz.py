"""No damage to a record is ever loaded, and each is counted: every byte flipped, every truncation, ten thousand random
corruptions, on records of 4 KiB in NVMe and in Redis.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import pytest

from pagetier.kvstore.block import BlockName, BlockStatus
from pagetier.kvstore.codec import NONE, PLANES_ZSTD
from pagetier.kvstore.nvme.segment import LIVE
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.record import PAGE_BYTES, address_bytes, header_bytes, redis_name
from pagetier.kvstore.redis.tier import RedisTier
from pagetier.kvstore.tier import BlockRead, BlockWrite, Tier
from tests.kvstore.tier_contract import DOMAIN, PART, addresses, chain, payload_of, soon
from tests.kvstore.valkey import Valkey, own_valkey

PAYLOAD = 4096
BATCH = 64  # records that are damaged and read together
NUM_RANDOM = 10_000
NAMES = chain(BATCH, seed=3)
PAYLOADS = [payload_of(name, nbytes=PAYLOAD) for name in NAMES]
QUARTER = bytes(PAYLOAD // 4)
EASY = [b"".join(map(bytes, zip(data[::4], data[1::4], data[2::4], QUARTER, strict=True))) for data in PAYLOADS]

pytestmark = pytest.mark.filterwarnings("error")


class Medium(Protocol):
    """A tier, and the raw bytes of its records."""

    @property
    def tier(self) -> Tier: ...

    @property
    def payloads(self) -> list[bytes]:
        """Of NAMES; with a codec, such as it makes smaller, all to the same length."""

    def load(self) -> list[bytes]:
        """The raw records of NAMES, all of which are stored."""

    def spoil(self, raw: list[bytes]) -> None:
        """Put these in their places, behind the tier's back."""


class OnDisk:
    """Records in a segment."""

    def __init__(self, path: Path, codec: int = NONE) -> None:
        self.payloads = EASY if codec else PAYLOADS
        self.tier = NvmeTier(
            path, 8 << 20, DOMAIN, io="buffered", fsync="none", segment_bytes=1 << 20, refresh_s=0, codec=codec
        )

    def places(self) -> list[tuple[Path, int, int]]:
        """File, offset and bytes of each record without padding."""
        found = []
        for place in self.tier._index.find([address_bytes(address) for address in addresses(NAMES)]):
            assert place is not None
            segment = self.tier._catalog.get(place.segment)
            assert segment is not None
            found.append((segment.path, place.offset, PAGE_BYTES + place.payload_bytes))
        return found

    def load(self) -> list[bytes]:
        raw = []
        for path, offset, nbytes in self.places():
            with path.open("rb") as file:
                raw.append(os.pread(file.fileno(), nbytes, offset))
        return raw

    def spoil(self, raw: list[bytes]) -> None:
        for data, (path, offset, _) in zip(raw, self.places(), strict=True):
            with path.open("r+b", buffering=0) as file:
                os.pwrite(file.fileno(), data, offset)


class InRedis:
    """Records as values."""

    def __init__(self, server: Valkey, codec: int = NONE) -> None:
        self.payloads = EASY if codec else PAYLOADS
        self.tier = RedisTier(server.url, DOMAIN, codec=codec)
        self.client = server.client()
        self.names = [redis_name(DOMAIN, address) for address in addresses(NAMES)]

    def load(self) -> list[bytes]:
        values: list[Any] = self.client.mget(self.names)
        return values

    def spoil(self, raw: list[bytes]) -> None:
        self.client.mset(dict(zip(self.names, raw, strict=True)))


@pytest.fixture(scope="module")
def server() -> Iterator[Valkey]:
    with own_valkey() as server:
        yield server


@pytest.fixture(params=["nvme", "redis", "nvme encoded", "redis encoded"])
def medium(request: pytest.FixtureRequest, tmp_path: Path, server: Valkey) -> Iterator[Medium]:
    name, _, encoded = request.param.partition(" ")
    codec = PLANES_ZSTD if encoded else NONE
    server.client().flushall()
    medium = OnDisk(tmp_path / "nvme", codec) if name == "nvme" else InRedis(server, codec)
    store(medium)
    in_front = PAGE_BYTES if name == "nvme" else header_bytes(NAMES[0].num_tokens)
    (nbytes,) = {len(record) - in_front for record in medium.load()}
    assert (nbytes < PAYLOAD) is bool(encoded)
    yield medium
    medium.tier.check()
    medium.tier.close()


def store(medium: Medium) -> None:
    """All of NAMES are there afterwards; those quarantined meanwhile are written anew."""
    writes = [BlockWrite(name, PART, memoryview(data)) for name, data in zip(NAMES, medium.payloads, strict=True)]
    assert set(medium.tier.put(writes, soon())) <= {BlockStatus.OK, BlockStatus.EXISTS}


def read(tier: Tier, names: list[BlockName]) -> tuple[list[BlockStatus], list[bytearray]]:
    buffers = [bytearray(PAYLOAD) for _ in names]
    reads = [BlockRead(name, PART, memoryview(buffer)) for name, buffer in zip(names, buffers, strict=True)]
    return tier.get(reads, soon()), buffers


def spoil_and_read(medium: Medium, damaged: list[tuple[str, bytes]]) -> None:
    """Write damaged records, the first for the first name and so on, and read all: only what is sound loads."""
    store(medium)
    sound = medium.load()
    spoilt = [data for _, data in damaged] + sound[len(damaged) :]
    medium.spoil(spoilt)
    before = medium.tier.counters().corrupt
    statuses, buffers = read(medium.tier, NAMES)
    for i, (status, buffer) in enumerate(zip(statuses, buffers, strict=True)):
        label = damaged[i][0] if i < len(damaged) else "sound"
        if spoilt[i] == sound[i]:
            assert status is BlockStatus.OK and bytes(buffer) == medium.payloads[i], f"record {i} is sound: {status}"
        else:
            assert status is BlockStatus.CORRUPT, f"record {i}, {label}: {status}"
    num_damaged = sum(a != b for a, b in zip(spoilt, sound, strict=True))
    assert medium.tier.counters().corrupt - before == num_damaged, "each is counted, once"
    again = read(medium.tier, NAMES[: len(damaged)])[0]
    assert set(again) <= {BlockStatus.MISS, BlockStatus.OK}, "what was found damaged is gone"


def batches(cases: Iterator[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    while batch := list(islice(cases, BATCH)):
        yield batch


def of_each(raw: list[bytes], count: int) -> Iterator[tuple[int, bytes]]:
    """Numbers 0 to count, each with the record that its turn in the batch will spoil."""
    for number in range(count):
        yield number, raw[number % BATCH]


def test_every_flipped_byte(medium: Medium) -> None:
    store(medium)
    raw = medium.load()

    def flipped() -> Iterator[tuple[str, bytes]]:
        for at, data in of_each(raw, len(raw[0])):
            yield f"byte {at}", data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]

    for batch in batches(flipped()):
        spoil_and_read(medium, batch)


def mutated(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """Some bytes made others: scattered, a run of zeros or ones, noise, moved bytes, or a piece of another record."""
    spoilt, start = bytearray(data), rng.randrange(len(data))
    end = rng.randrange(start, len(data)) + 1
    match rng.randrange(6):
        case 0:
            for _ in range(rng.randrange(2, 64)):
                spoilt[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        case 1:
            spoilt[start:end] = bytes(end - start)
        case 2:
            spoilt[start:end] = b"\xff" * (end - start)
        case 3:
            spoilt[start:end] = rng.randbytes(end - start)
        case 4:
            spoilt[start:end] = data[start:end][::-1]
        case _:
            spoilt[start:end] = rng.choice(others)[start:end]
    return bytes(spoilt)


@pytest.mark.parametrize("seed", [1])
def test_ten_thousand_random_corruptions(medium: Medium, seed: int) -> None:
    """Some leave a record as it was, such as zeros over padding: then it loads."""
    rng = random.Random(seed)
    store(medium)
    raw = medium.load()
    cases = ((f"seed {seed}, case {i}", mutated(data, raw, rng)) for i, data in of_each(raw, NUM_RANDOM))
    for batch in batches(cases):
        spoil_and_read(medium, batch)


def test_every_length_of_a_value_in_redis(server: Valkey) -> None:
    """Cut, or longer by some."""
    medium = InRedis(server)
    store(medium)
    raw = medium.load()
    assert len(raw[0]) == header_bytes(NAMES[0].num_tokens) + PAYLOAD

    def cut() -> Iterator[tuple[str, bytes]]:
        for length, data in of_each(raw, len(raw[0]) + 40):
            yield f"{length} bytes", data[:length] if length < len(data) else data + bytes(length - len(data) + 1)

    for batch in batches(cut()):
        spoil_and_read(medium, batch)
    medium.tier.check()
    medium.tier.close()


def test_every_length_of_a_file_that_ends_in_a_record(tmp_path: Path) -> None:
    """The tier that has it open finds it cut short: damage, since an evicted segment is empty or gone."""
    medium = OnDisk(tmp_path / "nvme")
    with medium.tier as tier:
        store(medium)
        name, (path, offset, _) = NAMES[-1], medium.places()[-1]
        (whole,) = medium.load()[-1:]
        (address,), parent = [address_bytes(a) for a in addresses([name])], address_bytes(addresses(NAMES)[-2])
        (place,) = tier._index.find([address])
        assert place is not None and place.end == offset + len(whole)
        segment = tier._catalog.get(place.segment)
        assert segment is not None
        with path.open("r+b", buffering=0) as file:
            for kept in range(len(whole)):
                os.ftruncate(file.fileno(), offset + kept)
                (status,), _ = read(tier, [name])
                assert status is BlockStatus.CORRUPT, f"{kept} bytes of the record: {status}"
                os.pwrite(file.fileno(), whole[kept:], offset + kept)
                tier._catalog.mark(segment, [place.page], LIVE)
                tier._index.add(address, parent, place)
            assert read(tier, [name])[0] == [BlockStatus.OK]
            assert tier.counters().corrupt == len(whole)
            os.ftruncate(file.fileno(), 0)
            assert read(tier, NAMES)[0] == [BlockStatus.MISS] * BATCH, "evicted by another process"
            assert tier.counters().corrupt == len(whole)
