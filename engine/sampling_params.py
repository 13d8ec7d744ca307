"""How one request wants its tokens chosen and when it ends. Validated where it is built."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagetier.kvstore.errors import ConfigError

MAX_LOGPROBS = 20  # as OpenAI


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """vLLM's names and meanings.

    best_of: how many sequences are generated, of which the `n` likeliest are the answer; None: n.
    temperature: 0 is greedy. top_k: 0 or -1 is all. seed: None draws one per request. max_tokens: None is up to the
    model's length. logprobs: number of top alternatives to report, None for none. stop: strings that end the text and
    are not part of it. stop_token_ids: ids that end it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    n: int = 1
    best_of: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = field(default=())

    def __post_init__(self) -> None:
        for name, ok, allowed in (
            ("temperature", 0.0 <= self.temperature <= 100.0, "0 to 100"),
            ("top_k", -1 <= self.top_k < 1 << 31, "-1 (all), 0 (all) or a count below 2^31"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "0 to 1"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "-2 to 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "-2 to 2"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "above 0, at most 100"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= (self.max_tokens or 1 << 31), "0 to max_tokens"),
            ("n", 1 <= self.n <= 128, "1 to 128"),
            ("best_of", self.best_of is None or self.n <= self.best_of <= 128, f"n ({self.n}) to 128"),
            ("seed", self.seed is None or -(1 << 63) <= self.seed < 1 << 64, "a 64-bit integer"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
            ("stop", len(self.stop) <= 16 and all(map(_is_text, self.stop)), "at most 16 non-empty texts"),
        ):
            if not ok:
                raise ConfigError.bad_value(name, getattr(self, name), allowed)

    @property
    def num_sequences(self) -> int:
        """How many are generated for a prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether more are generated than answered, so that they must be compared."""
        return self.num_sequences > self.n

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def is_plain(self) -> bool:
        """Whether each token is the best of the logits as they are, and nothing else is asked for."""
        asks_more = self.has_penalties or bool(self.logit_bias) or self.min_tokens > 0 or self.logprobs is not None
        return self.greedy and not asks_more


def _is_text(value: str) -> bool:
    """Whether it is not empty and has no half of a surrogate pair, which no text ever has and no message can carry."""
    return bool(value) and not any("\ud800" <= char <= "\udfff" for char in value)
