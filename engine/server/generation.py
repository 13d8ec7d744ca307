"""One API request's life after preparation: engine outputs in, text deltas out.

Owns detokenising, stop strings, usage counts and latency marks. Streaming and whole answers are both made from the
deltas, so that they cannot disagree. Knows nothing of HTTP.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from pagetier.engine.batch import TokenLogprobs
from pagetier.engine.detokenizer import IncrementalDetokenizer
from pagetier.engine.messages import TIERS_HANG, EngineRequest, TokenOutput
from pagetier.engine.ranking import best_indices, cumulative_logprob
from pagetier.engine.server.engine_client import EngineClient, EngineDeadError, OutputStream
from pagetier.engine.server.errors import ApiError, engine_dead, shutting_down, tiers_hang
from pagetier.engine.server.preparation import PreparedRequest
from pagetier.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A generated token whose log-probabilities were asked for. offset: characters of text complete before it."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What came of choice `index`: text that is sure to stay, and the end, if it ended.

    stop_reason: the stop string or stop token id that ended it (vLLM's field).
    """

    index: int
    text: str
    tokens: tuple[ScoredToken, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Usage:
    """Token counts of one API request; `cached` by tier, a prompt counted once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Timing:
    """Monotonic marks in seconds. token_gaps_s: between successive outputs of a choice."""

    arrival_s: float
    first_token_s: float | None = None
    end_s: float | None = None
    token_gaps_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become text."""

    stop: tuple[str, ...]
    skip_special_tokens: bool
    include_stop: bool


class _Choice:
    """One sequence's text so far, and the cumulative log-probability of its tokens where it is reported."""

    def __init__(self, index: int, request: EngineRequest, tokenizer: Tokenizer, options: TextOptions) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self._options = options
        self._min_tokens = request.params.min_tokens
        self._eos_token_ids = frozenset(request.eos_token_ids)
        self._offsets = (
            IncrementalDetokenizer(tokenizer, request.prompt_ids, skip_special_tokens=options.skip_special_tokens)
            if request.params.logprobs is not None
            else None
        )
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            request.prompt_ids,
            stop=options.stop,
            skip_special_tokens=options.skip_special_tokens,
            include_stop=options.include_stop,
            min_tokens=request.params.min_tokens,
        )
        self._offset = 0
        self.num_tokens = 0
        self.score = 0.0
        self.last_output_s: float | None = None

    def take(self, output: TokenOutput) -> ChoiceDelta:
        """The delta of an engine output; `finish_reason` is set on self when the choice is over."""
        text: list[str] = []
        tokens: list[ScoredToken] = []
        num_before = self.num_tokens
        stop_reason: str | int | None = None
        for position, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            ends_it = output.stop_token_id is not None and position == len(output.token_ids) - 1
            self._score(token_id, output.logprobs[position] if output.logprobs else None, tokens)
            if ends_it and not self._options.include_stop:
                break  # a stop id is no part of the text
            text.append(self._detokenizer.push((token_id,)))
            if self._detokenizer.stopped is not None:
                self.finish_reason, stop_reason = "stop", self._detokenizer.stopped
                break
        if self.finish_reason is None and output.finish_reason is not None:
            text.append(self._detokenizer.finish())
            self.finish_reason = output.finish_reason
            if self._detokenizer.stopped is not None:
                self.finish_reason, stop_reason = "stop", self._detokenizer.stopped
            elif output.stop_token_id is not None and output.stop_token_id not in self._eos_token_ids:
                stop_reason = output.stop_token_id
        self.score += cumulative_logprob(output.logprobs[: self.num_tokens - num_before])
        return ChoiceDelta(self.index, "".join(text), tuple(tokens), self.finish_reason, stop_reason)

    def _score(self, token_id: int, logprobs: TokenLogprobs | None, into: list[ScoredToken]) -> None:
        if self._offsets is None or logprobs is None:
            return
        into.append(ScoredToken(token_id, self._offset, logprobs))
        self._offset += len(self._offsets.push((token_id,)))


