"""The default model, end to end: `pagetier serve` with tiers, OpenAI's client, `pagetier stats`, a restart."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pagetier.kvstore.redis.embedded import stop_embedded
from tests.engine.server.real_server import real_server

FLAGS = ("--dtype", "float32", "--kv-tier", "nvme,redis", "--kv-nvme-size", "1GiB", "--kv-redis-size", "256MiB")
LONG = "The quick brown fox jumps over the lazy dog. " * 30
MESSAGES: Any = [
    {"role": "system", "content": f"You are brief. {LONG}"},
    {"role": "user", "content": "What is the capital of France?"},
]


@pytest.fixture
def cache() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pt-"))  # short: a Unix socket lies below it
    yield folder
    stop_embedded(folder / "redis")
    shutil.rmtree(folder)


def cached(usage: Any) -> dict[str, int]:
    by_tier: dict[str, int] = usage.prompt_tokens_details.cached_tokens_by_tier
    return by_tier


@pytest.mark.timeout(240)
def test_a_model_is_served_through_every_tier(cache: Path) -> None:
    with real_server(cache, *FLAGS) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
            asked: Any = {"model": "smollm2", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
            cold = client.chat.completions.create(**asked)
            warm = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
            chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        text = cold.choices[0].message.content
        assert text is not None and "Paris" in text and "<|im_end|>" not in text
        assert warm.choices[0].message.content == text
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
        assert cached(cold.usage) == {"device": 0, "nvme": 0, "redis": 0}
        assert warm.usage is not None and chunks[-1].usage is not None
        full_blocks = warm.usage.prompt_tokens // 16 * 16
        assert full_blocks <= cached(warm.usage)["device"] < warm.usage.prompt_tokens
        assert chunks[-1].usage.completion_tokens == warm.usage.completion_tokens
        check_logprobs(warm.choices[0].logprobs)
        stats = json.loads(run("stats", "--json", "--url", server.url))
        served = cached(warm.usage)["device"] + cached(chunks[-1].usage)["device"]
        assert stats["tiers"]["device"]["hit_tokens"] == served
        assert sum(tier["hit_rate"] for tier in stats["tiers"].values()) == pytest.approx(stats["lookup"]["hit_rate"])
        assert "redis" in run("stats", "--url", server.url)
        assert server.stop() == 0
    with real_server(cache, *FLAGS) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
            again = client.chat.completions.create(**asked)
        assert again.choices[0].message.content == text
        assert again.usage is not None
        assert cached(again.usage) == {"device": 0, "nvme": full_blocks, "redis": 0}
        assert server.stop() == 0
        assert (cache / "server.log").read_text() == ""


def check_logprobs(logprobs: Any) -> None:
    for token in logprobs.content:
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob), "greedy takes the likeliest"
        assert bytes(token.bytes).decode() == token.token
        assert len(token.top_logprobs) == 2 and token.logprob <= 0


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "pagetier.cli", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
