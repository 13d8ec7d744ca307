"""Random numbers by name: (seed, choice, position) -> uniform, so that a token depends on its own request alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

# Philox4x32-10's multipliers and key increments: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_INCREMENTS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox(counter: tuple[U64, U64, U64, U64], key: tuple[U64, U64]) -> tuple[U64, U64, U64, U64]:
    """Philox4x32-10. Every argument and result is an array of 32-bit words held in uint64, all of one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (second >> _32) ^ c1 ^ k0, second & _LOW, (first >> _32) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _INCREMENTS[0]) & _LOW, (k1 + _INCREMENTS[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(names: Sequence[tuple[int, int, int]]) -> npt.NDArray[np.float64]:
    """One number in [0, 1), a multiple of 2^-52, per (seed, choice, position). The seed counts modulo 2^64."""
    seeds = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF for seed, _, _ in names], dtype=np.uint64)
    choices = np.array([choice for _, choice, _ in names], dtype=np.uint64)
    positions = np.array([position for _, _, position in names], dtype=np.uint64)
    zero = np.zeros_like(seeds)
    high, low, _, _ = philox((positions, choices, zero, zero), (seeds & _LOW, seeds >> _32))
    bits = (high << np.uint64(20)) | (low >> np.uint64(12))  # 52 of them
    return bits.astype(np.float64) * 2.0**-52
