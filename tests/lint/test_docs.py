"""What the texts say exists: relative links, `pagetier` commands and flags, and `make` targets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main

from pagetier.cli import app
from tests.lint.source_tree import ROOT, product_files, relative, suite_files

TEXTS = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "proto").glob("*.md")))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
# A command starts a line of a code block (after a prompt, an assignment or a path), or a code span.
COMMAND = re.compile(r"^\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S*/)?(pagetier|make)(?= |$)(.*)$")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


@dataclass(frozen=True, slots=True)
class Mention:
    """A command line found in a text: the program and what follows it, up to a pipe or a comment."""

    program: str
    arguments: str
    text: Path

    def __str__(self) -> str:
        return f"{relative(self.text)}: {self.program}{self.arguments}"


def mentions(text: Path) -> Iterator[Mention]:
    source = text.read_text(encoding="utf-8")
    blocks = "\n".join(FENCE.findall(source)).replace("\\\n", " ")
    spans = SPAN.findall(FENCE.sub("", source))
    for line in (*blocks.splitlines(), *spans):
        if found := COMMAND.match(line):
            yield Mention(found[1], re.split(r" [|&#;>]", found[2])[0], text)


def all_mentions(program: str) -> list[Mention]:
    return [found for text in TEXTS for found in mentions(text) if found.program == program]


# Commands are click's, which some versions of typer bring as their own copy: known here by their attributes.


def flags_of(command: Any) -> set[str]:
    names = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    return names | {"--help"}


def resolve(root: Any, words: list[str]) -> Any:
    """The command that `words` name, None when there is none; words after a command's name are its arguments."""
    for word in words:
        if not hasattr(root, "commands"):
            break
        if word not in root.commands:
            return None
        root = root.commands[word]
    return root


@pytest.mark.parametrize("text", TEXTS, ids=relative)
def test_relative_links_lead_somewhere(text: Path) -> None:
    links = [link.partition("#")[0] for link in LINK.findall(text.read_text(encoding="utf-8"))]
    dead = [link for link in links if link and "://" not in link and not (text.parent / link).exists()]
    assert not dead, f"{relative(text)} links to {dead}"


def test_pictures_in_the_texts_are_small() -> None:
    """They stay in the repository's history each time they are drawn."""
    pictures = [picture for folder in ("docs", "proto") for picture in (ROOT / folder).rglob("*.png")]
    large = [relative(picture) for picture in pictures if picture.stat().st_size > 100_000]
    assert pictures and not large, f"over 100 kB: {large}"


def test_texts_that_the_sources_name_exist() -> None:
    """A reader of a docstring or a comment can open the document that it sends him to."""
    there = {name for text in TEXTS for name in (text.name, relative(text))}
    named = re.compile(r"(?<![\w/.-])[\w-]+(?:/[\w-]+)*\.md\b")  # but no part of a URL
    dead = [
        f"{relative(source)}: {name}"
        for source in (*product_files(), *suite_files())
        if source != Path(__file__)
        for name in named.findall(source.read_text(encoding="utf-8"))
        if name not in there
    ]
    assert not dead, dead


def test_commands_and_flags_exist() -> None:
    root = typer.main.get_command(app)
    unknown = []
    for mention in all_mentions("pagetier"):
        words = [word for word in mention.arguments.split() if re.fullmatch(r"[a-z][a-z-]*", word)]
        command = resolve(root, words)
        if command is None:
            unknown.append(f"{mention}: no such command")
        elif lacking := set(FLAG.findall(mention.arguments)) - flags_of(command):
            unknown.append(f"{mention}: no flag {', '.join(sorted(lacking))}")
    assert not unknown, "\n".join(unknown)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z]+) *\?=", makefile, re.MULTILINE)) | {"PYTHON"}
    unknown = []
    for mention in all_mentions("make"):
        words = mention.arguments.split()
        wrong = [word for word in words if re.fullmatch(r"[a-z][a-z-]*", word) and word not in targets]
        wrong += [name for name in re.findall(r"(?:^| )([A-Z_]+)=", mention.arguments) if name not in variables]
        unknown += [f"{mention}: no {name}" for name in wrong]
    assert not unknown, "\n".join(unknown)


def test_the_readme_shows_both_commands() -> None:
    """Guards the search above: it must find what is certainly there."""
    assert {"serve", "test"} <= {mention.arguments.strip() for mention in all_mentions("make")}
    assert any(mention.arguments.startswith(" serve") for mention in all_mentions("pagetier"))


def test_mentions_are_found_in_blocks_and_spans(tmp_path: Path) -> None:
    text = tmp_path / "example.md"
    text.write_text(
        "Run `pagetier stats --json`.\n\n```sh\n$ pagetier serve --model x \\\n    --kv-tier nvme | tee log\n"
        "HOST=1 .venv/bin/pagetier pull y  # why\necho pagetier no\n```\n"
    )
    assert [(found.program, found.arguments.split()) for found in mentions(text)] == [
        ("pagetier", ["serve", "--model", "x", "--kv-tier", "nvme"]),
        ("pagetier", ["pull", "y"]),
        ("pagetier", ["stats", "--json"]),
    ]
