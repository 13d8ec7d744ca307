"""docs/cli.md shows what the commands print, and names all of them."""

from __future__ import annotations

import pytest
import typer.main

from pagetier.cli import app
from tests.docs.transcript import DOCUMENT, blocks, plain, run, served


@pytest.mark.timeout(400)  # a server and a store start; a busy machine takes its time
def test_every_command_of_the_transcript_prints_what_is_written() -> None:
    different = []
    with served() as (url, cache):
        for _, steps in blocks(DOCUMENT.read_text()):
            for command, written in steps:
                printed = run(command, url, cache)
                if plain(printed) != plain(written):
                    different.append(f"$ {command}\nwritten:\n{written}\nprinted:\n{printed}")
    assert not different, "\n".join([*different, "python -m tests.docs.transcript writes it anew"])


def test_every_command_is_described_with_an_example() -> None:
    text = DOCUMENT.read_text()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    missing = [name for name in commands if f"`pagetier {name}" not in text and f"$ pagetier {name}" not in text]
    assert not missing
    without = [name for name, command in commands.items() if "Example: pagetier" not in (command.help or "")]
    assert not without, "each --help has an example"
