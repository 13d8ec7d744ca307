"""The core's sampling against engine/sampler.py, its reference: the same token for the same number, at every level."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetier.engine import sampler
from pagetier.engine.random_stream import uniforms
from pagetier.engine.sampling_params import SamplingParams
from pagetier.kernels.cpu.library import Isa
from tests.kernels.cpu.sample_calls import choose, peaks_of, random_logits, random_params, rows_of, tell
from tests.kernels.cpu.tiny_models import every_level, library, library_of

NUM_ROWS = 5
VOCABULARIES = (1, 2, 17, 63, 64, 65, 127, 1000, 4161, 9000)
LAST = 1 - 2**-52  # the greatest number


def reference(logits: np.ndarray, params: SamplingParams, number: float) -> int:
    """logits: (vocab_size,)."""
    if params.greedy:
        return int(logits.argmax())
    return sampler._draw(torch.from_numpy(logits), params, number)


@every_level
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32), vocab_size=st.sampled_from(VOCABULARIES))
def test_a_number_draws_the_token_that_the_reference_draws(isa: Isa, seed: int, vocab_size: int) -> None:
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, NUM_ROWS, vocab_size)
    params = [random_params(rng, vocab_size) for _ in range(NUM_ROWS)]
    numbers = rng.choice([0.0, *rng.random(3).tolist(), LAST], NUM_ROWS).tolist()
    rows, expected = (
        rows_of(logits, params, numbers),
        [reference(*row) for row in zip(logits, params, numbers, strict=True)],
    )
    assert choose(library_of(isa), isa, rows, vocab_size) == expected, params
    peaks = peaks_of(logits)
    rows["peaks"] = [row.ctypes.data for row in peaks]
    assert choose(library_of(isa), isa, rows, vocab_size) == expected, params
    np.testing.assert_array_equal(peaks, peaks_of(logits))


@every_level
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_of_a_real_vocabulary_draws_the_same_in_any_company(isa: Isa, num_threads: int) -> None:
    """Long enough for the workers to share the rows; each alone, and all by the reference."""
    vocab_size, num_rows = 49_152, 24
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((num_rows, vocab_size)) * 2.5).astype(np.float32)
    kinds = [{}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.95}, {"top_k": 3000}, {"min_p": 0.02}, {"top_p": 1 - 1e-12}]
    params = [SamplingParams(temperature=0.5 + i % 4, **kinds[i % 6]) for i in range(num_rows)]  # type: ignore[arg-type]
    numbers = rng.random(num_rows).tolist()
    tokens = choose(library_of(isa), isa, rows_of(logits, params, numbers), vocab_size, num_threads)
    assert tokens == [reference(*row) for row in zip(logits, params, numbers, strict=True)]
    for i in range(num_rows):
        alone = rows_of(logits[i : i + 1], params[i : i + 1], numbers[i : i + 1])
        assert choose(library_of(isa), isa, alone, vocab_size) == tokens[i : i + 1]


@every_level
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("places", [[0], [70], [64, 128, 199], [5, 6], range(200)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_give_numpys_argmax_and_leave_others_alone(
    isa: Isa, value: float, places: list[int], temperature: float
) -> None:
    logits = random_logits(np.random.default_rng(1), 2, 200)
    logits[0, places] = value
    if value < 0 and len(places) < 200:
        logits[0] = np.where(np.isin(np.arange(200), places), -1.0, -np.inf)  # -inf but for few
    params = [SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1, top_k=5)] * 2
    rows, peaks = rows_of(logits, params, [0.3, 0.3]), peaks_of(logits)
    tokens = choose(library_of(isa), isa, rows, 200)
    rows["peaks"] = [row.ctypes.data for row in peaks]
    assert choose(library_of(isa), isa, rows, 200) == tokens
    assert tokens == [reference(row, params[0], 0.3) for row in logits]
    if temperature == 0.0 or not value < 0:
        assert tokens[0] == int(logits[0].argmax())


@every_level
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), vocab_size=st.sampled_from(VOCABULARIES))
def test_logprobs_are_those_of_the_raw_row(isa: Isa, seed: int, vocab_size: int) -> None:
    """Ranks and ids exactly, values as far as the reference's float32 goes."""
    rng = np.random.default_rng(seed)
    raw, logits = random_logits(rng, NUM_ROWS, vocab_size), random_logits(rng, NUM_ROWS, vocab_size)
    logits = raw if rng.integers(2) else logits
    num_top = min(vocab_size, int(rng.choice([0, 1, 20])))
    rows = rows_of(logits, [SamplingParams(temperature=1.0)] * NUM_ROWS, [0.5] * NUM_ROWS)
    ids, values = tell(rows, raw, num_top)
    peaks = peaks_of(logits)
    rows["peaks"] = [row.ctypes.data for row in peaks] if rng.integers(2) else 0
    tokens = choose(library_of(isa), isa, rows, vocab_size)
    for i, token in enumerate(tokens):
        if not np.isfinite(raw[i].max()):
            assert math.isnan(rows["logprob"][i]) and np.isnan(values[i]).all()
            continue
        expected = sampler._logprobs(torch.from_numpy(raw[i]), token, num_top)
        assert rows["rank"][i] == expected.rank
        assert ids[i].tolist() == [top for top, _ in expected.top]
        off = 2e-6 * max(1.0, float(np.abs(raw[i][np.isfinite(raw[i])]).max()))
        assert float(rows["logprob"][i]) == pytest.approx(expected.logprob, rel=1e-6, abs=off)
        assert values[i].tolist() == pytest.approx([value for _, value in expected.top], rel=1e-6, abs=off)


