from __future__ import annotations

import numpy as np
import pytest

from pagetier.engine.random_stream import philox, uniforms

# the known-answer vectors of Random123 (kat_vectors, philox4x32 10): counter, key, result
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (np.array([word], np.uint64) for word in counter)
    k0, k1 = (np.array([word], np.uint64) for word in key)
    assert tuple(int(word[0]) for word in philox((c0, c1, c2, c3), (k0, k1))) == expected


def test_a_number_depends_on_its_name_alone() -> None:
    names = [(seed, choice, position) for seed in (-1, 0, 7, 1 << 63) for choice in (0, 1) for position in (0, 5)]
    together = uniforms(names)
    assert [uniforms([name])[0] for name in names] == together.tolist()
    assert len(set(together.tolist())) == len(names)
    assert uniforms([(-1, 0, 0)])[0] == uniforms([((1 << 64) - 1, 0, 0)])[0]


def test_numbers_are_uniform_along_positions_and_seeds() -> None:
    for names in ([(3, 0, i) for i in range(20_000)], [(i, 0, 3) for i in range(20_000)]):
        numbers = uniforms(names)
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
        chi2 = float(((counts - 1000) ** 2 / 1000).sum())
        assert chi2 < 50  # 19 degrees of freedom: p < 1e-4 beyond
