"""Commands that ask what is cached, where, and whether it helped. One file each; none of them loads torch."""

from __future__ import annotations

import typer

from pagetier.kvstore.cli.stats import stats
from pagetier.kvstore.cli.verify import verify


def add_commands(app: typer.Typer) -> None:
    """Register this package's commands."""
    app.command("stats")(stats)
    app.command("verify")(verify)
