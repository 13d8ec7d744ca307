"""Hit-rate arithmetic: a scripted trace with known hits, where every figure of /stats, /metrics and /query is the one
computed by hand. Then what the cache's own routes change, and what they refuse.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.server.cached_engine import FACTORY
from tests.engine.server.double import BLOCK_SIZE, DOMAIN
from tests.engine.server.stack import Stack, running_stack
from tests.kvstore.valkey import Valkey, valkey, valkey_server  # noqa: F401

A = "abcdefghijklmnopq"  # 17 tokens: 4 full blocks and the last token, so 16 that can be hits
B = A[:8] + "ABCDEFGHI"  # shares 2 blocks with A
C = A[:10] + "ABCDEFG"  # shares 2 blocks and half of the third
SHORT = A[:16]  # exactly 4 blocks: its last token is computed, so 15 can be hits
Hits = dict[str, int]


@pytest.fixture
def stack(tmp_path: Path, valkey: Valkey) -> Iterator[Stack]:  # noqa: F811
    paths: dict[str, Any] = {"nvme_path": str(tmp_path / "nvme"), "pins_path": str(tmp_path / "pins")}
    with running_stack(factory=FACTORY, redis_url=valkey.url, **paths) as running:
        yield running


def complete(stack: Stack, prompt: str, **more: Any) -> Hits:
    """Serve a prompt; its hits by tier."""
    fields = {"prompt": prompt, "max_tokens": 1, **more}
    details = stack.post("/v1/completions", fields)["usage"]["prompt_tokens_details"]
    hits = {tier: count for tier, count in details["cached_tokens_by_tier"].items() if count}
    assert sum(hits.values()) == details["cached_tokens"]
    settle(stack)
    return hits


def settle(stack: Stack) -> None:
    """Wait until the tiers have what was put."""
    before: Any = None
    for _ in range(200):
        now = {name: tier["blocks"] for name, tier in stack.stats()["tiers"].items()}
        if now == before:
            return
        before = now
        time.sleep(0.05)


def query(stack: Stack, prompt: str, **more: Any) -> dict[str, Any]:
    return stack.post("/query", {"prompt": prompt, **more})


def purge(stack: Stack, *tiers: str, **more: Any) -> dict[str, int]:
    removed: dict[str, int] = stack.post("/purge", {"tiers": list(tiers), **more})["removed"]
    return removed


def metric(stack: Stack, name: str, **labels: str) -> float:
    text = stack.http.get("/metrics").text
    wanted = "".join(f'(?=[^}}]*{label}="{value}")' for label, value in labels.items())
    (value,) = re.findall(rf"^{re.escape(name)}\{{{wanted}[^}}]*\}} (\S+)$", text, re.MULTILINE)
    return float(value)


def test_every_figure_is_the_one_computed_by_hand(stack: Stack) -> None:
    trace: list[tuple[str, tuple[str, ...], Hits]] = [
        (A, (), {}),
        (A, (), {"device": 16}),
        (B, (), {"device": 8}),
        (C, (), {"device": 10}),  # the half block is copied
        (SHORT, (), {"device": 15}),
        (A, ("device",), {"nvme": 16}),
        (A, ("device", "nvme"), {"redis": 16}),
        (A[:4] + "0123456789abc", (), {"device": 4}),
    ]
    total: Hits = {}
    for prompt, purged, hits in trace:
        if purged:
            purge(stack, *purged, all=True)
        foretold = query(stack, prompt)
        assert foretold["hit_tokens_by_tier"] == hits, "what query foretells"
        assert foretold["hit_tokens"] == sum(hits.values())
        assert complete(stack, prompt) == hits
        total = {tier: total.get(tier, 0) + hits.get(tier, 0) for tier in ("device", "nvme", "redis")}
    assert total == {"device": 53, "nvme": 16, "redis": 16}
    lookup_tokens = 16 * 7 + 15
    stats = stack.stats()
    assert stats["lookup"]["lookup_tokens"] == lookup_tokens == 127
    assert stats["lookup"]["hit_tokens"] == 85
    assert stats["lookup"]["hit_rate"] == pytest.approx(85 / 127)
    assert {name: tier["hit_tokens"] for name, tier in stats["tiers"].items()} == total
    assert {name: tier["hit_blocks"] for name, tier in stats["tiers"].items()} == {"device": 14, "nvme": 4, "redis": 4}
    assert sum(tier["hit_rate"] for tier in stats["tiers"].values()) == pytest.approx(stats["lookup"]["hit_rate"])
    for tier, count in total.items():
        assert stats["tiers"][tier]["hit_rate"] == pytest.approx(count / 127)
        assert metric(stack, "pagetier_tier_hit_tokens_total", tier=tier) == count
        assert metric(stack, "pagetier_tier_hit_rate", tier=tier) == pytest.approx(count / 127)
    assert metric(stack, "vllm:prefix_cache_queries_total") == 127
    assert metric(stack, "vllm:prefix_cache_hits_total") == 85


def test_query_tells_block_by_block(stack: Stack) -> None:
    start_s = time.monotonic()
    for prompt in (A, A, B, C):
        complete(stack, prompt)
    told = query(stack, A)
    elapsed_s = time.monotonic() - start_s
    assert told["domain"] == DOMAIN.hex() and (told["num_tokens"], told["hit_tokens"]) == (17, 16)
    assert [block["text"] for block in told["blocks"]] == ["abcd", "efgh", "ijkl", "mnop"]
    assert [block["tokens"] for block in told["blocks"]] == [[0, 3], [4, 7], [8, 11], [12, 15]]
    assert [block["hits"] for block in told["blocks"]] == [3, 3, 1, 1], "A again used four, B and C two each"
    for block in told["blocks"]:
        assert block["tiers"] == ["device", "nvme", "redis"]
        assert block["num_tokens"] == BLOCK_SIZE and block["bytes"] == 64 and 0 <= block["age_s"] <= elapsed_s
    by_key = stack.post("/query", {"keys": [told["blocks"][2]["key"], "ab" * 32]})
    assert by_key["blocks"][0]["text"] == "ijkl" and by_key["blocks"][0]["tiers"] == ["device", "nvme", "redis"]
    assert by_key["blocks"][1] | {"key": ""} == {
        **{"key": "", "tokens": None, "num_tokens": None, "tiers": [], "bytes": 0, "text": ""},
        **{"age_s": None, "idle_s": None, "hits": 0, "pinned": False},
    }
    by_hand = stack.http.get("/query", params={"prompt": A}).json()
    assert [block["key"] for block in by_hand["blocks"]] == [block["key"] for block in told["blocks"]]
    ids = [ord(char) for char in A]
    tokens = stack.post("/query", {"tokens": ids_of(stack, A)})
    assert len(ids) == 17 and tokens["blocks"][3]["key"] == told["blocks"][3]["key"]


def ids_of(stack: Stack, text: str) -> list[int]:
    return stack.service.tokenizer.encode(text, add_special_tokens=False)


def test_asking_changes_nothing(stack: Stack) -> None:
    complete(stack, A)
    before = stack.stats()
    for _ in range(3):
        query(stack, A)
        query(stack, B, cache_salt="x")
        stack.http.get("/top")
    after = stack.stats()
    for stats in (before, after):
        del stats["uptime_s"]
    assert after == before and [block["hits"] for block in query(stack, A)["blocks"]] == [0] * 4


def test_top_is_a_forest_with_the_beginning_of_the_text(stack: Stack) -> None:
    for prompt in (A, A, B, "zzzzyyyyxxxxw"):
        complete(stack, prompt)
    prefixes = stack.http.get("/top").json()["prefixes"]
    hottest = prefixes[0]
    assert (hottest["text"], hottest["hits"], hottest["num_tokens"]) == ("abcdefgh", 2, 8)
    assert sorted(child["text"] for child in hottest["children"]) == ["ABCDEFGH", "ijklmnop"]
    assert [child["hits"] for child in hottest["children"]] == [1, 0], "the hotter one first"
    assert prefixes[1]["text"] == "zzzzyyyyxxxx" and prefixes[1]["tiers"] == ["device", "nvme", "redis"]
    assert len(stack.http.get("/top", params={"limit": 1}).json()["prefixes"]) == 1


def test_pins_are_told_and_given_up(stack: Stack) -> None:
    complete(stack, A)
    pin = stack.post("/pin", {"prompt": A, "ttl_s": 600, "tiers": ["nvme"]})["pin"]
    assert (pin["num_tokens"], pin["tiers"], pin["held"]) == (16, ["nvme"], {"nvme": 4})
    assert 590 < pin["expires_in_s"] <= 600
    assert [block["pinned"] for block in query(stack, A)["blocks"]] == [True] * 4
    again = stack.post("/pin", {"keys": [query(stack, A)["blocks"][1]["key"]]})["pin"]
    assert again["num_tokens"] == 8 and again["expires_in_s"] is None
    assert {pin["id"] for pin in stack.http.get("/pins").json()["pins"]} == {pin["id"], again["id"]}
    assert [gone["id"] for gone in stack.post("/unpin", {"prompt": A})["pins"]] == [pin["id"]]
    assert [gone["id"] for gone in stack.post("/unpin", {"all": True})["pins"]] == [again["id"]]
    assert stack.http.get("/pins").json() == {"pins": []}


def test_a_purge_takes_a_prompt_a_tenant_or_all_from_these_tiers(stack: Stack) -> None:
    complete(stack, A)
    complete(stack, A, cache_salt="tenant")
    assert purge(stack, "nvme", prompt=A) == {"nvme": 4}
    assert query(stack, A)["blocks"][0]["tiers"] == ["device", "redis"]
    assert query(stack, A, cache_salt="tenant")["blocks"][0]["tiers"] == ["device", "nvme", "redis"]
    removed = stack.post("/purge", {"cache_salt": "tenant"})["removed"]
    assert removed == {"device": 4, "nvme": 4, "redis": 4}
    assert query(stack, A, cache_salt="tenant")["hit_tokens"] == 0
    assert query(stack, A)["hit_tokens"] == 16
    assert stack.post("/purge", {"all": True, "domain": DOMAIN.hex()[:12]})["removed"]["redis"] == 4
    assert complete(stack, A) == {}
    assert complete(stack, A) == {"device": 16}, "what was purged is stored anew"


def test_a_strangers_prefix_and_an_unknown_one_look_the_same(stack: Stack) -> None:
    """Answers, counters and the tiers that were asked are equal, so nobody learns what another tenant asked."""
    complete(stack, A, cache_salt="tenant")
    seen = []
    for prompt in (A, "nobody ever asked"):
        before = stack.stats()
        told = query(stack, prompt, cache_salt="stranger")
        hits = complete(stack, prompt, cache_salt="stranger")
        after = stack.stats()
        blocks = [{**block, "key": "", "text": ""} for block in told["blocks"]]
        grew = {
            tier: {name: after["tiers"][tier][name] - before["tiers"][tier][name] for name in ("hit_tokens", "blocks")}
            for tier in after["tiers"]
        }
        lookups = after["lookup"]["lookup_tokens"] - before["lookup"]["lookup_tokens"]
        seen.append(({**told, "blocks": blocks}, hits, grew, lookups))
    assert seen[0] == seen[1]
    assert query(stack, A, cache_salt="tenant")["hit_tokens"] == 16


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/query", {}, "give one of prompt, messages, tokens and keys"),
        ("/query", {"prompt": "a", "keys": ["ab"]}, "give one of prompt"),
        ("/query", {"keys": ["ab"]}, "keys: got 'ab'; allowed: 64 hex digits each"),
        ("/query", {"prompt": ""}, "no tokens"),
        ("/query", {"tokens": [999]}, "got token id 999"),
        ("/query", {"promt": "a"}, "promt"),
        ("/pin", {"prompt": "abc"}, "at least one full block"),
        ("/pin", {"prompt": A, "ttl_s": 0}, "ttl_s"),
        ("/pin", {"prompt": A, "tiers": ["nvmee"]}, "did you mean 'nvme'?"),
        ("/pin", {"keys": ["ab" * 32]}, "nothing is known of this block; give the prompt instead"),
        ("/purge", {}, "give one of prompt"),
        ("/purge", {"all": True, "tiers": ["disk"]}, "unknown tier 'disk'"),
        ("/purge", {"all": True, "domain": "00" * 32}, "this server's is"),
        ("/unpin", {}, "give one of prompt"),
    ],
)
def test_wrong_questions_name_what_is_wrong(shared: Stack, path: str, body: dict[str, Any], words: str) -> None:
    answer = shared.http.post(path, json=body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("shared")
    with running_stack(factory=FACTORY, nvme_path=str(folder / "nvme"), pins_path=str(folder / "pins")) as running:
        yield running


def test_without_tiers_there_is_nothing_to_pin() -> None:
    with running_stack(factory=FACTORY) as stack:
        assert complete(stack, A) == {} and complete(stack, A) == {"device": 16}
        assert query(stack, A)["blocks"][0]["tiers"] == ["device"]
        answer = stack.http.post("/pin", json={"prompt": A})
        assert answer.status_code == 400 and "start it with --kv-tier" in answer.json()["error"]["message"]
        assert stack.post("/purge", {"prompt": A})["removed"] == {"device": 4}
        assert complete(stack, A) == {}
