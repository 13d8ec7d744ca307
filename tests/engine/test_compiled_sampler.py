"""The compiled core's sampler chooses as engine/sampler.py does, whatever a request asks for."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetier.engine.batch import SampleRow
from pagetier.engine.compiled_sampler import CompiledSampler, LogitPeaks
from pagetier.engine.sampler import sample
from pagetier.engine.sampling_params import SamplingParams
from tests.kernels.cpu.sample_calls import peaks_of
from tests.kernels.cpu.tiny_models import library

VOCAB = 150
PREVIOUS = np.array([3, 77, 149], np.int64)


@contextmanager
def compiled_sampler(peaks: LogitPeaks | None = None) -> Iterator[CompiledSampler]:
    threads = library().create_threads(2)
    try:
        yield CompiledSampler(library(), library().best_isa(), threads, VOCAB, peaks)
    finally:
        library().destroy_threads(threads)


@st.composite
def sample_rows(draw: st.DrawFn) -> SampleRow:
    bias = st.tuples(st.integers(-1, VOCAB), st.sampled_from([-100.0, 0.5, 100.0]))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0, 5.0])),
        top_k=draw(st.sampled_from([0, 1, 20])),
        top_p=draw(st.sampled_from([0.3, 0.95, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, -0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        min_tokens=draw(st.sampled_from([0, 5])),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB + 5), max_size=3))),
        logprobs=draw(st.sampled_from([None, None, 0, 4])),
        logit_bias=tuple(draw(st.lists(bias, max_size=2))),
    )
    ids = st.lists(st.integers(0, VOCAB - 1), max_size=6)
    return SampleRow(
        params,
        seed=draw(st.integers(-(2**63), 2**64 - 1)),
        choice=draw(st.integers(0, 127)),
        position=draw(st.integers(1, 1 << 20)),
        num_output=draw(st.integers(0, 9)),
        eos_token_ids=(2,),
        prompt_ids=tuple(draw(ids)) if params.has_penalties else (),
        output_ids=tuple(draw(ids)) if params.has_penalties else (),
        pending=draw(st.integers(-1, len(PREVIOUS) - 1)),
        is_plain=params.is_plain and draw(st.booleans()),
    )


def known_peaks(logits: torch.Tensor) -> LogitPeaks:
    """As a step leaves them."""
    peaks, values = LogitPeaks(6, VOCAB), peaks_of(logits.numpy())  # (num_rows, blocks)
    ctypes.memmove(peaks.address, values.ctypes.data, values.nbytes)
    peaks.are_of(logits)
    return peaks


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(sample_rows(), max_size=6), seed=st.integers(0, 1 << 32), known=st.sampled_from(["", "own", "others"])
)
def test_it_chooses_and_tells_as_the_reference_does(rows: list[SampleRow], seed: int, known: str) -> None:
    """With the peaks of these logits at hand, or with those of other ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), VOCAB, generator=generator) * 3  # (num_rows, VOCAB)
    before = logits.clone()
    other = torch.zeros(len(rows), VOCAB)
    peaks = known_peaks(other if known == "others" else logits) if known else None
    with compiled_sampler(peaks) as core:
        tokens, logprobs = core(logits, rows, PREVIOUS)
    expected_tokens, expected = sample(logits, rows, PREVIOUS)
    assert tokens.dtype == np.int64
    assert tokens.tolist() == expected_tokens.tolist()
    assert torch.equal(logits, before)
    for ours, theirs in zip(logprobs, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.rank == theirs.rank
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
            assert [value for _, value in ours.top] == pytest.approx([value for _, value in theirs.top], abs=1e-5)


def test_a_row_that_waits_for_a_token_of_a_batch_without_any_is_refused() -> None:
    waiting = SampleRow(SamplingParams(presence_penalty=1.0), 0, 0, 5, 1, (), (1,), (2,), pending=0)
    with compiled_sampler() as core, pytest.raises(RuntimeError, match="previous"):
        core(torch.zeros(1, VOCAB), [waiting], None)
