"""`pagetier pin`, `unpin` and `purge`: what is to stay, and what is to go."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from pagetier.kvstore.cli.asked import AskedFlags, LoadTextModel
from pagetier.kvstore.cli.options import CacheFlags, OfflineFlags, ServerFlags, TierOption
from pagetier.kvstore.cli.query import age_text
from pagetier.kvstore.cli.sources import opened_pins, opened_source
from pagetier.kvstore.config import parse_tiers
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.flags import command


@dataclass(frozen=True, slots=True)
class PinFlags:
    """Of `pin` alone."""

    ttl: Annotated[float | None, typer.Option("--ttl", metavar="SECONDS", help="How long; default: until unpin.")] = (
        None
    )
    tier: TierOption = None
    listed: Annotated[bool, typer.Option("--list", help="Show what is pinned instead.")] = False


@dataclass(frozen=True, slots=True)
class UnpinFlags:
    """Of `unpin` alone."""

    all_pins: Annotated[bool, typer.Option("--all", help="Every pin.")] = False


@dataclass(frozen=True, slots=True)
class PurgeFlags:
    """Of `purge` alone."""

    everything: Annotated[bool, typer.Option("--all", help="Everything of the cache identity.")] = False
    tier: TierOption = None


def make_pin(load: LoadTextModel) -> Callable[..., None]:
    """The command, with whoever loads tokenizers."""

    def pin(asked: AskedFlags, own: PinFlags, server: ServerFlags, cache: CacheFlags) -> None:
        """Keep a prefix in the tiers below the device: its blocks are not evicted while it is pinned.

        A pin outlives restarts and brings back what a tier lost from another one; pins take a quarter of a tier at
        most. --key: the last block of the prefix.

        Example: pagetier pin --prompt "You answer questions about geography in one short sentence." --ttl 86400
        """
        if own.listed:
            with opened_pins(server, cache, load) as source:
                _tell_pins(source.pins(), server.as_json)
            return
        prefix = asked.read()
        if prefix.keys is not None and len(prefix.keys) > 1:
            raise ConfigError("--key: got several; allowed: one, of the last block of the prefix")
        tiers = _tiers(own.tier)
        with opened_pins(server, cache, load) as source:
            answer = source.pin(prefix, own.ttl, tiers)
        typer.echo(json.dumps(answer, indent=2) if server.as_json else _pin_line(answer["pin"]))

    return command(pin, AskedFlags, PinFlags, ServerFlags, CacheFlags)


def make_unpin(load: LoadTextModel) -> Callable[..., None]:
    """The command, with whoever loads tokenizers."""

    def unpin(asked: AskedFlags, own: UnpinFlags, server: ServerFlags, cache: CacheFlags) -> None:
        """Give up a pin; its blocks are evicted like all others from then on. Exit code 1 when there was none.

        --key: a pin's id, as pin --list --json shows it.

        Example: pagetier unpin --all
        """
        prefix = asked.read(needed=not own.all_pins)
        with opened_pins(server, cache, load) as source:
            answer = source.unpin(None if own.all_pins else prefix)
        _tell_pins(answer, server.as_json, "unpinned: ")
        if not answer["pins"]:
            raise typer.Exit(1)

    return command(unpin, AskedFlags, UnpinFlags, ServerFlags, CacheFlags)


def make_purge(load: LoadTextModel) -> Callable[..., None]:
    """The command, with whoever loads tokenizers."""

    def purge(
        asked: AskedFlags, own: PurgeFlags, server: ServerFlags, offline: OfflineFlags, cache: CacheFlags
    ) -> None:
        """Remove cached blocks: of a prompt, of keys, of a tenant (--salt alone), or of a whole cache identity (--all).

        Blocks that a running request uses stay on the device. A folder is purged without a server only while nobody
        serves from it.

        Example: pagetier purge --salt tenant-7
        """
        wanted = asked.read(needed=not own.everything and asked.salt is None)
        if own.everything and wanted.body():
            raise ConfigError("--all: got a prompt, a key or a salt as well; allowed: one of them")
        tiers = _tiers(own.tier)
        with opened_source(server, cache, load, offline) as source:
            answer = source.purge(wanted, tiers)
        if server.as_json:
            typer.echo(json.dumps(answer, indent=2))
        else:
            typer.echo("removed: " + (", ".join(f"{name} {n:,}" for name, n in answer["removed"].items()) or "nothing"))
            for name, reason in answer["errors"].items():
                typer.echo(f"pagetier purge: {name} was not done: {reason}", err=True)
        if answer["errors"]:
            raise typer.Exit(1)

    return command(purge, AskedFlags, PurgeFlags, ServerFlags, OfflineFlags, CacheFlags)


def _tiers(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(parse_tiers(text, "--tier"))


def _tell_pins(answer: dict[str, Any], as_json: bool, before: str = "") -> None:
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    for one in answer["pins"]:
        typer.echo(before + _pin_line(one))
    if not answer["pins"]:
        typer.echo("nothing is pinned")


def _pin_line(one: dict[str, Any]) -> str:
    held = ", ".join(f"{name} {count:,}" for name, count in one["held"].items())
    expires = one["expires_in_s"]
    until = "until unpin" if expires is None else f"for {age_text(expires)}"
    tiers = f" in {' '.join(one['tiers'])}" if one["tiers"] else ""
    kept = f"; held now: {held} of {one['num_blocks']:,} blocks" if held else ""
    return f"{one['id'][:12]}: {one['num_tokens']:,} tokens{tiers}, {until}{kept}"
