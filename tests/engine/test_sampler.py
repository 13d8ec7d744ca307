"""The sampler against obvious versions, transformers' processors, and its own batch independence."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from pagetier.engine import sampler
from pagetier.engine.batch import SampleRow
from pagetier.engine.sampler import sample
from pagetier.engine.sampling_params import SamplingParams

VOCAB = 50


def row(params: SamplingParams, seed: int = 0, choice: int = 0, position: int = 0, num_output: int = 9) -> SampleRow:
    return SampleRow(params, seed, choice, position, num_output, eos_token_ids=(2,))


def support(logits: Tensor, params: SamplingParams, draws: int = 400) -> set[int]:
    """The tokens drawn at `draws` positions. logits: (vocab_size,)."""
    rows = [row(params, position=i) for i in range(draws)]
    tokens, _ = sample(logits.expand(draws, -1).contiguous(), rows, None)
    return set(tokens.tolist())


def obvious_filter(logits: Tensor, params: SamplingParams) -> set[int]:
    """What min_p, then top_k, then top_p leave, token by token. Logits must differ from each other."""
    probs = torch.softmax(logits.double() / params.temperature, dim=0).tolist()
    kept = [i for i, p in enumerate(probs) if p >= params.min_p * max(probs)]
    kept.sort(key=lambda i: -probs[i])
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total, before, nucleus = sum(probs[i] for i in kept), 0.0, []
    for i in kept:
        if params.top_p < 1.0 and before >= params.top_p * total:
            break
        nucleus.append(i)
        before += probs[i]
    return set(nucleus)


def kept_tokens(logits: Tensor, params: SamplingParams) -> set[int]:
    scaled = (logits - logits.max()) / params.temperature
    return set(torch.nonzero(scaled >= sampler._least_kept(scaled, params)).flatten().tolist())


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, -1, 1, 3, 20, 49, 50, 1000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    candidates=st.sampled_from([1, 5, 1024]),
)
def test_filters_keep_what_the_obvious_ones_keep(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, candidates: int
) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3  # (VOCAB,)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "TOP_P_CANDIDATES", candidates)
        assert kept_tokens(logits, params) == obvious_filter(logits, params)
    assert support(logits, params, 20) <= obvious_filter(logits, params)


def test_draws_follow_the_distribution() -> None:
    """chi-square over 20,000 draws, of the whole distribution and of a filtered one."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2  # (VOCAB,)
    for params in (SamplingParams(temperature=0.8), SamplingParams(temperature=1.3, top_k=12, top_p=0.95)):
        kept = sorted(obvious_filter(logits, params))
        probs = torch.softmax(logits[kept].double() / params.temperature, dim=0).numpy()  # (num_kept,)
        rows = [row(params, seed=5, position=i) for i in range(20_000)]
        tokens, _ = sample(logits.expand(20_000, -1), rows, None)
        counts = np.bincount(tokens, minlength=VOCAB)
        assert counts[kept].sum() == 20_000
        expected = probs * 20_000
        common = expected >= 5
        chi2 = float(((counts[kept] - expected)[common] ** 2 / expected[common]).sum())
        degrees = int(common.sum())
        assert chi2 < degrees + 5 * math.sqrt(2 * degrees)


def test_a_row_draws_the_same_in_any_batch() -> None:
    """Among other rows, in another place, alone: one token per (seed, choice, position). A real vocabulary's size."""
    vocab_size = 49_152
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(24, vocab_size, generator=generator) * 2  # (24, vocab_size)
    kinds = (
        SamplingParams(temperature=0.9),
        SamplingParams(temperature=1.1, top_p=0.9),
        SamplingParams(temperature=0.7, top_k=40, logprobs=3),
        SamplingParams(temperature=1.0, min_p=0.05, frequency_penalty=0.5),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=5.0, top_p=0.99),
    )
    rows = [row(kinds[i % 6], seed=i * 977, choice=i % 3, position=100 + i) for i in range(24)]
    tokens, logprobs = sample(logits, rows, None)
    order = np.random.default_rng(0).permutation(24)
    shuffled, shuffled_logprobs = sample(logits[order], [rows[i] for i in order], None)
    assert shuffled.tolist() == tokens[order].tolist()
    for i in range(24):
        alone, alone_logprobs = sample(logits[i : i + 1], [rows[i]], None)
        assert alone.tolist() == [tokens[i]]
        assert alone_logprobs[0] == logprobs[i] == shuffled_logprobs[order.tolist().index(i)]


def test_seed_choice_and_position_each_change_the_draw() -> None:
    flat = torch.zeros(1, 1000)  # (1, 1000) all equal: every draw is a fresh number
    params = SamplingParams(temperature=1.0)
    drawn = [
        sample(flat, [row(params, seed=s, choice=c, position=p)], None)[0][0]
        for s, c, p in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1 << 40, 0, 0))
    ]
    assert len(set(drawn)) == 5
    assert sample(flat, [row(params)], None)[0][0] == drawn[0]


