"""Commands that ask what is cached, where, and whether it helped. One file each; none of them loads torch."""

from __future__ import annotations

import typer

from pagetier.kvstore.cli.asked import LoadTextModel
from pagetier.kvstore.cli.doctor import doctor
from pagetier.kvstore.cli.events import EventsFlags, events
from pagetier.kvstore.cli.options import OfflineFlags, ServerFlags
from pagetier.kvstore.cli.pins import make_pin, make_purge, make_unpin
from pagetier.kvstore.cli.query import make_query, make_top
from pagetier.kvstore.cli.stats import StatsFlags, stats
from pagetier.kvstore.cli.verify import verify
from pagetier.kvstore.flags import command


def add_commands(app: typer.Typer, load: LoadTextModel) -> None:
    """Register this package's commands. load: a model's tokenizer, for commands that read text without a server."""
    app.command("stats")(command(stats, StatsFlags, ServerFlags))
    app.command("query")(make_query(load))
    app.command("top")(make_top(load))
    app.command("pin")(make_pin(load))
    app.command("unpin")(make_unpin(load))
    app.command("purge")(make_purge(load))
    app.command("events")(command(events, EventsFlags, ServerFlags))
    app.command("verify")(verify)
    app.command("doctor")(command(doctor, ServerFlags, OfflineFlags))
