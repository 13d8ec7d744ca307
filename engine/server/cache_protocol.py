"""Bodies of the cache's own routes: which prompt, key, tenant or tiers are meant. Knows no engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pagetier.engine.server.errors import ApiError
from pagetier.engine.server.protocol import ChatMessage, readable

MAX_KEYS = 65_536
HEX_KEY = 64
LISTS = ("tokens", "messages", "keys", "tiers", "ids")


class CacheFields(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PrefixFields(CacheFields):
    """A prompt: text, messages or token ids, and whose (`cache_salt`)."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    tokens: list[int] | None = None
    cache_salt: str | None = Field(default=None, max_length=1024)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def num_prompts(self) -> int:
        return sum(given is not None for given in (self.prompt, self.messages, self.tokens))


class QueryFields(PrefixFields):
    """What `GET /query` and `POST /query` take: a prompt, or keys."""

    keys: list[str] | None = Field(default=None, min_length=1, max_length=MAX_KEYS)

    def checked(self) -> Self:
        if self.num_prompts + (self.keys is not None) != 1:
            raise ApiError(400, "give one of prompt, messages, tokens and keys", param="prompt")
        return self


class PinFields(PrefixFields):
    """POST /pin: a prompt, or the key of its last block; for how long, and in which tiers (default: all)."""

    keys: list[str] | None = Field(default=None, min_length=1, max_length=1)
    ttl_s: float | None = Field(default=None, gt=0, le=10 * 365 * 86_400)
    tiers: list[str] | None = Field(default=None, min_length=1, max_length=8)

    def checked(self) -> Self:
        if self.num_prompts + (self.keys is not None) != 1:
            raise ApiError(400, "give one of prompt, messages, tokens and keys", param="prompt")
        return self


class UnpinFields(PrefixFields):
    """POST /unpin: a prompt, ids that /pin or /pins told, or all."""

    ids: list[str] | None = Field(default=None, min_length=1, max_length=MAX_KEYS)
    all: bool = False

    def checked(self) -> Self:
        if self.num_prompts + (self.ids is not None) + self.all != 1:
            raise ApiError(400, "give one of prompt, messages, tokens, ids and all", param="prompt")
        return self


class PurgeFields(PrefixFields):
    """POST /purge: a prompt, keys, a tenant (`cache_salt` alone), or all; of which tiers (default: all).

    domain: must be the server's own where it is given; a guard for scripts.
    """

    keys: list[str] | None = Field(default=None, min_length=1, max_length=MAX_KEYS)
    tiers: list[str] | None = Field(default=None, min_length=1, max_length=8)
    domain: str | None = None
    all: bool = False

    def checked(self) -> Self:
        chosen = self.num_prompts + (self.keys is not None) + self.all
        if chosen > 1 or (not chosen and self.cache_salt is None):
            raise ApiError(400, "give one of prompt, messages, tokens, keys, cache_salt and all", param="prompt")
        return self


Fields = TypeVar("Fields", QueryFields, PinFields, UnpinFields, PurgeFields)


def parse_fields(kind: type[Fields], data: bytes | Mapping[str, Any]) -> Fields:
    """The checked fields of a JSON body, or of a query string. Raises ApiError(400) that names the field."""
    fields: Any = data
    if isinstance(data, bytes):
        try:
            fields = json.loads(data) if data.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(fields, Mapping):
        raise ApiError(400, f"the body is a JSON {type(fields).__name__}; allowed: an object")
    try:
        return kind.model_validate(dict(fields)).checked()
    except ValidationError as error:
        raise readable(error) from None


def from_query_string(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Fields of a query string: lists as repeated names, or as JSON."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        field = {"key": "keys", "token": "tokens", "tier": "tiers"}.get(name, name)
        if field not in LISTS:
            fields[field] = value
        elif value.startswith("["):
            try:
                fields[field] = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ApiError(400, f"{name}: is not JSON: {error}", param=name) from None
        else:
            fields.setdefault(field, []).append(value)
    return fields


def parse_key(text: str) -> bytes:
    """A key of 64 hex digits. Raises ApiError."""
    try:
        if len(text) == HEX_KEY:
            return bytes.fromhex(text)
    except ValueError:
        pass
    raise ApiError(400, f"keys: got {text[:80]!r}; allowed: {HEX_KEY} hex digits each", param="keys")