def test_greedy_takes_the_best_and_leaves_logits_alone() -> None:
    logits = torch.randn(5, VOCAB)  # (5, VOCAB)
    before = logits.clone()
    biased = SamplingParams(temperature=0.0, logit_bias=((7, 100.0), (VOCAB, 5.0), (-3, 5.0)))
    rows = [row(SamplingParams(temperature=0.0))] * 4 + [row(biased)]
    tokens, logprobs = sample(logits, rows, None)
    assert tokens[:4].tolist() == before[:4].argmax(1).tolist()
    assert tokens[4] == 7
    assert logprobs == (None,) * 5
    assert torch.equal(logits, before)
    assert sample(logits, [row(SamplingParams(temperature=1e-30))] * 5, None)[0].tolist() == before.argmax(1).tolist()


def penalised(logits: Tensor, params: SamplingParams, prompt: tuple[int, ...], output: tuple[int, ...]) -> Tensor:
    changed = logits.clone()
    sampler.adjust(changed, SampleRow(params, 0, 0, 0, len(output), (), prompt, output), None)
    return changed


def test_penalties_equal_transformers_and_openai() -> None:
    """Repetition: transformers' processor. Frequency and presence: OpenAI's formula, by hand, output only."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 3  # (VOCAB,)
    prompt, output = (1, 2, 3, 3), (3, 4, 4, 4, 5)
    ours = penalised(logits, SamplingParams(repetition_penalty=1.7), prompt, output)
    processor = RepetitionPenaltyLogitsProcessor(1.7)
    torch.testing.assert_close(ours, processor(torch.tensor([prompt + output]), logits[None].clone())[0])
    ours = penalised(logits, SamplingParams(frequency_penalty=0.5, presence_penalty=-0.25), prompt, output)
    expected = logits.clone()
    for token, count in ((3, 1), (4, 3), (5, 1)):
        expected[token] -= 0.5 * count - 0.25
    torch.testing.assert_close(ours, expected)
    assert torch.equal(penalised(logits, SamplingParams(presence_penalty=1.0), prompt, ()), logits)


def test_a_pending_token_counts_as_output() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    logits = torch.zeros(1, VOCAB)  # (1, VOCAB)
    logits[0, 4] = 3.0
    logits[0, 9] = 1.0
    waiting = SampleRow(params, 0, 0, 0, 1, (), (), (8,), pending=1)
    assert sample(logits, [waiting], np.array([9, 4], np.int64))[0].tolist() == [9]
    assert sample(logits, [waiting], np.array([4, 9], np.int64))[0].tolist() == [4]
    with pytest.raises(RuntimeError, match="previous"):
        sample(logits, [waiting], None)


def test_min_tokens_forbids_every_way_to_end() -> None:
    logits = torch.zeros(1, VOCAB)  # (1, VOCAB)
    logits[0, :5] = torch.tensor([1.0, 0.0, 9.0, 8.0, 2.0])  # 2 is eos, 3 a stop token
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(3, VOCAB + 7))
    assert sample(logits, [row(params, num_output=2)], None)[0].tolist() == [4]
    assert sample(logits, [row(params, num_output=3)], None)[0].tolist() == [2]
    lasting = SamplingParams(temperature=0.0, min_tokens=3, ignore_eos=True)
    assert sample(logits, [row(lasting, num_output=0)], None)[0].tolist() == [2]


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4)) * 2  # (1, VOCAB)
    raw = torch.log_softmax(logits[0].double(), dim=0)  # (VOCAB,)
    order = raw.argsort(descending=True).tolist()
    for num_top in (0, 1, 5):
        params = SamplingParams(temperature=3.0, logprobs=num_top, logit_bias=((order[6], 50.0),))
        tokens, [logprobs] = sample(logits, [row(params)], None)
        assert tokens.tolist() == [order[6]]
        assert logprobs is not None
        assert logprobs.rank == 7
        assert logprobs.logprob == pytest.approx(float(raw[order[6]]), abs=1e-5)
        assert [token for token, _ in logprobs.top] == order[:num_top]
        assert [value for _, value in logprobs.top] == pytest.approx([float(raw[i]) for i in order[:num_top]], abs=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_broken_logits_give_some_token_and_leave_others_alone(value: float) -> None:
    logits = torch.randn(2, VOCAB)  # (2, VOCAB)
    params = SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1, top_k=5)
    expected = sample(logits[1:], [row(params)], None)[0][0]
    logits[0] = value
    tokens, _ = sample(logits, [row(params)] * 2, None)
    assert 0 <= tokens[0] < VOCAB
    assert tokens[1] == expected
