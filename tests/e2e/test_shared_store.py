"""Two servers share a prompt through one `pagetier store`, or one Valkey: the second's first request of it is a hit by
the right tier, as `query` says before and `stats` after. The store may be killed: requests are answered, hits return.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.server.real_server import RealServer, real_server
from tests.kvstore.service.store_process import store_process
from tests.kvstore.valkey import own_valkey, short_dir

SYSTEM = " ".join(f"Rule {i}: the keeper of house {i} answers in one short sentence." for i in range(140))
BLOCK, PATIENCE_S = 16, 60.0


@pytest.fixture
def folder() -> Iterator[Path]:
    path = short_dir()
    yield path
    shutil.rmtree(path, ignore_errors=True)


def store_in(folder: Path) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    flags = ("--socket", str(folder / "s"), "--kv-tier", "host,nvme", "--kv-host-size", "512MiB")
    return store_process(folder, *flags, "--kv-nvme-path", str(folder / "nvme"), "--kv-nvme-size", "1GiB")


def serve(folder: Path, *flags: str) -> contextlib.AbstractContextManager[RealServer]:
    cache = Path(folder / f"server-{len(list(folder.iterdir()))}")
    cache.mkdir()
    return real_server(cache, "--kv-cache-memory", "256MiB", *flags)


def post(server: RealServer, path: str, question: str) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": f"{SYSTEM} {question}"}
    if path == "/v1/completions":
        body |= {"model": "smollm2", "temperature": 0, "max_tokens": 4}
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE_S)
    answer.raise_for_status()
    fields: dict[str, Any] = answer.json()
    return fields


def cached(server: RealServer, question: str) -> dict[str, int]:
    """Ask; the tokens that were not computed, by tier, where there are any."""
    details = post(server, "/v1/completions", question)["usage"]["prompt_tokens_details"]
    return {tier: num for tier, num in details["cached_tokens_by_tier"].items() if num}


def tiers_of(server: RealServer) -> dict[str, Any]:
    tiers: dict[str, Any] = httpx.get(f"{server.url}/stats", timeout=PATIENCE_S).json()["tiers"]
    return tiers


def until_stored(server: RealServer, tier: str, question: str) -> int:
    """Wait until `query` finds the prompt's full blocks in a tier; the tokens that it says would be hits."""
    limit_s = time.monotonic() + PATIENCE_S
    while True:
        found = post(server, "/query", question)
        num_full = (found["num_tokens"] - 1) // BLOCK
        if all(tier in block["tiers"] for block in found["blocks"][:num_full]):
            return int(found["hit_tokens"])
        assert time.monotonic() < limit_s, found["blocks"][:2]
        time.sleep(0.1)


def share(first: RealServer, second: RealServer, tier: str) -> int:
    """The second server's first request of the prompt; its hit tokens."""
    assert cached(first, "Who?") == {}
    expected = until_stored(second, tier, "Who?")
    assert expected >= 1900 and expected % BLOCK == 0
    assert cached(second, "Who?") == {tier: expected}
    assert tiers_of(second)[tier]["hit_tokens"] == expected
    return expected


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_servers_share_a_prompt_through_one_store_which_may_be_killed(folder: Path) -> None:
    flags = ("--kv-store-url", f"unix://{folder}/s")
    with contextlib.ExitStack() as servers:
        with store_in(folder) as store:
            first = servers.enter_context(serve(folder, *flags))
            second = servers.enter_context(serve(folder, *flags))
            expected = share(first, second, "host")
            store.kill()
            store.wait()
        assert set(cached(first, "Where?")) <= {"device"}
        third = servers.enter_context(serve(folder, *flags))  # starts without its store
        with store_in(folder):
            limit_s = time.monotonic() + PATIENCE_S
            while tiers_of(third).get("nvme", {}).get("breaker") != "closed":
                assert time.monotonic() < limit_s, "the server does not find its store"
                time.sleep(0.1)
            assert post(third, "/query", "Who?")["hit_tokens"] == expected
            assert cached(third, "Who?") == {"nvme": expected}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_servers_share_a_prompt_through_one_valkey(folder: Path) -> None:
    with own_valkey() as valkey, contextlib.ExitStack() as servers:
        flags = ("--kv-tier", "redis", "--kv-redis-url", valkey.url)
        first, second = (servers.enter_context(serve(folder, *flags)) for _ in range(2))
        share(first, second, "redis")