class Generation:
    """Submits a prepared request and turns its outputs into deltas. owner: event loop thread.

    `close` must be called, also after the end: it aborts what still runs.
    """

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, prepared: PreparedRequest, options: TextOptions
    ) -> None:
        self._client = client
        self._choices = {
            request.request_id: _Choice(index, request, tokenizer, options)
            for index, request in enumerate(prepared.sequences)
        }
        self._num_sequences, self._num_choices = prepared.params.num_sequences, prepared.params.n
        self._held: dict[int, list[ChoiceDelta]] = {}  # by choice, until those of its prompt can be ranked
        self._deltas: deque[ChoiceDelta] = deque()
        self._echo = dict(enumerate(prepared.echo_texts))
        self._echoed: set[int] = set()
        self.usage = Usage(prepared.num_prompt_tokens, cached=dict.fromkeys(client.ready.tiers, 0))
        self.timing = Timing(time.monotonic())
        self._cached_seen: set[int] = set()
        try:
            self._stream: OutputStream = client.submit(prepared.sequences)
        except EngineDeadError as error:
            raise engine_dead(str(error)) from None

    @property
    def finish_reasons(self) -> list[str]:
        """Of the choices that ended."""
        return [choice.finish_reason for choice in self._choices.values() if choice.finish_reason is not None]

    async def next(self, timeout_s: float | None = None) -> ChoiceDelta | None:
        """The next delta; None when all choices have ended. Raises ApiError, TimeoutError.

        Where more sequences are generated than answered, all of a prompt's choices come once the last has ended.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._deltas:
            output = await self._stream.next(None if end_s is None else max(0.0, end_s - time.monotonic()))
            if output is None:
                self.timing.end_s = time.monotonic()
                return None
            self._take(output)
        return self._deltas.popleft()

    def _take(self, output: TokenOutput) -> None:
        """An output becomes a delta, now or later. Raises ApiError."""
        if output.finish_reason in ("error", "abort"):
            raise self._failure(output)
        choice = self._choices[output.request_id]
        if choice.finish_reason is not None:
            return  # it was on its way when a stop string ended the choice
        self._mark(choice)
        self._count_cached(choice.index, output)
        before = choice.num_tokens
        delta = choice.take(output)
        self.usage.completion_tokens += choice.num_tokens - before
        if choice.finish_reason is not None and output.finish_reason is None:
            self._stream.abort(output.request_id)
        if self._num_sequences == self._num_choices:
            self._deltas.append(self._with_echo(delta))
        else:
            self._hold(choice, delta)

    def _hold(self, choice: _Choice, delta: ChoiceDelta) -> None:
        """Keep a delta until all sequences of its prompt have ended; then the best of them are the choices."""
        self._held.setdefault(choice.index, []).append(delta)
        prompt = choice.index // self._num_sequences
        first = prompt * self._num_sequences
        sequences = list(self._choices.values())[first : first + self._num_sequences]
        if any(sequence.finish_reason is None for sequence in sequences):
            return
        for rank, best in enumerate(best_indices([s.score for s in sequences], self._num_choices)):
            whole = _joined(self._held.get(first + best, []), prompt * self._num_choices + rank)
            self._deltas.append(self._with_echo(whole))
        for sequence in sequences:
            self._held.pop(sequence.index, None)

    async def deltas(self) -> AsyncIterator[ChoiceDelta]:
        while (delta := await self.next()) is not None:
            yield delta

    def close(self) -> None:
        """Abort what still runs. Idempotent."""
        self._stream.close()

    def _with_echo(self, delta: ChoiceDelta) -> ChoiceDelta:
        if not self._echo or delta.index in self._echoed:
            return delta
        self._echoed.add(delta.index)
        text = self._echo[delta.index // self._num_choices] + delta.text
        return ChoiceDelta(delta.index, text, delta.tokens, delta.finish_reason, delta.stop_reason)

    def _mark(self, choice: _Choice) -> None:
        now_s = time.monotonic()
        if self.timing.first_token_s is None:
            self.timing.first_token_s = now_s
        if choice.last_output_s is not None:
            self.timing.token_gaps_s.append(now_s - choice.last_output_s)
        choice.last_output_s = now_s

    def _count_cached(self, index: int, output: TokenOutput) -> None:
        prompt = index // self._num_sequences
        if prompt in self._cached_seen or index % self._num_sequences:
            return
        self._cached_seen.add(prompt)
        for tier, num_tokens in output.cached_tokens.items():
            self.usage.cached[tier] = self.usage.cached.get(tier, 0) + num_tokens

    def _failure(self, output: TokenOutput) -> ApiError:
        if self._client.error is not None:
            return engine_dead(self._client.error)
        if output.finish_reason == "abort":
            return ApiError(500, "the engine aborted the request", code="aborted")
        if output.error == str(shutting_down()):
            return shutting_down()
        if output.error.startswith(TIERS_HANG):
            return tiers_hang(output.error)
        return ApiError(500, output.error or "the engine failed", code="engine_error")


def _joined(deltas: list[ChoiceDelta], index: int) -> ChoiceDelta:
    """All of a choice in one delta, under another index."""
    last = deltas[-1]
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    return ChoiceDelta(index, "".join(delta.text for delta in deltas), tokens, last.finish_reason, last.stop_reason)
