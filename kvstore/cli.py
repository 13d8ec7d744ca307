"""Commands that need no engine: `pagetier stats`. Talks HTTP to a live server."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pagetier.kvstore.config import format_size
from pagetier.kvstore.errors import PagetierError

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 20.0  # more than the server gives its engine to answer

UrlOption = Annotated[str, typer.Option("--url", envvar="PAGETIER_URL", help="The live server to ask.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for machines.")]


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    app.command("stats")(stats)


def stats(
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until interrupted.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between refreshes.")] = 1.0,
) -> None:
    """Show hit rates by tier: which share of the looked-up prompt tokens came from where.

    A tier's rate is its hit tokens over all lookup tokens, so the tiers' rates add up to the total.

    Example: pagetier stats --watch
    """
    if as_json:
        while True:
            typer.echo(json.dumps(fetch_stats(url), indent=None if watch else 2))
            if not watch:
                return
            time.sleep(interval)
    console = Console()
    if not watch:
        console.print(render(fetch_stats(url)))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                shown = render(fetch_stats(url))
            except PagetierError as error:
                shown = Text(str(error), style="red")
            live.update(shown, refresh=True)
            time.sleep(interval)


def fetch_stats(url: str) -> dict[str, Any]:
    """The server's GET /stats. Raises PagetierError that says what to do."""
    try:
        answer = httpx.get(f"{url.rstrip('/')}/stats", timeout=TIMEOUT_S)
        answer.raise_for_status()
        fields = answer.json()
    except httpx.HTTPStatusError as error:
        raise PagetierError(f"{url} answered {error.response.status_code}: {_message(error.response)}") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise PagetierError(
            f"no Pagetier server answers at {url} ({reason}); start one with 'pagetier serve', or give --url"
        ) from None
    if not isinstance(fields, dict):
        raise PagetierError(f"{url}/stats is not a Pagetier server's answer; give its address with --url")
    return fields


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.reason_phrase


def render(answer: dict[str, Any]) -> RenderableType:
    """The stats of one server, or of each domain of a store, as tables."""
    return Group(*(_table(one) for one in answer.get("domains", [answer])))


def _table(one: dict[str, Any]) -> Table:
    lookup = one["lookup"]
    table = Table(
        title=f"{one.get('model', 'store')}, domain {one['domain'][:12]}, up {_duration(one['uptime_s'])}",
        caption=(
            f"{lookup['hit_tokens']:,} of {lookup['lookup_tokens']:,} lookup tokens were hits; "
            f"preemptions {sum(one['preemptions'].values())}, harmful hits {one['harmful_hits']}"
            f"{_verified(one.get('verify', {}))}"
        ),
        show_footer=True,
    )
    table.add_column("tier", footer="all")
    table.add_column("hit rate", justify="right", footer=f"{lookup['hit_rate']:.1%}")
    table.add_column("hit tokens", justify="right", footer=f"{lookup['hit_tokens']:,}")
    for name in ("blocks", "size", "evicted"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for name, tier in one["tiers"].items():
        table.add_row(
            name,
            f"{tier['hit_rate']:.1%}",
            f"{tier['hit_tokens']:,}",
            f"{tier['blocks']:,}",
            format_size(tier["bytes"]),
            f"{tier['evictions']:,}",
            _state(tier),
        )
    return table


def _verified(verify: dict[str, int]) -> str:
    """What the shadow check found, when it is on."""
    if not verify.get("shadow_one_in"):
        return ""
    return f"; shadow check: {verify['differing']:,} of {verify['checked']:,} checked blocks were wrong"


def _state(tier: dict[str, Any]) -> str:
    """What is wrong with a tier, in words; ok when nothing is."""
    faults = [f"{tier[name]:,} {name}" for name in ("errors", "corrupt") if tier[name]]
    if tier["breaker"] not in (None, "closed"):
        faults.insert(0, f"breaker {tier['breaker']}")
    return ", ".join(faults) or "ok"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
