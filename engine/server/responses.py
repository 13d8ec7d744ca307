"""Answers of the OpenAI API, as whole bodies and as stream chunks, both built from the same deltas."""

from __future__ import annotations

import time
from typing import Any, Literal

from pydantic import BaseModel

from pagetier.engine.server.generation import ChoiceDelta, ScoredToken, Usage
from pagetier.engine.tokenizer import Tokenizer


class PromptTokensDetails(BaseModel):
    cached_tokens: int
    cached_tokens_by_tier: dict[str, int]


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_body(usage: Usage) -> UsageBody:
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(usage.cached.values()), cached_tokens_by_tier=usage.cached
        ),
    )


class CompletionLogprobs(BaseModel):
    tokens: list[str] = []
    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float]] = []
    text_offset: list[int] = []


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Completion(BaseModel):
    """A /v1/completions answer or, with `usage` left unset, a chunk of one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ContentLogprob]
    refusal: None = None


class ChatAnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: dict[str, str]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | None = None


class CompletionAnswer:
    """Builds /v1/completions bodies. One per request; owner: event loop thread."""

    def __init__(self, tokenizer: Tokenizer, request_id: str, model: str, wants_logprobs: bool) -> None:
        self._tokenizer, self._wants_logprobs = tokenizer, wants_logprobs
        self._id, self._model, self._created = request_id, model, int(time.time())
        self._choices: dict[int, CompletionChoice] = {}

    def chunk(self, delta: ChoiceDelta) -> BaseModel | None:
        """The stream's chunk for a delta, None when there is nothing to say."""
        if not (delta.text or delta.tokens or delta.finish_reason):
            return None
        return self._body([self._choice(delta)])

    def usage_chunk(self) -> BaseModel:
        return self._body([])

    def add(self, delta: ChoiceDelta) -> None:
        """Fold a delta into the whole answer."""
        new = self._choice(delta)
        choice = self._choices.setdefault(delta.index, CompletionChoice(index=delta.index, text=""))
        choice.text += new.text
        if new.logprobs is not None:
            if choice.logprobs is None:
                choice.logprobs = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
            for name in CompletionLogprobs.model_fields:
                getattr(choice.logprobs, name).extend(getattr(new.logprobs, name))
        if new.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = new.finish_reason, new.stop_reason

    def whole(self) -> BaseModel:
        return self._body([self._choices[index] for index in sorted(self._choices)])

    def _body(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices)

    def _choice(self, delta: ChoiceDelta) -> CompletionChoice:
        logprobs = None
        if self._wants_logprobs:
            logprobs = CompletionLogprobs(
                tokens=[_text(self._tokenizer, token.token_id) for token in delta.tokens],
                token_logprobs=[token.logprobs.logprob for token in delta.tokens],
                top_logprobs=[self._top(token) for token in delta.tokens],
                text_offset=[token.offset for token in delta.tokens],
            )
        return CompletionChoice(
            index=delta.index,
            text=delta.text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )

    def _top(self, token: ScoredToken) -> dict[str, float]:
        """The alternatives and, as OpenAI does, the sampled token even when it is not among them."""
        top: dict[str, float] = {}
        for token_id, logprob in (*token.logprobs.top, (token.token_id, token.logprobs.logprob)):
            top.setdefault(_text(self._tokenizer, token_id), logprob)  # of equal texts the likeliest stays
        return top


class ChatAnswer:
    """Builds /v1/chat/completions bodies. One per request; owner: event loop thread."""

    def __init__(self, tokenizer: Tokenizer, request_id: str, model: str, wants_logprobs: bool) -> None:
        self._tokenizer, self._wants_logprobs = tokenizer, wants_logprobs
        self._id, self._model, self._created = request_id, model, int(time.time())
        self._choices: dict[int, ChatChoice] = {}
        self._begun: set[int] = set()

    def chunk(self, delta: ChoiceDelta) -> BaseModel | None:
        """The stream's chunk for a delta, None when there is nothing to say. A choice's first one names the role."""
        first = delta.index not in self._begun
        if not (first or delta.text or delta.tokens or delta.finish_reason):
            return None
        self._begun.add(delta.index)
        fields = {"role": "assistant"} if first else {}
        if first or delta.text:
            fields["content"] = delta.text
        choice = ChatChunkChoice(
            index=delta.index,
            delta=fields,
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        return self._chunk([choice])

    def usage_chunk(self) -> BaseModel:
        return self._chunk([])

    def add(self, delta: ChoiceDelta) -> None:
        """Fold a delta into the whole answer."""
        choice = self._choices.setdefault(
            delta.index, ChatChoice(index=delta.index, message=ChatAnswerMessage(content=""))
        )
        choice.message.content += delta.text
        logprobs = self._logprobs(delta)
        if logprobs is not None:
            if choice.logprobs is None:
                choice.logprobs = ChatLogprobs(content=[])
            choice.logprobs.content.extend(logprobs.content)
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason

    def whole(self) -> BaseModel:
        choices = [self._choices[index] for index in sorted(self._choices)]
        return ChatCompletion(id=self._id, created=self._created, model=self._model, choices=choices)

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices)

    def _logprobs(self, delta: ChoiceDelta) -> ChatLogprobs | None:
        if not self._wants_logprobs:
            return None
        return ChatLogprobs(content=[self._content(token) for token in delta.tokens])

    def _content(self, token: ScoredToken) -> ContentLogprob:
        own = self._named(token.token_id, token.logprobs.logprob)
        top = [self._named(token_id, logprob) for token_id, logprob in token.logprobs.top]
        return ContentLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top)

    def _named(self, token_id: int, logprob: float) -> TopLogprob:
        text = _text(self._tokenizer, token_id)
        return TopLogprob(token=text, logprob=logprob, bytes=list(self._tokenizer.token_bytes[token_id]))


Answer = CompletionAnswer | ChatAnswer


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)


def dump(body: BaseModel, usage: UsageBody | None, *, with_usage: bool) -> dict[str, Any]:
    """The JSON object of a body; its `usage` is left out, null or set."""
    fields = body.model_dump(exclude={"usage"})
    if with_usage:
        fields["usage"] = usage.model_dump() if usage is not None else None
    return fields
