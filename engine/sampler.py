"""From logits to tokens: the order and meanings of vLLM's sampler. Knows rows, not requests.

Order: min_tokens, logit_bias, repetition, frequency and presence penalties; greedy ends here; temperature, min_p,
top_k, top_p, draw. Each row is worked on alone and drawn by its own named random number: it cannot depend on the batch.
A token's weight is a whole number, whose sums are exact in any order: a draw depends on no kernel's order either. This
is the reference, and what samples on a GPU; the compiled CPU core does the same, token by token (compiled_sampler.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagetier.engine.batch import I64, SampleRow, TokenLogprobs
from pagetier.engine.random_stream import uniforms
from pagetier.engine.sampling_params import SamplingParams

MIN_TEMPERATURE = 1e-5  # vLLM's epsilon: below it a temperature divides logits into infinities
UNIT_BITS = 43  # a token's weight is a whole number of 2^-43 of the best one's: sums over 2^20 tokens fit 63 bits
NUMBER_BITS = 52  # of a random number in [0, 1)
TOP_P_CANDIDATES = 1024  # top_p sorts this many first and the vocabulary only where they hold too little mass


def sample(
    logits: Tensor, rows: Sequence[SampleRow], previous: I64 | None
) -> tuple[I64, tuple[TokenLogprobs | None, ...]]:
    """Chooses a token for every row: (num_samples,) ids and the log-probabilities asked for.

    logits: (num_samples, vocab_size) float32, unchanged. previous: the tokens of the previous launched batch, which
    `SampleRow.pending` points into.
    """
    chosen_from = logits
    if any(is_adjusted(row) for row in rows):
        chosen_from = logits.clone()  # (num_samples, vocab_size)
        for index, row in enumerate(rows):
            if is_adjusted(row):
                adjust(chosen_from[index], row, previous)
    tokens = _argmax(chosen_from)  # (num_samples,)
    drawn = [index for index, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        numbers = uniforms([(rows[i].seed, rows[i].choice, rows[i].position) for i in drawn])
        for index, number in zip(drawn, numbers.tolist(), strict=True):
            tokens[index] = _draw(chosen_from[index], rows[index].params, number)
    logprobs = tuple(
        None if row.params.logprobs is None else _logprobs(logits[index], int(tokens[index]), row.params.logprobs)
        for index, row in enumerate(rows)
    )
    return tokens, logprobs


def _argmax(logits: Tensor) -> I64:
    """(num_samples,) the best token of each row. On a CPU by numpy: torch's threads meet at a barrier, which one busy
    neighbour turns from microseconds into milliseconds."""
    if logits.device.type == "cpu":
        best: I64 = logits.numpy().argmax(axis=-1).astype(np.int64)
    else:
        best = logits.argmax(dim=-1).cpu().numpy()
    return best


def _forbids_end(row: SampleRow) -> bool:
    return row.num_output < row.params.min_tokens


def is_adjusted(row: SampleRow) -> bool:
    """Whether anything changes the row's logits before temperature."""
    return row.params.has_penalties or bool(row.params.logit_bias) or _forbids_end(row)


def adjust(logits: Tensor, row: SampleRow, previous: I64 | None) -> None:
    """Changes one row's logits (vocab_size,) in place: min_tokens, logit_bias, penalties. Ids outside the vocabulary
    are ignored."""
    params, vocab_size = row.params, len(logits)
    if _forbids_end(row):
        ends = params.stop_token_ids + (() if params.ignore_eos else row.eos_token_ids)
        logits[[token for token in ends if 0 <= token < vocab_size]] = -torch.inf
    for token, bias in params.logit_bias:
        if 0 <= token < vocab_size:
            logits[token] += bias
    if params.has_penalties:
        output = row.output_ids
        if row.pending >= 0:
            if previous is None:
                raise RuntimeError("a row waits for a token of the previous batch, which has none")
            output = (*output, int(previous[row.pending]))
        _penalise(logits, params, row.prompt_ids, output)


