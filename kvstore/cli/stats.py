"""`pagetier stats`: hit rates by tier of a live server or a store service, once or as they change."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pagetier.kvstore.cli.live import LiveServer
from pagetier.kvstore.cli.options import ServerFlags
from pagetier.kvstore.config import format_size
from pagetier.kvstore.errors import PagetierError

Ask = Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class StatsFlags:
    """Of `stats` alone."""

    watch: Annotated[bool, typer.Option("--watch", help="Go on until interrupted; into a pipe, a line each.")] = False
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0


def stats(own: StatsFlags, server: ServerFlags) -> None:
    """Show hit rates by tier: which share of the looked-up prompt tokens came from where.

    A tier's rate is its hit tokens over all lookup tokens, so the tiers' rates add up to the total. With --watch, rates
    are those since the last look. A store service answers for each cache that engines use it for.

    Example: pagetier stats --watch
    """
    with _asking(server) as ask:
        if not own.watch:
            answer = ask()
            if server.as_json:
                typer.echo(json.dumps(answer, indent=2))
            else:
                Console().print(render(answer))
        else:
            _watch(_looks(ask, own.interval), server.as_json)


def _watch(looks: Iterator[Look], as_json: bool) -> None:
    """Until interrupted."""
    if as_json:
        for look in looks:
            typer.echo(json.dumps(look.checked()))
    elif sys.stdout.isatty():
        with Live(console=Console(), auto_refresh=False) as live:
            for look in looks:
                live.update(_watched(look), refresh=True)
    else:
        for look in looks:
            for line in watch_lines(look):
                typer.echo(line)


@contextlib.contextmanager
def _asking(server: ServerFlags) -> Iterator[Ask]:
    """What answers like `GET /stats`."""
    if server.store is None:
        live = LiveServer(server.url, server.api_key)
        yield lambda: live.get("/stats")
        return
    from pagetier.kvstore.cli.store_place import StorePlace  # gRPC takes a while to load

    with contextlib.closing(StorePlace(server.store)) as place:
        yield place.stats


@dataclass(frozen=True, slots=True)
class Look:
    """One answer of a server, or why there is none, and the answer before it. time_s: wall clock; passed_s: since the
    one before.
    """

    answer: dict[str, Any] | None
    error: PagetierError | None
    before: dict[str, Any] | None
    time_s: float
    passed_s: float

    def checked(self) -> dict[str, Any]:
        """The answer. Raises PagetierError."""
        if self.answer is None:
            assert self.error is not None, "one of the two is there"
            raise self.error
        return self.answer


def _looks(ask: Ask, interval_s: float) -> Iterator[Look]:
    """Ask again and again; one that does not answer is told and asked again, since servers are restarted."""
    before: dict[str, Any] | None = None
    last_s = time.monotonic()
    while True:
        now_s = time.monotonic()
        answer, failed = None, None
        try:
            answer = ask()
        except PagetierError as error:
            failed = error
        yield Look(answer, failed, before, time.time(), max(1e-9, now_s - last_s))
        before, last_s = answer, now_s
        time.sleep(interval_s)


def _domains(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The one answer of a server, or one for each domain of a store."""
    listed: list[dict[str, Any]] = answer.get("domains", [answer])
    return listed


def _before(one: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any] | None:
    """What the same server said before; None when it began anew since."""
    for other in _domains(before) if before is not None else ():
        if other["domain"] == one["domain"] and other["uptime_s"] <= one["uptime_s"]:
            return other
    return None


def watch_lines(look: Look) -> Iterator[str]:
    """A look as plain lines, one for each domain: hit rates since the last look, and what went wrong."""
    clock = time.strftime("%H:%M:%S", time.localtime(look.time_s))
    if look.answer is None:
        yield f"{clock} {look.error}"
        return
    for one in _domains(look.answer):
        change = Change(one, _before(one, look.before), look.passed_s)
        parts = [clock, one["domain"][:12], f"lookup {change.lookup_tokens_per_s:,.0f} tok/s", f"hit {change.rate()}"]
        parts += [f"{name} {change.rate(name)}" for name in one["tiers"]]
        parts += [f"{name} {_state(tier)}" for name, tier in one["tiers"].items() if _state(tier) != "ok"]
        yield "  ".join(parts)


