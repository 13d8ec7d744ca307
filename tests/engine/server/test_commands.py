"""The commands as a user runs them: against a live server, and on what it left behind."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagetier.kvstore.cli.doctor import diagnose
from pagetier.kvstore.cli.query import make_query
from pagetier.kvstore.cli.sources import opened_place, reader_of
from tests.engine.server.cached_engine import FACTORY
from tests.engine.server.double import DOMAIN, build_tokenizer
from tests.engine.server.stack import Stack, running_stack
from tests.engine.server.test_cache_routes import A, B, complete, ids_of
from tests.kvstore.cli import command_line
from tests.kvstore.cli.command_line import Run
from tests.kvstore.valkey import Valkey, valkey, valkey_server  # noqa: F401

run = command_line.run


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """The server's NVMe folder."""
    return tmp_path / "nvme"


@pytest.fixture
def stack(tmp_path: Path, left: Path, valkey: Valkey) -> Iterator[Stack]:  # noqa: F811
    paths: dict[str, Any] = {"nvme_path": str(left), "pins_path": str(tmp_path / "pins")}
    with running_stack(factory=FACTORY, redis_url=valkey.url, **paths) as running:
        yield running


def lines_with(text: str, *words: str) -> list[str]:
    return [line for line in text.splitlines() if all(word in line for word in words)]


def test_query_shows_where_each_block_is(stack: Stack, run: Run, tmp_path: Path) -> None:
    for prompt in (A, A, B):
        complete(stack, prompt)
    ran = run("query", "--prompt", A, "--url", stack.url)
    assert (ran.code, ran.err) == (0, "")
    assert len(lines_with(ran.out, "device nvme redis", "64B")) == 4
    assert lines_with(ran.out, "0-3", "abcd")[0].split("│")[5].strip() == "2"
    assert f"16 of 17 tokens would be hits (device 16), domain {DOMAIN.hex()[:12]}" in ran.out
    told = run("query", "--prompt", A, "--url", f"{stack.url}/v1", "--json").json
    assert [block["text"] for block in told["blocks"]] == ["abcd", "efgh", "ijkl", "mnop"]
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(ids_of(stack, A)))
    assert run("query", "--tokens", str(tokens), "--url", stack.url, "--json").json["hit_tokens"] == 16
    messages = tmp_path / "messages.json"
    messages.write_text(json.dumps([{"role": "user", "content": A}]))
    assert run("query", "--messages", str(messages), "--url", stack.url, "--json").json["hit_tokens"] == 16
    key = told["blocks"][1]["key"]
    assert run("query", "--key", key, "--url", stack.url, "--json").json["blocks"][0]["text"] == "efgh"
    unknown = run("query", "--prompt", A, "--salt", "stranger", "--url", stack.url)
    assert unknown.code == 1 and "0 of 17 tokens would be hits" in unknown.out


def test_top_is_a_tree(stack: Stack, run: Run) -> None:
    empty = run("top", "--url", stack.url)
    assert empty.code == 0 and "Nothing is cached yet." in empty.out
    for prompt in (A, A, B):
        complete(stack, prompt)
    ran = run("top", "--url", stack.url)
    (parent,) = lines_with(ran.out, "abcdefgh", "2 hits, 8 tokens")
    children = lines_with(ran.out, "8 tokens, 128B, device nvme redis")[1:]
    assert parent.startswith("└── ") and [child[:8] for child in children] == ["    ├── ", "    └── "]
    assert run("top", "--url", stack.url, "--json", "--limit", "1").json["prefixes"][0]["children"] == []


def test_pins_come_and_go(stack: Stack, run: Run) -> None:
    complete(stack, A)
    ran = run("pin", "--prompt", A, "--ttl", "7200", "--tier", "nvme", "--url", stack.url)
    assert ran.code == 0 and "16 tokens in nvme, for 2 h; held now: nvme 4 of 4 blocks" in ran.out
    assert "16 tokens in nvme" in run("pin", "--list", "--url", stack.url).out
    assert len(lines_with(run("query", "--prompt", A, "--url", stack.url).out, "(pinned)")) == 4
    assert run("unpin", "--all", "--url", stack.url).out.startswith("unpinned: ")
    again = run("unpin", "--all", "--url", stack.url)
    assert (again.code, again.out) == (1, "nothing is pinned\n")


def test_purge_says_what_went(stack: Stack, run: Run) -> None:
    complete(stack, A)
    complete(
        stack,
        B,
    )
    ran = run("purge", "--prompt", A, "--tier", "nvme", "--url", stack.url)
    assert (ran.code, ran.out) == (0, "removed: nvme 4\n")
    assert run("purge", "--all", "--url", stack.url, "--json").json["removed"]["redis"] == 6
    assert run("query", "--prompt", A, "--url", stack.url).code == 1


