"""`pagetier events`: what comes into the tiers and leaves them, as it happens."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from pagetier.kvstore.cli.live import LiveServer
from pagetier.kvstore.cli.options import DEFAULT_URL, AdminTokenOption, ApiKeyOption, JsonOption, UrlOption


def events(
    url: UrlOption = DEFAULT_URL,
    count: Annotated[int, typer.Option("--count", min=0, help="End after so many; 0: go on until interrupted.")] = 0,
    as_json: JsonOption = False,
    api_key: ApiKeyOption = None,
    admin_token: AdminTokenOption = None,
) -> None:
    """Follow KV events of a live server: blocks stored, removed and cleared, by tier; a line each.

    Exit code 1 when the server ends.

    Example: pagetier events --json
    """
    server = LiveServer(url, api_key, admin_token)
    seen = 0
    for event in server.lines("/events", admin=True):
        typer.echo(json.dumps(event) if as_json else event_line(event))
        seen += 1
        if seen == count:
            return
    typer.echo(f"pagetier: {server.shown} ended", err=True)
    raise typer.Exit(1)


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
