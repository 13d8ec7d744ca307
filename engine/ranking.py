"""Which of a prompt's `best_of` sequences are its `n` choices: those of the greatest cumulative log-probability.

The sum is over all generated tokens that count, the stop token included, of the model's raw distribution, as vLLM
ranked them; of equal sums the earlier sequence is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pagetier.engine.batch import TokenLogprobs
from pagetier.engine.sampling_params import SamplingParams


def sequence_params(params: SamplingParams) -> SamplingParams:
    """Those of each sequence: with the log-probabilities that ranking needs."""
    if params.is_ranked and params.logprobs is None:
        return replace(params, logprobs=0)
    return params


def cumulative_logprob(tokens: Iterable[TokenLogprobs | None]) -> float:
    """The sum over tokens; those without a figure count nothing."""
    return sum(token.logprob for token in tokens if token is not None)


def best_indices(scores: Sequence[float], num_best: int) -> list[int]:
    """Of the `num_best` greatest, best first."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:num_best]
