"""Options that several commands have, worded once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:8000"

UrlOption = Annotated[str, typer.Option("--url", envvar="PAGETIER_URL", help="The live server to ask.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for machines.")]
ApiKeyOption = Annotated[
    str | None, typer.Option("--api-key", envvar="PAGETIER_API_KEY", help="The server's, where it has one.")
]
AdminTokenOption = Annotated[
    str | None,
    typer.Option(
        "--admin-token", envvar="PAGETIER_ADMIN_TOKEN", help="The server's, needed from another machine or a container."
    ),
]
NvmeOption = Annotated[
    Path | None, typer.Option("--nvme", metavar="DIR", help="A folder of --kv-nvme-path; no server is needed.")
]
RedisOption = Annotated[
    str | None,
    typer.Option("--redis", metavar="URL", help="As for serve's --kv-redis-url, or embedded; no server is needed."),
]
MacKeyOption = Annotated[
    Path | None, typer.Option("--kv-mac-key", metavar="FILE", help="The secret that the records were stored with.")
]
