"""How long a prefill takes on this machine, learnt from the steps that ran. Knows counts and seconds, no requests."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_STEPS = 64  # how many steps of a kind a mean goes back: some seconds of prefill, so that a new load shows soon
REFIT_STEPS = 8  # once a mean is settled it is looked at once in so many decode steps, which are short
# A query costs as much as so many keys by itself: without it, a process that saw only short prompts would take their
# attention for a hundred times too dear. SmolLM2 in bf16, prompts of 8 to 2,000 tokens: 18 us a token, 0.36 us a pair.
QUERY_PAIRS = 50


@dataclass(slots=True)
class _Mean:
    """Means over about the last MEMORY_STEPS steps of a kind."""

    num_steps: int = 0
    tokens: float = 0.0
    pairs: float = 0.0
    attention_s: float = 0.0
    other_s: float = 0.0

    def add(self, tokens: float, pairs: float, attention_s: float, other_s: float) -> None:
        self.num_steps += 1
        share = 1 / min(self.num_steps, MEMORY_STEPS)
        self.tokens += share * (tokens - self.tokens)
        self.pairs += share * (pairs - self.pairs)
        self.attention_s += share * (attention_s - self.attention_s)
        self.other_s += share * (other_s - self.other_s)


@dataclass(frozen=True, slots=True)
class PrefillFit:
    """Seconds of kernels for each step, each new token, and each pair of a new token and one that it attends to."""

    per_step_s: float
    per_token_s: float
    per_pair_s: float

    def seconds(self, num_new: int, context: int) -> float:
        """Of one step that computes `num_new` tokens after `context` known ones."""
        return self.per_step_s + self.per_token_s * num_new + self.per_pair_s * num_pairs(num_new, context)


def num_pairs(num_new: int, context: int) -> float:
    """Pairs of a new token and one it attends to, its own half."""
    return num_new * (context + num_new / 2)


class PrefillModel:
    """The fit follows two running means: of steps that decode alone and of those that prefill.

    Time outside attention is the line through the two, or through 0 while nothing was decoded; it cannot become
    singular as least squares do when all chunks are as large as the budget. Time in attention is proportional to the
    pairs of the prefilling steps, QUERY_PAIRS of each query itself included. Both `observe` belong to the thread that
    runs batches; any other may read `fit`.
    """

    def __init__(self) -> None:
        self._decode, self._prefill = _Mean(), _Mean()
        self._fit: PrefillFit | None = None  # replaced as a whole

    @property
    def fit(self) -> PrefillFit | None:
        """None until something was prefilled."""
        return self._fit

    def observe_decode(self, num_tokens: int, other_s: float) -> None:
        """A step whose rows had one new token each; seconds outside attention."""
        self._decode.add(num_tokens, 0.0, 0.0, other_s)
        if self._decode.num_steps < MEMORY_STEPS or self._decode.num_steps % REFIT_STEPS == 0:
            self._refit()

    def observe_prefill(self, num_tokens: int, pairs: float, attention_s: float, other_s: float) -> None:
        """A step of which some row had more than one new token; counts and seconds over all of its rows."""
        self._prefill.add(num_tokens, pairs, attention_s, other_s)
        self._refit()

    def seconds(self, num_new: int, context: int) -> float | None:
        """Of a prefill of `num_new` tokens after `context` known ones; None: nothing was prefilled yet."""
        fit = self._fit
        return None if fit is None else fit.seconds(num_new, context)

    def _refit(self) -> None:
        decode, prefill = self._decode, self._prefill
        if not prefill.num_steps:
            return
        per_token_s = prefill.other_s / prefill.tokens
        if decode.num_steps and prefill.tokens > decode.tokens:
            slope_s = (prefill.other_s - decode.other_s) / (prefill.tokens - decode.tokens)
            per_token_s = min(max(slope_s, 0.0), per_token_s)  # what a step costs by itself is not below 0
        per_step_s = prefill.other_s - per_token_s * prefill.tokens
        per_pair_s = prefill.attention_s / (prefill.pairs + QUERY_PAIRS * prefill.tokens)
        self._fit = PrefillFit(per_step_s, per_token_s + QUERY_PAIRS * per_pair_s, per_pair_s)
