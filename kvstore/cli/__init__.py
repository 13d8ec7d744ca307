"""Commands that ask what is cached, where, and whether it helped. One file each; none of them loads torch."""

from __future__ import annotations

import typer

from pagetier.kvstore.cli.asked import LoadTextModel
from pagetier.kvstore.cli.doctor import doctor
from pagetier.kvstore.cli.events import events
from pagetier.kvstore.cli.pins import make_purge, pin, unpin
from pagetier.kvstore.cli.query import make_query, make_top
from pagetier.kvstore.cli.stats import stats
from pagetier.kvstore.cli.verify import verify


def add_commands(app: typer.Typer, load: LoadTextModel) -> None:
    """Register this package's commands. load: a model's tokenizer, for commands that read text without a server."""
    app.command("stats")(stats)
    app.command("query")(make_query(load))
    app.command("top")(make_top(load))
    app.command("pin")(pin)
    app.command("unpin")(unpin)
    app.command("purge")(make_purge(load))
    app.command("events")(events)
    app.command("verify")(verify)
    app.command("doctor")(doctor)
