"""A `pagetier serve` process over a Valkey that everything happens to: every request is answered, with the tokens of a
server without cache, in bounded time, and the tier comes back by itself.

Slow: some minutes. The quick part, on an engine in the test's own process, is in test_faults.py.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.server.real_server import RealServer, real_server
from tests.kvstore.valkey import Valkey, own_valkey, short_dir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LOAD_BUDGET_S = 1.0  # the default of --kv-load-budget-ms
TOLERANCE = 10.0  # on a machine that does other things too
BACK_S = 120.0
NUM_PROMPTS = 6
MEMORY = "--kv-cache-memory"
PASSWORD = "first"


@dataclass
class Replies:
    """What the requests of one kind of fault came to."""

    texts: dict[int, str]
    slowest_s: float = 0.0
    from_redis: int = 0
    failed: list[str] = field(default_factory=list)


def prompt(number: int) -> str:
    """Some 400 tokens, no two alike from the start on."""
    return (
        f"{number}. " + f"Chapter {number} tells how the fox of hill {number} met its neighbours. " * 24 + "The end was"
    )


def ask(client: httpx.Client, number: int) -> tuple[str, dict[str, int], float]:
    started_s = time.monotonic()
    body = {"model": "smollm2", "prompt": prompt(number), "temperature": 0, "max_tokens": 8}
    answer = client.post("/v1/completions", json=body)
    answer.raise_for_status()
    said: Any = answer.json()
    by_tier = said["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    return said["choices"][0]["text"], by_tier, time.monotonic() - started_s


def ask_all(client: httpx.Client, num_rounds: int = 2) -> Replies:
    """Every prompt, two at a time, again and again. The device holds two of them at most: they come from below."""
    replies = Replies({})
    for _ in range(num_rounds):
        with ThreadPoolExecutor(2) as pool:
            for number, done in enumerate([pool.submit(ask, client, number) for number in range(NUM_PROMPTS)]):
                try:
                    text, by_tier, took_s = done.result()
                except httpx.HTTPError as error:
                    replies.failed.append(f"{number}: {error!r}")
                    continue
                assert replies.texts.setdefault(number, text) == text
                replies.slowest_s = max(replies.slowest_s, took_s)
                replies.from_redis += by_tier.get("redis", 0)
    return replies


def comes_back(client: httpx.Client) -> None:
    """Ordinary traffic brings hits from Redis again, and /health says that all is well."""
    give_up_s = time.monotonic() + BACK_S
    while not (ask_all(client, 1).from_redis and client.get("/health").json()["status"] == "ok"):
        assert time.monotonic() < give_up_s, client.get("/health").text


@pytest.fixture
def cache() -> Iterator[Path]:
    folder = short_dir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def client_of() -> Iterator[Callable[[RealServer], httpx.Client]]:
    clients: list[httpx.Client] = []

    def make(server: RealServer) -> httpx.Client:
        clients.append(httpx.Client(base_url=server.url, timeout=300.0))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def freeze(valkey: Valkey) -> Callable[[], object]:
    valkey.freeze()
    return valkey.thaw


def kill(valkey: Valkey) -> Callable[[], object]:
    valkey.kill()
    return valkey.start


def restart(valkey: Valkey) -> Callable[[], object]:
    valkey.kill()
    valkey.start()
    return lambda: None


def fill(valkey: Valkey) -> Callable[[], object]:
    """No room for anything new, and nothing is evicted for it."""
    client = valkey.client(password=PASSWORD)
    client.flushall()
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", 1 << 20)
    return lambda: client.config_set("maxmemory", 0)


def change_password(valkey: Valkey) -> Callable[[], object]:
    """Those who are in are thrown out, and come in no more."""
    client = valkey.client(password=PASSWORD)
    client.config_set("requirepass", "second")
    client.client_kill_filter(_type="normal", skipme=True)
    return lambda: client.config_set("requirepass", PASSWORD)


def test_whatever_befalls_valkey_every_request_is_answered(
    cache: Path, client_of: Callable[[RealServer], httpx.Client]
) -> None:
    flags = ("--dtype", "float32", MEMORY, "48MiB")  # 1,000 tokens on the device
    with real_server(cache, *flags, "--no-enable-prefix-caching") as server:
        reference = ask_all(client_of(server))
        assert not reference.failed
        assert server.stop() == 0
    with own_valkey(requirepass=PASSWORD) as valkey:
        url = f"unix://:{PASSWORD}@{valkey.socket_path}"
        with real_server(cache, *flags, "--kv-tier", "redis", "--kv-redis-url", url) as server:
            client = client_of(server)
            comes_back(client)
            bound_s = TOLERANCE * (LOAD_BUDGET_S + reference.slowest_s)
            for strike in (freeze, kill, restart, fill, change_password):
                mend = strike(valkey)
                replies = ask_all(client)
                mend()
                assert not replies.failed, (strike.__name__, replies.failed)
                assert replies.texts == reference.texts, strike.__name__
                assert replies.slowest_s < bound_s, (strike.__name__, replies.slowest_s, bound_s)
                comes_back(client)
            assert server.stop() == 0