@dataclass(frozen=True, slots=True)
class Change:
    """What happened between two answers of one domain; since the start where there is none before."""

    now: dict[str, Any]
    before: dict[str, Any] | None
    passed_s: float

    def _since(self, *path: str) -> float:
        """By how much a counter grew."""
        return _counter(self.now, path) - (0.0 if self.before is None else _counter(self.before, path))

    @property
    def lookup_tokens_per_s(self) -> float:
        return self._since("lookup", "lookup_tokens") / self._passed_s

    def rate(self, tier: str | None = None) -> str:
        """The share of the lookup tokens that `tier`, or any, served; a dash when there were none."""
        looked_up = self._since("lookup", "lookup_tokens")
        hits = self._since("lookup", "hit_tokens") if tier is None else self._since("tiers", tier, "hit_tokens")
        return f"{hits / looked_up:.1%}" if looked_up > 0 else "-"

    def per_s(self, tier: str, field: str) -> float:
        """A tier's counter, a second."""
        return self._since("tiers", tier, field) / self._passed_s

    @property
    def _passed_s(self) -> float:
        return max(1e-9, float(self.now["uptime_s"]) if self.before is None else self.passed_s)


def _counter(answer: dict[str, Any], path: tuple[str, ...]) -> float:
    """A number in an answer; 0 where there is none."""
    found: Any = answer
    for name in path:
        found = found.get(name, {})
    return float(found) if isinstance(found, int | float) else 0.0


def _watched(look: Look) -> RenderableType:
    """The live table: totals, and beside them what happened since the last look."""
    if look.answer is None:
        return Text(str(look.error), style="red")
    changes = [Change(one, _before(one, look.before), look.passed_s) for one in _domains(look.answer)]
    return Group(*(_table(change.now, change) for change in changes), *_of_service(look.answer))


def render(answer: dict[str, Any]) -> RenderableType:
    """The stats of one server, or of each domain of a store, as tables."""
    return Group(*(_table(one) for one in _domains(answer)), *_of_service(answer))


def _of_service(answer: dict[str, Any]) -> Iterator[Text]:
    """What a store says of itself."""
    service = answer.get("service")
    if service is None:
        return
    if not answer["domains"]:
        yield Text("No engine has used this store since it started; serve with --kv-store-url to use it.")
    window = f"{format_size(service['window_bytes'])} of {format_size(service['window_capacity_bytes'])}"
    yield Text(f"clients {service['sessions']:,}, slots on loan {service['leases']:,}, window in use {window}")


def _table(one: dict[str, Any], change: Change | None = None) -> Table:
    """change: adds columns of what happened since the last look."""
    lookup = one["lookup"]
    table = Table(
        title=f"{one.get('model', 'store')}, domain {one['domain'][:12]}, up {_duration(one['uptime_s'])}",
        caption=(
            f"{lookup['hit_tokens']:,} of {lookup['lookup_tokens']:,} lookup tokens were hits; "
            f"preemptions {sum(one['preemptions'].values())}, harmful hits {one['harmful_hits']}"
            f"{_given_up(one.get('given_up_loads', 0))}{_verified(one.get('verify', {}))}"
        ),
        show_footer=True,
    )
    table.add_column("tier", footer="all")
    table.add_column("hit rate", justify="right", footer=f"{lookup['hit_rate']:.1%}")
    table.add_column("hit tokens", justify="right", footer=f"{lookup['hit_tokens']:,}")
    for name in ("blocks", "size", "evicted"):
        table.add_column(name, justify="right")
    if change is not None:
        table.add_column("rate now", justify="right", footer=change.rate())
        table.add_column("tok/s", justify="right", footer=f"{change.lookup_tokens_per_s:,.0f}")
    table.add_column("state")
    for name, tier in one["tiers"].items():
        table.add_row(
            name,
            f"{tier['hit_rate']:.1%}",
            f"{tier['hit_tokens']:,}",
            f"{tier['blocks']:,}",
            format_size(tier["bytes"]),
            f"{tier['evictions']:,}",
            *(() if change is None else (change.rate(name), f"{change.per_s(name, 'hit_tokens'):,.0f}")),
            _state(tier),
        )
    return table


def _given_up(num_loads: int) -> str:
    """Loads that a tier never answered, when there were any."""
    return f", loads given up {num_loads:,}" if num_loads else ""


def _verified(verify: dict[str, int]) -> str:
    """What the shadow check found, when it is on."""
    if not verify.get("shadow_one_in"):
        return ""
    return f"; shadow check: {verify['differing']:,} of {verify['checked']:,} checked blocks were wrong"


def _state(tier: dict[str, Any]) -> str:
    """What is wrong with a tier, in words; ok when nothing is."""
    faults = [f"{tier['errors']:,} error{'s' if tier['errors'] != 1 else ''}"] if tier["errors"] else []
    faults += [f"{tier['corrupt']:,} corrupt"] if tier["corrupt"] else []
    if tier["breaker"] not in (None, "closed"):
        faults.insert(0, f"breaker {tier['breaker']}")
    return ", ".join(faults) or "ok"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
