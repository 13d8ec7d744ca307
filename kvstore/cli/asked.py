"""Which prompt, keys or tenant a command is about, from its options; and the same as a server wants it.

Text becomes tokens at the server, or here with the tokenizer of --model, which the engine lends.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from pagetier.kvstore.block import KEY_BYTES
from pagetier.kvstore.cli.options import all_of
from pagetier.kvstore.errors import ConfigError


class TextModel(Protocol):
    """A model's tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str: ...


LoadTextModel = Callable[[str], TextModel]


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt in one of its forms, or keys; neither where a command is about a tenant or all."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tokens: list[int] | None = None
    keys: tuple[bytes, ...] | None = None
    salt: str | None = None

    @property
    def has_prompt(self) -> bool:
        return self.prompt is not None or self.messages is not None or self.tokens is not None

    def body(self) -> dict[str, Any]:
        """The fields of a request to a server."""
        given = {
            "prompt": self.prompt,
            "messages": self.messages,
            "tokens": self.tokens,
            "keys": None if self.keys is None else [key.hex() for key in self.keys],
            "cache_salt": self.salt,
        }
        return {name: value for name, value in given.items() if value is not None}

    def token_ids(self, model: TextModel | None) -> list[int]:
        """The prompt's tokens. Raises ConfigError where that takes a tokenizer and there is none."""
        if self.tokens is not None:
            return self.tokens
        if model is None:
            raise ConfigError("a text needs a tokenizer; give --model, or --tokens FILE")
        if self.messages is not None:
            return model.encode(model.apply_chat_template(self.messages), add_special_tokens=False)
        return model.encode(self.prompt or "")


@dataclass(frozen=True, slots=True)
class AskedFlags:
    """The options that say it."""

    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="A prompt; - reads it from stdin.")] = (
        None
    )
    messages: Annotated[
        Path | None, typer.Option("--messages", metavar="FILE", help="A conversation: JSON, as for chat completions.")
    ] = None
    tokens: Annotated[Path | None, typer.Option("--tokens", metavar="FILE", help="Token ids: a JSON array.")] = None
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="HEX", help="A block's key, as --json shows it; may be repeated."),
    ] = None
    salt: Annotated[str | None, typer.Option("--salt", metavar="TEXT", help="The tenant's cache_salt.")] = None

    def read(self, *, needed: bool = True) -> Asked:
        """What the options say. Raises ConfigError for two at once, for none where one is `needed`, and for files that
        are not what they should be."""
        flags = {"--prompt": self.prompt, "--messages": self.messages, "--tokens": self.tokens, "--key": self.key}
        given = [flag for flag, value in flags.items() if value]
        if self.prompt == "":
            raise ConfigError.bad_value("--prompt", self.prompt, "at least one character")
        if len(given) > 1 or (needed and not given):
            raise ConfigError(f"give one of {all_of(list(flags))}, got {all_of(given) or 'none'}")
        return Asked(
            prompt=sys.stdin.read() if self.prompt == "-" else self.prompt,
            messages=None if self.messages is None else _messages(self.messages),
            tokens=None if self.tokens is None else _tokens(self.tokens),
            keys=tuple(map(_key, self.key)) if self.key else None,
            salt=self.salt,
        )


def _key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError.bad_value("--key", text, f"{2 * KEY_BYTES} hex digits, as query and top show with --json")
    return key


def _json(path: Path, flag: str) -> Any:
    try:
        return json.loads(sys.stdin.read() if str(path) == "-" else path.expanduser().read_text())
    except OSError as error:
        raise ConfigError(f"{flag}: {path} cannot be read ({error.strerror}); give a file, or - for stdin") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag}: {path} is not JSON ({error})") from None


def _messages(path: Path) -> list[dict[str, Any]]:
    found = _json(path, "--messages")
    if isinstance(found, dict):
        found = found.get("messages")
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise ConfigError(f"--messages: {path} holds no conversation; allowed: a JSON array of messages")
    return found


def _tokens(path: Path) -> list[int]:
    found = _json(path, "--tokens")
    if not isinstance(found, list) or not found or not all(type(one) is int and 0 <= one < 1 << 32 for one in found):
        raise ConfigError(f"--tokens: {path} holds no token ids; allowed: a JSON array of numbers, at least one")
    return found
