"""Rows for the core's `pt_sample`: what its tests and the sanitizers' run call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pagetier.engine.sampling_params import SamplingParams
from pagetier.kernels.cpu.library import SAMPLE_BLOCK, SAMPLE_ROW, Isa, Library, aligned_bytes


def rows_of(logits: np.ndarray, params: Sequence[SamplingParams], numbers: Sequence[float]) -> np.ndarray:
    """(num_rows,) SAMPLE_ROW, without log-probabilities. logits: (num_rows, vocab_size), which must outlive them."""
    assert logits.dtype == np.float32 and logits.flags.c_contiguous
    rows = np.zeros(len(logits), SAMPLE_ROW)
    rows["logits"] = [row.ctypes.data for row in logits]
    rows["number"] = numbers
    for name in ("temperature", "min_p", "top_p", "top_k"):
        rows[name] = [getattr(one, name) for one in params]
    return rows


def tell(rows: np.ndarray, raw: np.ndarray, num_top: int) -> tuple[np.ndarray, np.ndarray]:
    """Ask for log-probabilities: (num_rows, num_top) where ids and values will be."""
    ids, values = np.zeros((len(rows), num_top), np.int32), np.zeros((len(rows), num_top), np.float32)
    rows["raw"], rows["num_top"] = [row.ctypes.data for row in raw], num_top
    rows["top_ids"] = [row.ctypes.data for row in ids]
    rows["top_logprobs"] = [row.ctypes.data for row in values]
    return ids, values


def peaks_of(logits: np.ndarray) -> np.ndarray:
    """(num_rows, blocks) the greatest of each block of logits (num_rows, vocab_size), NaN where there is one."""
    starts = np.arange(0, logits.shape[1], SAMPLE_BLOCK)
    peaks: np.ndarray = np.maximum.reduceat(logits, starts, axis=1)
    return peaks


def choose(core: Library, isa: Isa, rows: np.ndarray, vocab_size: int, num_threads: int = 1) -> list[int]:
    """The chosen tokens; the other answers lie in `rows`. Raises ValueError."""
    threads = core.create_threads(num_threads)
    try:
        scratch = aligned_bytes(core.sample_scratch_bytes(vocab_size, threads))
        core.sample(isa, rows, vocab_size, threads, scratch)
    finally:
        core.destroy_threads(threads)
    tokens: list[int] = rows["token"].tolist()
    return tokens


def random_logits(rng: np.random.Generator, num_rows: int, vocab_size: int) -> np.ndarray:
    """(num_rows, vocab_size) float32 of all sorts: flat and steep, with ties, -inf, and now and then all equal."""
    logits = rng.standard_normal((num_rows, vocab_size)) * rng.choice([1e-3, 0.3, 3.0, 30.0])
    kind = rng.integers(5)
    if kind == 1:
        logits = logits.round()
    elif kind == 2:
        logits[rng.random(logits.shape) < rng.choice([0.1, 0.9])] = -np.inf
    elif kind == 3:
        logits[:] = rng.choice([-7.0, 0.0, -0.0, 3e38])
    elif kind == 4:
        logits[:, rng.integers(vocab_size)] += rng.choice([10.0, 1e5])
    drawn: np.ndarray = logits.astype(np.float32)
    return drawn


def random_params(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    """Any filters together, at their ends and between."""
    fields: dict[str, Any] = {
        "temperature": float(rng.choice([0.0, 1e-30, 1e-3, 0.3, 1.0, 3.0, 100.0])),
        "top_k": int(rng.choice([-1, 0, 1, 2, 40, vocab_size - 1, vocab_size, 1 << 30])),
        "top_p": float(rng.choice([1e-12, 0.1, 0.5, 0.95, 1 - 1e-16, 1.0])),
        "min_p": float(rng.choice([0.0, 0.0, 1e-30, 0.01, 0.5, 1.0])),
    }
    return SamplingParams(**fields)
