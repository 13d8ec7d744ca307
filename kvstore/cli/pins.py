"""`pagetier pin`, `unpin` and `purge`: what is to stay, and what is to go."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer

from pagetier.kvstore.cli.asked import (
    DomainOption,
    KeyOption,
    LoadTextModel,
    MessagesOption,
    ModelOption,
    PromptOption,
    SaltOption,
    TokensOption,
    read_asked,
)
from pagetier.kvstore.cli.live import LiveServer
from pagetier.kvstore.cli.options import (
    DEFAULT_URL,
    AdminTokenOption,
    ApiKeyOption,
    JsonOption,
    NvmeOption,
    RedisOption,
    UrlOption,
)
from pagetier.kvstore.cli.query import age_text
from pagetier.kvstore.cli.sources import opened_place, reader_of
from pagetier.kvstore.config import parse_tiers
from pagetier.kvstore.errors import ConfigError

PURGE_TIMEOUT_S = 90.0

TierOption = Annotated[
    str | None, typer.Option("--tier", metavar="NAMES", help="These tiers only, e.g. nvme,redis; default: all.")
]
AllOption = Annotated[bool, typer.Option("--all", help="Everything of the cache identity.")]


def pin(
    prompt: PromptOption = None,
    messages: MessagesOption = None,
    tokens: TokensOption = None,
    key: KeyOption = None,
    salt: SaltOption = None,
    ttl: Annotated[
        float | None, typer.Option("--ttl", metavar="SECONDS", help="How long; default: until unpin.")
    ] = None,
    tier: TierOption = None,
    listed: Annotated[bool, typer.Option("--list", help="Show what is pinned instead.")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
    api_key: ApiKeyOption = None,
    admin_token: AdminTokenOption = None,
) -> None:
    """Keep a prefix in the tiers below the device: its blocks are not evicted while it is pinned.

    A pin outlives restarts and brings back what a tier lost from another one; pins take a quarter of a tier at most.

    Example: pagetier pin --prompt "You answer questions about geography in one short sentence." --ttl 86400
    """
    server = LiveServer(url, api_key, admin_token)
    if listed:
        _tell_pins(server.get("/pins", admin=True), as_json)
        return
    asked = read_asked(prompt, messages, tokens, key, salt)
    if asked.keys is not None and len(asked.keys) > 1:
        raise ConfigError("--key: got several; allowed: one, of the last block of the prefix")
    body = asked.body() | ({} if ttl is None else {"ttl_s": ttl}) | _tiers(tier)
    answer = server.post("/pin", body, admin=True)
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    typer.echo(_pin_line(answer["pin"]))


def unpin(
    prompt: PromptOption = None,
    messages: MessagesOption = None,
    tokens: TokensOption = None,
    key: Annotated[
        list[str] | None, typer.Option("--key", metavar="HEX", help="A pin's id, the key of its last block.")
    ] = None,
    salt: SaltOption = None,
    all_pins: Annotated[bool, typer.Option("--all", help="Every pin.")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
    api_key: ApiKeyOption = None,
    admin_token: AdminTokenOption = None,
) -> None:
    """Give up a pin; its blocks are evicted like all others from then on. Exit code 1 when there was none.

    Example: pagetier unpin --all
    """
    asked = read_asked(prompt, messages, tokens, key, salt, needed=not all_pins)
    body = asked.body()
    if "keys" in body:
        body["ids"] = body.pop("keys")
    if all_pins:
        body = {"all": True}
    answer = LiveServer(url, api_key, admin_token).post("/unpin", body, admin=True)
    _tell_pins(answer, as_json, "unpinned: ")
    if not answer["pins"]:
        raise typer.Exit(1)


def make_purge(load: LoadTextModel) -> Callable[..., None]:
    """The command, with whoever loads tokenizers."""

    def purge(
        prompt: PromptOption = None,
        messages: MessagesOption = None,
        tokens: TokensOption = None,
        key: KeyOption = None,
        salt: SaltOption = None,
        everything: AllOption = False,
        domain: DomainOption = None,
        tier: TierOption = None,
        url: UrlOption = DEFAULT_URL,
        nvme: NvmeOption = None,
        redis: RedisOption = None,
        model: ModelOption = None,
        as_json: JsonOption = False,
        api_key: ApiKeyOption = None,
        admin_token: AdminTokenOption = None,
    ) -> None:
        """Remove cached blocks: of a prompt, of keys, of a tenant (--salt alone), or of a whole cache identity (--all).

        Blocks that a running request uses stay on the device. A folder is purged without a server only while nobody
        serves from it.

        Example: pagetier purge --salt tenant-7
        """
        asked = read_asked(prompt, messages, tokens, key, salt, needed=not everything and salt is None)
        if everything and (asked.has_prompt or asked.keys is not None or salt is not None):
            raise ConfigError("--all: got a prompt, a key or a salt as well; allowed: one of them")
        if nvme is None and redis is None:
            body = asked.body() | _tiers(tier) | ({"all": True} if everything else {})
            body |= {} if domain is None else {"domain": domain}
            server = LiveServer(url, api_key, admin_token)
            answer = server.post("/purge", body, admin=True, timeout_s=PURGE_TIMEOUT_S)
        else:
            with opened_place(nvme, redis) as place:
                removed = reader_of(place, domain, model, load).purge(asked)
            answer = {"removed": {"redis" if nvme is None else "nvme": removed}, "errors": {}}
        if as_json:
            typer.echo(json.dumps(answer, indent=2))
        else:
            typer.echo("removed: " + (", ".join(f"{name} {n:,}" for name, n in answer["removed"].items()) or "nothing"))
            for name, reason in answer["errors"].items():
                typer.echo(f"pagetier purge: {name} was not done: {reason}", err=True)
        if answer["errors"]:
            raise typer.Exit(1)

    return purge


def _tiers(text: str | None) -> dict[str, Any]:
    return {} if text is None else {"tiers": list(parse_tiers(text, "--tier"))}


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
