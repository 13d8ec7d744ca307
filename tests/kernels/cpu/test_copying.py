"""The core's copies: the bytes, nothing beside them, and xxHash's own digest, at every level."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetier.kernels.cpu.copying import StreamingCopier
from pagetier.kernels.cpu.library import Isa
from pagetier.kvstore.copier import Copier, PlainCopier
from pagetier.kvstore.host import HostTier
from pagetier.kvstore.tier import Tier
from tests.kernels.cpu.tiny_models import levels, library_of
from tests.kvstore.tier_contract import CAPACITY_BLOCKS, PAYLOAD_BYTES, TierContract

GUARD = 0xA5
SIZES = (0, 1, 64, 240, 241, 256, 1024, 1025, 1088, 1089, 65_535, 65_536, 65_537, 66_560, 200_000)


def copier_of(level: Isa | None) -> Copier:
    return PlainCopier() if level is None else StreamingCopier(library_of(level), level)


every_copier = pytest.mark.parametrize(
    "level", [None, Isa.NONE, *levels()], ids=lambda level: "plain" if level is None else level.name.lower()
)


@every_copier
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.one_of(st.sampled_from(SIZES), st.integers(0, 70_000)), max_size=5),
    seed=st.integers(0, 1 << 32),
    shift=st.integers(0, 70),
)
def test_copies_are_exact_and_have_the_digest_of_xxhash(
    level: Isa | None, sizes: list[int], seed: int, shift: int
) -> None:
    """Places at every distance from a multiple of 64."""
    rng = np.random.default_rng(seed)
    sources = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    memory = [np.full(size + 192, GUARD, np.uint8) for size in sizes]
    starts = [-one.ctypes.data % 64 + shift for one in memory]
    places = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    copies = [
        (memoryview(source.tobytes()) if seed % 2 else source.data, one[place].data)
        for source, one, place in zip(sources, memory, places, strict=True)
    ]
    digests = copier_of(level).copy(copies)
    assert digests == [xxhash.xxh3_128_digest(source.data) for source in sources]
    for source, one, place in zip(sources, memory, places, strict=True):
        assert np.array_equal(one[place], source)
        one[place] = GUARD
        assert (one == GUARD).all(), "bytes beside the destination were written"


@every_copier
def test_places_of_different_lengths_are_refused_before_anything_is_copied(level: Isa | None) -> None:
    first, second = bytearray(1000), bytearray(999)
    source = memoryview(bytes([1]) * 1000)
    with pytest.raises(ValueError, match="length|shape"):
        copier_of(level).copy([(source, memoryview(second)), (source, memoryview(first))])
    assert not any(first) and not any(second)


@every_copier
def test_a_copy_does_not_read_past_the_end_of_its_memory(level: Isa | None) -> None:
    """The last page of a mapping, in front of nothing that may be read."""
    with mmap.mmap(-1, 64 * mmap.PAGESIZE) as source, mmap.mmap(-1, 64 * mmap.PAGESIZE) as destination:
        source[:] = bytes(range(256)) * (len(source) // 256)
        with memoryview(source) as one, memoryview(destination) as other:
            copier_of(level).copy([(one[-1000:], other[-1000:]), (one, other)])
            assert one == other


class TestHostTierOverTheCore(TierContract):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        copier = StreamingCopier(library_of(levels()[-1]))
        tier = HostTier(CAPACITY_BLOCKS * PAYLOAD_BYTES, slab_bytes=16 * PAYLOAD_BYTES, copier=copier)
        yield tier
        tier.close()
