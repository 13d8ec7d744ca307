"""Options that several commands have, worded once: one by one, and the groups in which commands take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:8000"
ASKED = "Whom to ask"

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for machines.")]
ApiKeyOption = Annotated[
    str | None,
    typer.Option("--api-key", envvar="PAGETIER_API_KEY", help="The server's, where it has one.", rich_help_panel=ASKED),
]
NvmeOption = Annotated[
    Path | None,
    typer.Option(
        "--nvme", metavar="DIR", help="A folder of --kv-nvme-path; no server is needed.", rich_help_panel=ASKED
    ),
]
RedisOption = Annotated[
    str | None,
    typer.Option(
        "--redis",
        metavar="URL",
        help="As for serve's --kv-redis-url, or embedded; no server is needed.",
        rich_help_panel=ASKED,
    ),
]
MacKeyOption = Annotated[
    Path | None, typer.Option("--kv-mac-key", metavar="FILE", help="The secret that the records were stored with.")
]
TierOption = Annotated[
    str | None, typer.Option("--tier", metavar="NAMES", help="These tiers only, e.g. nvme,redis; default: all.")
]


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """Who is asked: a live server, or where `store` is given a store service."""

    url: Annotated[
        str, typer.Option("--url", envvar="PAGETIER_URL", help="The live server to ask.", rich_help_panel=ASKED)
    ] = DEFAULT_URL
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="URL",
            help="A `pagetier store` instead: local, unix:///path, grpc://host:port or grpcs://host:port?ca=FILE; with "
            "?token_file=FILE where it has a token.",
            rich_help_panel=ASKED,
        ),
    ] = None
    api_key: ApiKeyOption = None
    admin_token: Annotated[
        str | None,
        typer.Option(
            "--admin-token",
            envvar="PAGETIER_ADMIN_TOKEN",
            help="The server's, for what shows or changes everybody's from another machine or a container.",
            rich_help_panel=ASKED,
        ),
    ] = None
    as_json: JsonOption = False


@dataclass(frozen=True, slots=True)
class CacheFlags:
    """Which cache, and whose tokenizer: for all but a live server, which knows both."""

    domain: Annotated[
        str | None,
        typer.Option(
            "--domain",
            metavar="HEX",
            help="Which cache identity, by its first digits, where there are several.",
            rich_help_panel=ASKED,
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option("--model", help="Without a server: whose tokenizer reads and shows text.", rich_help_panel=ASKED),
    ] = None


@dataclass(frozen=True, slots=True)
class OfflineFlags:
    """What can be read without anybody who serves it."""

    nvme: NvmeOption = None
    redis: RedisOption = None


def all_of(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(names[:-1])] * (len(names) > 1) + list(names[-1:]))
