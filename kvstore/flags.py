"""Command lines from dataclasses: flags are fields of frozen dataclasses, a command is a function that takes some."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def command(run: Callable[..., None], *groups: type[Any]) -> Callable[..., None]:
    """`run`, which takes one object of each dataclass in `groups`, as Typer wants it: a function with one keyword per
    field of them all, named and documented like `run`. A field's annotation, `Annotated[type, typer.Option(...)]`, is
    its option. Commands that have flags in common have a group in common.
    """
    fields = [dataclasses.fields(group) for group in groups]
    parameters = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=hint)
        for group, own in zip(groups, fields, strict=True)
        for field, hint in _with_hints(group, own)
    ]

    def call(**values: Any) -> None:
        made = [
            group(**{field.name: values[field.name] for field in own})
            for group, own in zip(groups, fields, strict=True)
        ]
        run(*made)

    call.__name__, call.__doc__ = run.__name__, run.__doc__
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _with_hints(
    group: type[Any], fields: tuple[dataclasses.Field[Any], ...]
) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = get_type_hints(group, include_extras=True)
    return [(field, hints[field.name]) for field in fields]


def _default(field: dataclasses.Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