def test_what_a_server_left_can_be_read_without_it(
    tmp_path: Path,
    left: Path,
    valkey: Valkey,  # noqa: F811
    run: Run,
) -> None:
    paths: dict[str, Any] = {"nvme_path": str(left), "pins_path": str(tmp_path / "pins")}
    with running_stack(factory=FACTORY, redis_url=valkey.url, **paths) as stack:
        complete(stack, A)
        complete(stack, B)
        complete(stack, A, cache_salt="tenant")
        live = stack.post("/query", {"prompt": A})
        tokens = tmp_path / "tokens.json"
        tokens.write_text(json.dumps(ids_of(stack, A)))
        used = run("purge", "--nvme", str(left), "--all")
        assert used.code == 2 and "is used by a server" in used.err and used.err.count("\n") == 1
    for place, tier in ((("--nvme", str(left)), "nvme"), (("--redis", valkey.url), "redis")):
        told = run("query", *place, "--tokens", str(tokens), "--json").json
        assert (told["num_tokens"], told["hit_tokens"], told["domain"]) == (17, 16, DOMAIN.hex())
        assert [block["key"] for block in told["blocks"]] == [block["key"] for block in live["blocks"]]
        assert all(block["tiers"] == [tier] and block["bytes"] == 64 for block in told["blocks"])
        by_key = run("query", *place, "--key", live["blocks"][1]["key"], "--json").json["blocks"][0]
        assert (by_key["tokens"], by_key["tiers"]) == ([4, 7], [tier])
        assert run("query", *place, "--tokens", str(tokens), "--salt", "stranger").code == 1
        forest = run("top", *place, "--json").json["prefixes"]
        assert sorted(prefix["num_tokens"] for prefix in forest) == [8, 16] and len(forest[1]["children"]) in (0, 2)
        assert run("verify", *place).code == 0
        wrong = run("purge", *place, "--all", "--tier", f"{tier},host")
        assert wrong.code == 2 and f"unknown tier 'host'; known: {tier}" in wrong.err and wrong.err.count("\n") == 1
        assert run("purge", *place, "--salt", "tenant", "--tier", tier).out == f"removed: {tier} 4\n"
        assert run("query", *place, "--tokens", str(tokens), "--salt", "tenant").code == 1
        assert run("purge", *place, "--tokens", str(tokens)).out == f"removed: {tier} 4\n"
        assert run("purge", *place, "--all", "--domain", DOMAIN.hex()[:8]).out == f"removed: {tier} 2\n"
        assert run("query", *place, "--tokens", str(tokens)).code == 1


def test_text_is_read_and_shown_with_a_models_tokenizer(tmp_path: Path, left: Path) -> None:
    paths: dict[str, Any] = {"nvme_path": str(left), "pins_path": str(tmp_path / "pins")}
    with running_stack(factory=FACTORY, **paths) as stack:
        complete(stack, A)
    from pagetier.kvstore.cli.asked import Asked

    with opened_place(left, None) as place:
        told = reader_of(place, None, "double", lambda name: build_tokenizer()).query(Asked(prompt=A))
    assert [block["text"] for block in told["blocks"]] == ["abcd", "efgh", "ijkl", "mnop"]
    assert callable(make_query(lambda name: build_tokenizer()))


