"""What is asked of a `pagetier serve` process while something befalls a tier of its, and what may come of it: every
request is answered, with the tokens of a server without cache, in bounded time, and the tier comes back by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.engine.server.real_server import RealServer

FLAGS = ("--dtype", "float32", "--kv-cache-memory", "48MiB")  # 1,000 tokens on the device
LOAD_BUDGET_S = 1.0  # the default of --kv-load-budget-ms
TOLERANCE = 10.0  # on a machine that does other things too
BACK_S = 120.0
NUM_PROMPTS = 6


@dataclass
class Replies:
    """What the requests of one kind of fault came to. hits: tokens by tier."""

    texts: dict[int, str] = field(default_factory=dict)
    slowest_s: float = 0.0
    hits: dict[str, int] = field(default_factory=dict)
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


def ask_all(client: httpx.Client, numbers: Iterable[int] = range(NUM_PROMPTS), num_rounds: int = 2) -> Replies:
    """Every prompt, two at a time, again and again. The device holds two of them at most: they come from below."""
    replies = Replies()
    for _ in range(num_rounds):
        with ThreadPoolExecutor(2) as pool:
            for number, done in [(number, pool.submit(ask, client, number)) for number in numbers]:
                try:
                    text, by_tier, took_s = done.result()
                except httpx.HTTPError as error:
                    replies.failed.append(f"{number}: {error!r}")
                    continue
                assert replies.texts.setdefault(number, text) == text
                replies.slowest_s = max(replies.slowest_s, took_s)
                for tier, num_tokens in by_tier.items():
                    replies.hits[tier] = replies.hits.get(tier, 0) + num_tokens
    return replies


def assert_unharmed(replies: Replies, reference: Replies, label: str) -> None:
    """No request failed, all answers are those of the server without cache, and none took longer than a tier may."""
    bound_s = TOLERANCE * (LOAD_BUDGET_S + reference.slowest_s)
    assert not replies.failed, (label, replies.failed)
    assert replies.texts == {number: reference.texts[number] for number in replies.texts}, label
    assert replies.slowest_s < bound_s, (label, replies.slowest_s, bound_s)


def comes_back(client: httpx.Client, tier: str) -> None:
    """Ordinary traffic brings hits from the tier again, and /health says that all is well."""
    give_up_s = time.monotonic() + BACK_S
    while not (ask_all(client, num_rounds=1).hits.get(tier) and client.get("/health").json()["status"] == "ok"):
        assert time.monotonic() < give_up_s, client.get("/health").text


@contextmanager
def clients() -> Iterator[Callable[[RealServer], httpx.Client]]:
    """Makes clients; closes them at the end."""
    made: list[httpx.Client] = []

    def make(server: RealServer) -> httpx.Client:
        made.append(httpx.Client(base_url=server.url, timeout=300.0))
        return made[-1]

    yield make
    for client in made:
        client.close()
