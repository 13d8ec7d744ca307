"""Command lines from dataclasses: a command with many flags is a frozen dataclass and a function that takes it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

Flags = TypeVar("Flags")


def command(run: Callable[[Flags], None], flags: type[Flags]) -> Callable[..., None]:
    """`run` as Typer wants it: a function with one keyword per field of the dataclass `flags`, named and documented
    like `run`. A field's annotation, `Annotated[type, typer.Option(...)]`, is its option.
    """
    hints = get_type_hints(flags, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=hints[field.name]
        )
        for field in dataclasses.fields(flags)  # type: ignore[arg-type]
    ]

    def call(**values: Any) -> None:
        run(flags(**values))

    call.__name__, call.__doc__ = run.__name__, run.__doc__
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _default(field: dataclasses.Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