def _penalise(logits: Tensor, params: SamplingParams, prompt: tuple[int, ...], output: tuple[int, ...]) -> None:
    """Repetition counts prompt and output (Keskar et al. 2019, section 4.1), the others the output alone (OpenAI)."""
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *output}), dtype=torch.int64, device=logits.device)  # (num_seen,)
        values = logits[seen]  # (num_seen,)
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if output:
        ids, counts = np.unique(np.array(output, dtype=np.int64), return_counts=True)  # (num_unique,) each
        fall = params.frequency_penalty * counts + params.presence_penalty  # (num_unique,)
        logits[torch.from_numpy(ids).to(logits.device)] -= torch.from_numpy(fall).to(logits)


def _draw(logits: Tensor, params: SamplingParams, number: float) -> int:
    """The token at `number` of the filtered distribution's cumulative sum in the order of ids. logits: (vocab_size,).

    min_p, top_k and top_p all end as a least logit, so tokens equal to the last one kept are kept too.
    """
    peak = logits.max()
    if not math.isfinite(peak):  # no distribution: NaN of a broken model, or everything forbidden
        return int(logits.argmax())
    scaled = (logits - peak) / max(params.temperature, MIN_TEMPERATURE)  # (vocab_size,) 0 at the best
    least = _least_kept(scaled, params)
    ids = None
    if least > -torch.inf:
        ids = torch.nonzero(scaled >= least).flatten()  # (num_kept,)
        scaled = scaled[ids]  # (num_kept,)
    mass = torch.cumsum(_weights(scaled), dim=0)  # (num_kept,)
    target = int(mass[-1]) * int(number * (1 << NUMBER_BITS)) >> NUMBER_BITS  # below the last: some token exceeds it
    index = int(torch.searchsorted(mass, torch.tensor(target, device=mass.device), right=True))
    return index if ids is None else int(ids[index])


def _weights(scaled: Tensor) -> Tensor:
    """(num_kept,) int64 e^scaled in units of 2^-UNIT_BITS. scaled: (num_kept,) at most 0."""
    return (scaled.double().exp() * (1 << UNIT_BITS)).round().to(torch.int64)


def _least_kept(scaled: Tensor, params: SamplingParams) -> float:
    """The smallest scaled logit that min_p, top_k and top_p, in this order, keep; -inf: all. scaled: (vocab_size,)."""
    least = -math.inf
    if params.min_p > 0.0:
        least = float(np.float32(math.log(params.min_p)))
    vocab_size = len(scaled)
    if 0 < params.top_k < vocab_size:
        best = torch.topk(scaled, params.top_k).values  # (top_k,)
        least = max(least, float(best[-1]))
    if params.top_p < 1.0:
        kept = scaled if least == -math.inf else scaled[scaled >= least]  # (num_kept,)
        least = max(least, _least_of_nucleus(kept, params.top_p))
    return least


def _least_of_nucleus(scaled: Tensor, top_p: float) -> float:
    """The smallest logit of the smallest set of best tokens with at least `top_p` of the mass. scaled: (num_kept,)."""
    total = int(_weights(scaled).sum())
    needed = min(total, math.ceil(top_p * total))
    best = torch.topk(scaled, min(TOP_P_CANDIDATES, len(scaled))).values  # (num_candidates,) best first
    mass = torch.cumsum(_weights(best), dim=0)  # (num_candidates,)
    if int(mass[-1]) < needed:
        best = torch.sort(scaled, descending=True).values  # (num_kept,)
        mass = torch.cumsum(_weights(best), dim=0)  # (num_kept,)
    return float(best[int(torch.searchsorted(mass, torch.tensor(needed, device=mass.device)))])


def _logprobs(logits: Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Of the raw distribution; of equal tokens the lowest ids are told. logits: (vocab_size,)."""
    logprobs = torch.log_softmax(logits, dim=0)  # (vocab_size,)
    rank = int((logits > logits[token]).sum()) + 1
    if not num_top:
        return TokenLogprobs(float(logprobs[token]), rank, ())
    least = torch.topk(logits, min(num_top, len(logits))).values[-1]
    ids = torch.nonzero(~(logits < least)).flatten()  # (num_best,) more than num_top where some are equal
    best = ids[torch.sort(logits[ids], descending=True, stable=True).indices[:num_top]]  # (num_top,)
    return TokenLogprobs(float(logprobs[token]), rank, tuple(zip(best.tolist(), logprobs[best].tolist(), strict=True)))