def test_numbers_are_those_of_the_reference() -> None:
    rng = np.random.default_rng(2)
    ends = [(0, 0, 0), (-1, 127, 2**31), (2**64 - 1, 1, 2**32 - 1), (1 << 40, 0, 1)]
    names = [*ends, *((int(rng.integers(2**63)), i % 128, int(rng.integers(2**31))) for i in range(200))]
    assert library().uniforms(names).tolist() == uniforms(names).tolist()
    assert library().uniforms([]).tolist() == []


@pytest.mark.parametrize(
    "change",
    [
        {"logits": 0},
        *({"number": value} for value in (-1e-9, 1.0, math.nan)),
        *({"temperature": value} for value in (-1.0, math.inf, math.nan)),
        *({"min_p": value} for value in (-0.1, 1.1, math.nan)),
        *({"top_p": value} for value in (0.0, 1.1, math.nan)),
        *({"num_top": value} for value in (-1, 101, 1)),  # no place for one
        {"num_top": 1, "top_ids": 64, "top_logprobs": 64},  # but nothing to tell it of
    ],
    ids=str,
)
def test_a_row_that_makes_no_sense_is_refused_and_none_is_answered(change: dict[str, float]) -> None:
    logits = random_logits(np.random.default_rng(3), 2, 100)
    rows = rows_of(logits, [SamplingParams()] * 2, [0.5, 0.5])
    rows["token"] = -1
    before = rows.copy()
    for name, value in change.items():
        before[name][1] = rows[name][1] = value
    with pytest.raises(ValueError, match="a row to sample without"):
        choose(library(), library().best_isa(), rows, 100)
    assert rows.tobytes() == before.tobytes()


@pytest.mark.parametrize("vocab_size", [-1, 0, 1 << 20, 1 << 40])
def test_a_vocabulary_whose_weights_do_not_fit_is_refused(vocab_size: int) -> None:
    logits = np.zeros((1, 1), np.float32)
    with pytest.raises(ValueError, match="a vocabulary that is empty or above"):
        choose(library(), library().best_isa(), rows_of(logits, [SamplingParams()], [0.5]), vocab_size)
    assert choose(library(), library().best_isa(), rows_of(logits[:0], [], []), 1) == []


def test_the_most_weights_still_have_a_sum() -> None:
    vocab_size = (1 << 20) - 1
    logits = np.zeros((2, vocab_size), np.float32)
    rows = rows_of(logits, [SamplingParams(), SamplingParams(top_p=0.5)], [LAST, LAST])
    assert choose(library(), library().best_isa(), rows, vocab_size) == [vocab_size - 1] * 2
