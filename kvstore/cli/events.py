"""`pagetier events`: what comes into the tiers and leaves them, as it happens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from pagetier.kvstore.cli.live import LiveServer
from pagetier.kvstore.cli.options import ServerFlags
from pagetier.kvstore.config import without_login


@dataclass(frozen=True, slots=True)
class EventsFlags:
    """Of `events` alone."""

    count: Annotated[int, typer.Option("--count", min=0, help="End after so many; 0: go on until interrupted.")] = 0


def events(own: EventsFlags, server: ServerFlags) -> None:
    """Follow what comes into the tiers and leaves them, from now on: a line for each KV event.

    Of a live server or a store service. Exit code 1 when that ends.

    Example: pagetier events --json
    """
    seen = 0
    for event in _followed(server):
        typer.echo(json.dumps(event) if server.as_json else event_line(event))
        seen += 1
        if seen == own.count:
            return
    typer.echo(f"pagetier: {server.store or without_login(server.url)} ended", err=True)
    raise typer.Exit(1)


def _followed(server: ServerFlags) -> Iterator[dict[str, Any]]:
    if server.store is None:
        return LiveServer(server.url, server.api_key, server.admin_token).lines("/events", admin=True)
    from pagetier.kvstore.cli.store_place import StorePlace  # gRPC takes a while to load

    return StorePlace(server.store).events()


def event_line(event: dict[str, Any]) -> str:
    """One event for people."""
    if event["kind"] == "lost":
        return f"({event['events']:,} events were lost: they came faster than they were read)"
    clock = time.strftime("%H:%M:%S", time.localtime(event["time_s"]))
    told = f"{clock}  {event['tier']:<6}  {event['kind']:<7}"
    if event["kind"] == "cleared":
        return f"{told}  everything"
    blocks = f"{event['num_blocks']:,} block{'s' if event['num_blocks'] != 1 else ''}"
    keys = " ".join(key[:12] for key in event["keys"][:3]) + (" …" if event["num_blocks"] > 3 else "")
    span = f", tokens {event['tokens'][0]}-{event['tokens'][1]}" if "tokens" in event else ""
    return f"{told}  {blocks}{span}  {keys}"
