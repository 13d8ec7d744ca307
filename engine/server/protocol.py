"""Request bodies of the OpenAI API, with vLLM's extra fields, and what they mean as `SamplingParams`.

A field that would change the answer and is not supported is refused by name unless it has its neutral value; fields
that only describe the caller are ignored; names nobody knows are refused with the nearest known one.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pagetier.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from pagetier.engine.server.errors import ApiError, invalid, unsupported
from pagetier.kvstore.errors import ConfigError

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's for /v1/completions

IGNORED = frozenset(
    (
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "parallel_tool_calls",  # means nothing without tools, and tools are refused
    )
)

# Fields that are understood and refused, with the values that ask for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "best_of": (1,),  # for chats, as in OpenAI's API
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "prompt_logprobs": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "logits_processors": ([],),
    "kv_transfer_params": ({},),
    "documents": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "prompt_embeds": (),
    "mm_processor_kwargs": (),
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")  # include_obfuscation and the like change no answer

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SharedFields(BaseModel):
    """What both endpoints take. None everywhere means the default, as OpenAI's clients send it."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int | None = None
    skip_special_tokens: bool = True
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(default=None, max_length=1024)
    priority: int = Field(default=0, ge=-(1 << 31), lt=1 << 31)
    user: str | None = Field(default=None, max_length=1024)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def refuse_unsupported(self) -> None:
        """Raise ApiError for the first extra field that cannot be ignored."""
        for name, value in (self.model_extra or {}).items():
            if name in IGNORED or value is None:
                continue
            if name not in NEUTRAL:
                known = sorted({*type(self).model_fields, *NEUTRAL})
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ApiError(400, f"unknown field {name!r}{hint}", param=name, code="unknown_parameter")
            if value not in NEUTRAL[name]:
                raise unsupported(name, f"{name!r} is not supported by this server; leave it out")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "'stream_options' is only allowed with 'stream': true", param="stream_options")

    def sampling_params(
        self, max_tokens: int | None, logprobs: int | None, best_of: int | None = None
    ) -> SamplingParams:
        """The engine's view. Raises ApiError with the field at fault."""
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "min_tokens": self.min_tokens,
            "n": self.n,
        }
        try:
            return SamplingParams(
                **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
                seed=self.seed,
                max_tokens=max_tokens,
                best_of=best_of,
                stop=self.stop_strings,
                stop_token_ids=tuple(self.stop_token_ids or ()),
                ignore_eos=self.ignore_eos,
                logprobs=logprobs,
                logit_bias=self._logit_bias(),
            )
        except ConfigError as error:
            raise ApiError(400, str(error), param=str(error).partition(":")[0]) from None

    def _logit_bias(self) -> tuple[tuple[int, float], ...]:
        pairs = []
        for text, bias in (self.logit_bias or {}).items():
            if not text.isdecimal() or not -100.0 <= bias <= 100.0:
                raise ApiError(
                    400, f"logit_bias: got {text!r}: {bias}; allowed: token ids with -100 to 100", param="logit_bias"
                )
            pairs.append((int(text), bias))
        return tuple(pairs)


class CompletionRequest(SharedFields):
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = DEFAULT_COMPLETION_TOKENS
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    @property
    def num_sequences(self) -> int:
        """How many it asks for, over all prompts."""
        return len(self.prompts) * max(self.n or 1, self.best_of or 1)

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt: text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token_id for token_id in self.prompt if isinstance(token_id, int)]]
        return [entry for entry in self.prompt if not isinstance(entry, int)]

    def checked(self) -> Self:
        self.refuse_unsupported()
        if not self.prompts or not all(self.prompts):
            raise ApiError(400, "prompt: got an empty one; allowed: at least one token each", param="prompt")
        if self.echo and self.logprobs is not None:
            raise unsupported("echo", "'echo' with 'logprobs' is not supported by this server; ask for one of them")
        self.params()  # each value within its own bounds, before anything is said of how many there are
        return self

    def params(self) -> SamplingParams:
        return self.sampling_params(self.max_tokens, self.logprobs, self.best_of)


class TextPart(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart] | None = None

    def as_template_input(self, index: int) -> dict[str, Any]:
        """What the chat template sees. Raises ApiError for what it could not show."""
        for name, value in (self.model_extra or {}).items():
            if value in (None, [], {}, "") or name == "name":
                continue
            where = f"messages[{index}].{name}"
            raise unsupported(where, f"{where!r} is not supported by this server; leave it out")
        if self.role not in ROLES:
            raise invalid(f"messages[{index}].role", f"got {self.role!r}; allowed: {', '.join(ROLES)}")
        if self.content is None and self.role != "assistant":
            raise invalid(f"messages[{index}].content", f"is missing; a message of role {self.role!r} needs text")
        message: dict[str, Any] = {"role": self.role, "content": self._text(index)}
        if self.model_extra and self.model_extra.get("name"):
            message["name"] = self.model_extra["name"]
        return message

    def _text(self, index: int) -> str:
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        for part in self.content:
            if part.type not in ("text", "input_text") or part.text is None:
                where = f"messages[{index}].content"
                raise unsupported(where, f"{where}: got a part of type {part.type!r}; allowed: text")
        return "".join(part.text or "" for part in self.content)


class ChatCompletionRequest(SharedFields):
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False  # the template writes them
    chat_template_kwargs: dict[str, Any] | None = None

    def checked(self) -> Self:
        self.refuse_unsupported()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "'top_logprobs' needs 'logprobs': true", param="top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise invalid("top_logprobs", f"got {self.top_logprobs}; allowed: 0 to {MAX_LOGPROBS}")
        self.params()  # each value within its own bounds, before anything is said of how many there are
        return self

    def params(self) -> SamplingParams:
        max_tokens = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return self.sampling_params(max_tokens, (self.top_logprobs or 0) if self.logprobs else None)

    def template_messages(self) -> list[dict[str, Any]]:
        return [message.as_template_input(index) for index, message in enumerate(self.messages)]


Body = TypeVar("Body", CompletionRequest, ChatCompletionRequest)


def parse_body(kind: type[Body], data: bytes) -> Body:
    """The checked request of a JSON body. Raises ApiError(400) that names the field."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body is a JSON {type(fields).__name__}; allowed: an object")
    try:
        return kind.model_validate(fields).checked()
    except ValidationError as error:
        raise readable(error) from None


def readable(error: ValidationError) -> ApiError:
    """The first complaint, in words; of a union's complaints the deepest path is left out."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = [str(step) for step in first["loc"]]
    param = path[0] if path else None
    given = repr(first.get("input"))
    shown = given if len(given) <= 80 else f"{given[:77]}..."
    if first["type"] == "missing":
        return ApiError(400, f"{'.'.join(path)}: missing; it is required", param=param)
    return ApiError(400, f"{'.'.join(path)}: got {shown}; {first['msg']}", param=param)
