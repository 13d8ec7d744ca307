"""The transcript in docs/cli.md: its console blocks, run against a live server and a store, and what may differ.

`python -m tests.docs.transcript` runs them and writes what they print into the document.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import httpx

from pagetier.cli import main as pagetier
from tests.engine.server.real_server import real_server
from tests.kvstore.service.store_process import store_process

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
URL = "http://127.0.0.1:8000"
FOLDER = "~/.cache/pagetier/nvme"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WIDTH = 100
# What differs between machines and moments. Everything else has to be as it is written.
VARIES = (
    (re.compile(r"\b[0-9a-f]{8,64}\b"), "<hex>"),
    (re.compile(r"\d+(\.\d+)? (ms|µs)"), "<time>"),
    (re.compile(r"\b(ok|\d+ errors?) (?=│)"), "ok "),
    (re.compile(r"^\w+: \d+ failed operations.*\n", re.MULTILINE), ""),
    (re.compile(r"\d+(\.\d+)?[KMGT]iB/s"), "<rate>"),
    (re.compile(r"up \d+:\d\d:\d\d"), "up <time>"),
    (re.compile(r"read in \d+\.\d s"), "read in <time>"),
    (re.compile(r"\b\d+ (s|min|h)\b"), "<age>"),
    (re.compile(r"\d+(\.\d+)?[KMGT]?i?B\b"), "<size>"),
    (re.compile(r"[\d,]+ tokens(?= +│ (un)?fit)"), "<length>"),
    (re.compile(r"[ ─━┏┓┡┩└┘├┤┳╇┴┼]+"), " "),
)


def blocks(text: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Each console block, and its commands with what they print."""
    for found in BLOCK.finditer(text):
        steps: list[tuple[str, str]] = []
        for line in found[1].splitlines():
            if line.startswith("$ "):
                steps.append((line[2:], ""))
            else:
                command, output = steps.pop()
                steps.append((command, output + line + "\n"))
        yield found[1], steps


@contextlib.contextmanager
def served() -> Iterator[tuple[str, Path]]:
    """The server and the store that the document starts; the server's address and their cache folder."""
    with tempfile.TemporaryDirectory(prefix="pt-", dir=os.environ.get("PAGETIER_TEST_DIR")) as folder:
        cache = Path(folder)
        # the embedded Valkey ends soon after its last user
        flags = ("--kv-tier", "nvme,redis", "--kv-redis-linger", "1", "--kv-nvme-allow-unsafe", "--dtype", "float32")
        with real_server(cache, *flags) as server, store_process(cache, "--kv-host-size", "64MiB"):
            yield server.url, cache
            server.stop()


def run(command: str, url: str, cache: Path) -> str:
    """What a command of the document prints, stderr and a failing exit code included, in the document's own words."""
    words = shlex.split(command.replace(URL, url).replace(FOLDER, str(cache / "nvme")))
    if words[0] == "curl":
        printed = _curl(words)
        _settle(url)
    else:
        printed = _pagetier(words[1:], url, cache)
    return printed.replace(url, URL).replace(str(cache / "nvme"), FOLDER)


def _pagetier(arguments: list[str], url: str, cache: Path) -> str:
    out = io.StringIO()
    environment = {"PAGETIER_URL": url, "PAGETIER_CACHE_DIR": str(cache), "COLUMNS": str(WIDTH)}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", ["pagetier", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        contextlib.suppress(SystemExit),
    ):
        pagetier()
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def _curl(words: list[str]) -> str:
    """A completion; what of it was cached."""
    body = json.loads(words[words.index("-d") + 1])
    url = next(word for word in words if word.startswith("http"))
    answer = httpx.post(url, json=body, timeout=60).json()
    return json.dumps(answer["usage"]["prompt_tokens_details"]) + "\n"


def _settle(url: str) -> None:
    """Wait until the tiers have what was put."""
    before = None
    for _ in range(100):
        now = [tier["blocks"] for tier in httpx.get(f"{url}/stats", timeout=20).json()["tiers"].values()]
        if now == before and len(set(now)) == 1:
            return
        before = now
        time.sleep(0.1)


def plain(text: str) -> list[str]:
    """The lines of an output without what may differ."""
    for pattern, word in VARIES:
        text = pattern.sub(word, text)
    return [line.strip() for line in text.splitlines() if line.strip()]


def write() -> None:
    """Run everything and put what it prints into the document."""
    text = DOCUMENT.read_text()
    with served() as (url, cache):
        for block, steps in list(blocks(text)):
            told = "".join(f"$ {command}\n{run(command, url, cache)}" for command, _ in steps)
            text = text.replace(f"```console\n{block}```", f"```console\n{told}```")
    DOCUMENT.write_text(text)


if __name__ == "__main__":
    write()
