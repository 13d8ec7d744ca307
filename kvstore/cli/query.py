"""`pagetier query` and `pagetier top`: which blocks are where, and which prefixes are used most."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text
from rich.tree import Tree

from pagetier.kvstore.cli.asked import AskedFlags, LoadTextModel
from pagetier.kvstore.cli.options import CacheFlags, OfflineFlags, ServerFlags
from pagetier.kvstore.cli.sources import opened_source
from pagetier.kvstore.config import format_size
from pagetier.kvstore.flags import command

SHOWN_CHARS = 40  # of a block's text
OTHER_COLUMNS = 76  # what the others and the lines between them take, for a block in three tiers


def make_query(load: LoadTextModel) -> Callable[..., None]:
    """The command, with whoever loads tokenizers."""

    def query(asked: AskedFlags, server: ServerFlags, offline: OfflineFlags, cache: CacheFlags) -> None:
        """Show block by block where a prompt is cached: text, tiers, size, age, hits; and how much of it would hit.

        Asks a live server or a store service, or reads an NVMe folder or a Redis without one. Changes nothing, hit
        counters included. Exit code 1 when nothing is cached.

        Example: pagetier query --prompt "You answer questions about geography in one short sentence."
        """
        wanted = asked.read()
        with opened_source(server, cache, load, offline) as source:
            answer = source.query(wanted)
        if server.as_json:
            typer.echo(json.dumps(answer, ensure_ascii=False, indent=2))
        else:
            console = Console()
            console.print(query_table(answer, console.width))
            typer.echo(query_summary(answer))
        if not any(block["tiers"] for block in answer["blocks"]):
            raise typer.Exit(1)

    return command(query, AskedFlags, ServerFlags, OfflineFlags, CacheFlags)


def query_table(answer: dict[str, Any], width: int) -> Table:
    """A line for each block, within so many columns."""
    num_chars = max(8, min(SHOWN_CHARS, width - OTHER_COLUMNS))
    text = Column("text", overflow="ellipsis", no_wrap=True, max_width=num_chars)
    right: dict[str, Any] = {"justify": "right", "no_wrap": True}
    columns = (Column("tokens", **right), Column("tiers", no_wrap=True), Column("size", **right))
    table = Table(*columns, Column("age", **right), Column("hits", **right), Column("key", no_wrap=True), text)
    for block in answer["blocks"]:
        span = block["tokens"]
        table.add_row(
            "?" if span is None else f"{span[0]}-{span[1]}",
            (" ".join(block["tiers"]) or "-") + (" (pinned)" if block.get("pinned") else ""),
            format_size(block["bytes"]) if block["tiers"] else "",
            age_text(block["age_s"]),
            "" if block["hits"] is None or not block["tiers"] else f"{block['hits']:,}",
            block["key"][:8],
            Text(shown_text(block["text"])),
        )
    return table


def query_summary(answer: dict[str, Any]) -> str:
    """One line: how much of the prompt would hit."""
    num_tokens, hits = answer["num_tokens"], answer["hit_tokens"]
    by_tier = ", ".join(f"{name} {count:,}" for name, count in answer.get("hit_tokens_by_tier", {}).items())
    return (
        f"{hits:,} of {num_tokens:,} tokens would be hits{f' ({by_tier})' if by_tier else ''}, "
        f"domain {answer['domain'][:12]}"
    )


def shown_text(text: str | None) -> str:
    """A text on one line, as it would be quoted."""
    return "" if text is None else json.dumps(text, ensure_ascii=False)[1:-1]


def age_text(seconds: float | None) -> str:
    """In the largest unit that leaves at least 1."""
    if seconds is None:
        return ""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


@dataclass(frozen=True, slots=True)
class TopFlags:
    """Of `top` alone."""

    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="Prefixes shown.")] = 20


def make_top(load: LoadTextModel) -> Callable[..., None]:
    """The command, with whoever loads tokenizers."""

    def top(own: TopFlags, server: ServerFlags, offline: OfflineFlags, cache: CacheFlags) -> None:
        """Show the prefixes that were used most as a tree: a prefix, and below it how it goes on.

        In a folder or a Redis nobody counts hits: there the longest come first.

        Example: pagetier top --limit 10
        """
        with opened_source(server, cache, load, offline) as source:
            answer = source.top(own.limit)
        if server.as_json:
            typer.echo(json.dumps(answer, ensure_ascii=False, indent=2))
            return
        tree = Tree(f"domain {answer['domain'][:12]}")
        for prefix in answer["prefixes"]:
            _grow(tree, prefix)
        Console().print(tree)
        if not answer["prefixes"]:
            typer.echo("Nothing is cached yet.")

    return command(top, TopFlags, ServerFlags, OfflineFlags, CacheFlags)


def _grow(tree: Tree, prefix: dict[str, Any]) -> None:
    count = prefix["hits"]
    hits = "" if count is None else f"[bold]{count:,}[/bold] hit{'s' if count != 1 else ''}, "
    pinned = ", pinned" if prefix.get("pinned") else ""
    facts = (
        f"{hits}{prefix['num_tokens']:,} tokens, {format_size(prefix['bytes'])}, {' '.join(prefix['tiers'])}{pinned}"
    )
    text = shown_text(prefix["text"])
    shown = f"{text[:SHOWN_CHARS]}…" if len(text) > SHOWN_CHARS else text or prefix["key"][:12]
    branch = tree.add(f"{escape(shown)}  [dim]{facts}[/dim]")
    for child in prefix["children"]:
        _grow(branch, child)
