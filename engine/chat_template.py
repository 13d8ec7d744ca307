"""Chat templates: Jinja, in a sandbox, with the conventions of Hugging Face's `apply_chat_template`.

The template comes with the model, so it is untrusted code: it runs in Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from pagetier.kvstore.errors import ConfigError


class ChatTemplateError(ConfigError):
    """The template is malformed, or does not accept these messages (its own `raise_exception` included)."""


class ChatTemplate:
    """A compiled template. tokens: `bos_token` and its like, which templates refer to by name. Any thread may render.

    A malformed template is reported by `render`, not here: the model is still good for plain completions.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._tokens = dict(tokens)
        self._error = ""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as exc:
            self._error = f"chat template: {_one_line(exc)}"

    def render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The prompt text. kwargs are template variables (`tools`, `documents`, ...). Raises ChatTemplateError."""
        if self._error:
            raise ChatTemplateError(self._error)
        variables = {"tools": None, "documents": None, **self._tokens, **kwargs}
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **variables
            )
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:
            # what a template's own mistakes, unexpected messages and the sandbox's limits raise
            raise ChatTemplateError(f"chat template: {_one_line(exc)}") from None
        except RecursionError:
            raise ChatTemplateError("chat template: it recurses without end") from None


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here its body is just text."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _one_line(exc: BaseException) -> str:
    line = f" (line {exc.lineno})" if isinstance(exc, jinja2.TemplateSyntaxError) else ""
    return (" ".join(str(exc).split()) or type(exc).__name__) + line