def test_events_are_lines(stack: Stack, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve_soon(hub: Any = stack.service.hub) -> None:
        while not hub._sinks:
            pass
        complete(stack, A)

    import threading

    thread = threading.Thread(target=serve_soon)
    thread.start()
    ran = run("events", "--count", "2", "--url", stack.url)
    thread.join()
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert len(lines) == 2 and "device  stored   4 blocks, tokens 0-15" in lines[0]


def test_doctor_measures_each_tier_and_leaves_nothing(stack: Stack, run: Run, left: Path) -> None:
    complete(stack, A)
    before = stack.stats()["tiers"]
    ran = run("doctor", "--url", stack.url, "--json")
    assert ran.code == 0, ran.out
    told = ran.json["tiers"]
    assert list(told) == ["nvme", "redis"] and ran.json["domain"] == DOMAIN.hex()
    for tier in told.values():
        assert tier["fit"] and all(tier[name] > 0 for name in ("lookup_s", "block_s", "read_bytes_per_s"))
    assert "not known from which length on it pays" in told["nvme"]["advice"][0]
    assert stack.stats()["tiers"]["nvme"]["blocks"] == before["nvme"]["blocks"] == 4
    text = run("doctor", "--url", stack.url).out
    assert lines_with(text, "nvme", "/s", "fit") and lines_with(text, "redis", "/s", "fit")


def test_doctor_of_a_server_without_tiers_says_how_to_get_some(run: Run) -> None:
    with running_stack(factory=FACTORY) as stack:
        assert "start the server with --kv-tier nvme,redis" in run("doctor", "--url", stack.url).out


def test_doctor_looks_at_a_folder_and_a_redis_alone(
    stack: Stack,
    run: Run,
    left: Path,
    valkey: Valkey,  # noqa: F811
) -> None:
    complete(stack, A)
    before = sorted(left.rglob("*"))
    told = run("doctor", "--nvme", str(left), "--json").json
    assert told["domains"] == [DOMAIN.hex()] and told["tiers"]["nvme"]["blocks"] == 4
    assert told["tiers"]["nvme"]["read_bytes_per_s"] > 0 and sorted(left.rglob("*")) == before
    ran = run("doctor", "--redis", valkey.url, "--json")
    assert ran.code == 0 and ran.json["domains"] == [DOMAIN.hex()]
    assert len(valkey.client().keys("pgt1:*:{*")) == 4
    gone = run("doctor", "--redis", "redis://127.0.0.1:9")
    assert gone.code == 1 and "redis is unfit: it could not be measured" in gone.out


FIGURES: dict[str, Any] = {
    **{"breaker": "closed", "fault": "", "break_even_tokens": 64, "corrupt": 0, "errors": 0, "lookup_s": 0.001},
    **{"capacity_bytes": 1000, "bytes": 10, "evictions": 0},
}


@pytest.mark.parametrize(
    ("changed", "is_fit", "words"),
    [
        ({}, True, ""),
        ({"breaker": "open"}, False, "its breaker is open"),
        ({"fault": "a write answered error"}, False, "could not be measured: a write answered error"),
        ({"break_even_tokens": None}, False, "longer than computing at any length"),
        ({"corrupt": 2}, True, "2 entries did not verify: run pagetier verify"),
        ({"errors": 3}, True, "3 failed operations"),
        ({"lookup_s": 0.2}, True, "is it far away?"),
        ({"bytes": 990, "evictions": 5}, True, "raise --kv-nvme-size"),
    ],
)
def test_what_figures_mean_is_said_in_words(changed: dict[str, Any], is_fit: bool, words: str) -> None:
    one = diagnose("nvme", FIGURES | changed, [[64, 0.1]])
    assert (not one.faults) is is_fit
    assert words in " ".join([*one.faults, *one.advice])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("query",), 2, "give one of --prompt, --messages, --tokens and --key, got none"),
        (("query", "--prompt", "a", "--key", "b"), 2, "got --prompt and --key"),
        (("query", "--prompt", ""), 2, "--prompt: got ''"),
        (("query", "--key", "abc"), 2, "--key: got 'abc'; allowed: 64 hex digits"),
        (("query", "--tokens", "{tmp}/none"), 2, "cannot be read (No such file or directory)"),
        (("query", "--tokens", "{tmp}/bad"), 2, "is not JSON"),
        (("query", "--messages", "{tmp}/list"), 2, "holds no conversation"),
        (("query", "--prompt", "a", "--nvme", "{tmp}"), 2, "is no folder of an NVMe tier"),
        (("query", "--prompt", "a", "--nvme", "{tmp}", "--redis", "x"), 2, "got --nvme DIR and --redis URL"),
        (("query", "--prompt", "a", "--redis", "localhost"), 2, "--redis: got 'localhost'"),
        (("query", "--prompt", "a", "--url", "http://127.0.0.1:9"), 1, "start one with 'pagetier serve'"),
        (("top", "--redis", "redis://127.0.0.1:9"), 2, "redis://127.0.0.1:9 does not answer; start it"),
        (("purge",), 2, "give one of --prompt"),
        (("purge", "--all", "--salt", "x"), 2, "--all: got a prompt, a key or a salt as well"),
        (("pin", "--prompt", "a", "--tier", ","), 2, "--tier: got ','"),
        (("unpin",), 2, "give one of --prompt"),
        (("events", "--url", "http://127.0.0.1:9"), 1, "start one with 'pagetier serve'"),
    ],
    ids=str,
)
def test_errors_are_one_line_with_the_next_step(
    tmp_path: Path, run: Run, arguments: tuple[str, ...], code: int, words: str
) -> None:
    (tmp_path / "bad").write_text("{")
    (tmp_path / "list").write_text("[1]")
    ran = run(*(text.replace("{tmp}", str(tmp_path)) for text in arguments))
    assert (ran.code, ran.err.count("\n")) == (code, 1) and words in ran.err, ran.err


def test_a_key_and_a_token_are_sent_where_they_are_needed(tmp_path: Path, run: Run) -> None:
    paths: dict[str, Any] = {"nvme_path": str(tmp_path / "nvme"), "pins_path": str(tmp_path / "pins")}
    with running_stack(factory=FACTORY, api_key="the key", admin_token="the token", **paths) as stack:
        ran = run("query", "--prompt", A, "--url", stack.url)
        assert ran.code == 1 and "answered 401" in ran.err and "give the server's --api-key" in ran.err
        assert run("query", "--prompt", A, "--url", stack.url, "--api-key", "the key").code == 1
        assert run("stats", "--json", "--url", stack.url, "--api-key", "the key").code == 0
        assert run("top", "--url", stack.url, "--api-key", "the key").code == 1
        assert run("top", "--url", stack.url, "--admin-token", "the token").code == 0


def test_a_prompt_may_come_from_stdin(stack: Stack, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    complete(stack, A)
    monkeypatch.setattr(sys, "stdin", io.StringIO(A))
    assert run("query", "--prompt", "-", "--url", stack.url, "--json").json["hit_tokens"] == 16
