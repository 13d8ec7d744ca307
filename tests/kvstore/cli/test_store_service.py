"""What people ask of a server can be asked of a store service, too, with --store."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pagetier.kvstore.cli.asked import Asked
from pagetier.kvstore.cli.sources import opened_place, reader_of
from pagetier.kvstore.keys import unpack_tokens
from tests.kvstore.cli import command_line
from tests.kvstore.cli.command_line import Run
from tests.kvstore.service.service_rig import (
    BLOCK_SIZE,
    PAYLOAD_BYTES,
    TOKEN,
    Client,
    Service,
    identity,
    names_of,
    service,
    until,
)

run = command_line.run
NUM_BLOCKS = 5
NAMES = names_of(NUM_BLOCKS, 3)
TOKENS = [token for name in NAMES for token in unpack_tokens(name.tokens).tolist()]
DOMAIN = identity().domain().hex()


@dataclass(frozen=True)
class Filled:
    """A service that holds the blocks above, and the options that name it and them."""

    running: Service
    client: Client
    store: tuple[str, str]
    asked: tuple[str, str]

    @property
    def both(self) -> tuple[str, ...]:
        return (*self.store, *self.asked)


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Filled]:
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps([*TOKENS, 7]))
    with service() as running, Client(running.address) as client:
        client.put(NAMES)
        until(lambda: client.found(NAMES) == ("host",) * NUM_BLOCKS)
        url = f"unix://{running.folder}/s"
        yield Filled(running, client, ("--store", url), ("--tokens", str(tokens)))


def test_query_tells_of_each_block(filled: Filled, run: Run) -> None:
    assert set(filled.client.hit(NAMES[:2])) == {"host"}
    told = run("query", *filled.both, "--json").json
    assert (told["domain"], told["num_tokens"], told["hit_tokens"]) == (DOMAIN, 4 * NUM_BLOCKS + 1, 4 * NUM_BLOCKS)
    assert told["hit_tokens_by_tier"] == {"host": 4 * NUM_BLOCKS}
    assert [block["key"] for block in told["blocks"]] == [name.key.hex() for name in NAMES]
    assert all(block["tiers"] == ["host", "nvme"] and block["bytes"] == PAYLOAD_BYTES for block in told["blocks"])
    assert [block["hits"] for block in told["blocks"]] == [told["blocks"][0]["hits"]] * 2 + [0] * 3
    assert told["blocks"][0]["hits"] > 0
    by_key = run("query", *filled.store, "--key", NAMES[1].key.hex(), "--json").json["blocks"]
    assert [(block["tokens"], block["tiers"]) for block in by_key] == [([4, 7], ["host", "nvme"])]
    ran = run("query", *filled.both)
    assert ran.code == 0 and f"20 of 21 tokens would be hits (host 20), domain {DOMAIN[:12]}" in ran.out
    unknown = run("query", *filled.both, "--salt", "stranger")
    assert unknown.code == 1 and "0 of 21 tokens would be hits" in unknown.out


def test_top_is_a_tree_with_hits(filled: Filled, run: Run) -> None:
    filled.client.hit(NAMES[:2])
    (hot,) = run("top", *filled.store, "--json").json["prefixes"]
    (cold,) = hot["children"]
    assert (hot["num_tokens"], cold["num_tokens"], cold["hits"]) == (8, 12, 0) and hot["hits"] > 0
    ran = run("top", *filled.store)
    assert ran.code == 0 and "8 tokens, 32KiB, host nvme" in ran.out


def test_pins_come_and_go(filled: Filled, run: Run) -> None:
    ran = run("pin", *filled.both, "--ttl", "7200", "--tier", "host")
    assert ran.code == 0 and f"{4 * NUM_BLOCKS} tokens in host, for 2 h; held now: host 5 of 5 blocks" in ran.out
    assert run("pin", "--list", *filled.store).out.startswith(NAMES[-1].key.hex()[:12])
    assert all(block["pinned"] for block in run("query", *filled.both, "--json").json["blocks"])
    (pinned,) = run("pin", *filled.store, "--list", "--json").json["pins"]
    gone = run("unpin", *filled.store, "--key", pinned["id"], "--json").json["pins"]
    assert [one["id"] for one in gone] == [pinned["id"]]
    again = run("unpin", "--all", *filled.store)
    assert (again.code, again.out) == (1, "nothing is pinned\n")
    by_key = run("pin", *filled.store, "--key", NAMES[1].key.hex(), "--json").json["pin"]
    assert (by_key["num_blocks"], by_key["num_tokens"]) == (2, 8), "the prefix that ends there"
    assert run("unpin", *filled.both).code == 1, "another prefix"
    unknown = run("pin", *filled.store, "--key", "ab" * 32)
    assert unknown.code == 2 and "nothing is known of this block; give the prompt instead" in unknown.err


def test_purge_says_what_went(filled: Filled, run: Run) -> None:
    assert run("purge", *filled.both, "--tier", "nvme").out == f"removed: nvme {NUM_BLOCKS}\n"
    wrong = run("purge", *filled.store, "--all", "--tier", "redis")
    assert wrong.code == 2 and "unknown tier 'redis'; known: host, nvme" in wrong.err
    assert run("purge", *filled.store, "--salt", "nobody").out == "removed: host 0, nvme 0\n"
    assert run("purge", *filled.store, "--all", "--json").json["removed"] == {"host": NUM_BLOCKS, "nvme": 0}
    assert run("query", *filled.both).code == 1


def test_stats_and_doctor_tell_of_every_tier(filled: Filled, run: Run) -> None:
    filled.client.hit(NAMES)
    (told,) = run("stats", *filled.store, "--json").json["domains"]
    assert told["domain"] == DOMAIN and told["tiers"]["host"]["hit_tokens"] == 4 * NUM_BLOCKS
    ran = run("stats", *filled.store)
    assert ran.code == 0 and f"domain {DOMAIN[:12]}" in ran.out and "slots on loan 0" in ran.out
    ran = run("doctor", *filled.store, "--json")
    assert ran.code == 0 and ran.json["domains"] == [DOMAIN]
    assert all(ran.json["tiers"][tier]["read_bytes_per_s"] > 0 for tier in ("host", "nvme"))
    assert set(filled.client.hit(NAMES)) == {"host"}, "measuring leaves what is there"


def test_a_store_that_nobody_used_yet_is_told_as_such(run: Run) -> None:
    with service() as running:
        store = ("--store", f"unix://{running.folder}/s")
        assert "No engine has used this store since it started" in run("stats", *store).out
        assert run("doctor", *store).code == 0
        for command in (("top",), ("query", "--key", "ab" * 32), ("pin", "--list")):
            ran = run(*command, *store)
            assert ran.code == 2 and "holds no cache" in ran.err and ran.err.count("\n") == 1, ran.err


def test_events_are_lines(filled: Filled, run: Run) -> None:
    more, log = names_of(3, 4), filled.running.server.tiers.watch.events  # type: ignore[union-attr]

    def put_soon() -> None:
        until(lambda: bool(log._listeners))
        filled.client.put(more)

    thread = threading.Thread(target=put_soon)
    thread.start()
    ran = run("events", *filled.store, "--count", "1")
    thread.join()
    assert ran.code == 0 and "stored   3 blocks, tokens 0-11" in ran.out


def test_text_is_read_and_shown_with_a_models_tokenizer(filled: Filled) -> None:
    class Words:
        """A tokenizer whose text is the tokens' numbers."""

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [int(word) for word in text.split()]

        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            return " ".join(map(str, ids))

        def apply_chat_template(self, messages: Any, add_generation_prompt: bool = True, **kwargs: Any) -> str:
            return str(messages[0]["content"])

    text = " ".join(map(str, TOKENS))
    with opened_place(None, None, filled.store[1]) as place:
        told = reader_of(place, None, "words", lambda name: Words()).query(Asked(prompt=text))
    assert " ".join(block["text"] for block in told["blocks"]) == text
    assert told["hit_tokens"] == BLOCK_SIZE * (NUM_BLOCKS - 1), "a whole-prompt hit computes its last token"


def test_where_several_caches_are_one_is_named(filled: Filled, run: Run) -> None:
    with Client(filled.running.address, "gemma") as other:
        other.put(names_of(2, 4, "gemma"))
        ran = run("query", *filled.both)
        assert ran.code == 2 and "holds several caches" in ran.err and "name one with --domain HEX" in ran.err
        assert run("query", *filled.both, "--domain", DOMAIN[:8], "--json").json["hit_tokens"] == 4 * NUM_BLOCKS
        gemma = identity("gemma").domain().hex()
        assert run("query", *filled.both, "--domain", gemma[:8]).code == 1, "the same tokens, another model"
        assert run("purge", *filled.store, "--all", "--domain", gemma).out == "removed: host 2, nvme 2\n"
        assert len(run("stats", *filled.store, "--json").json["domains"]) == 2
        assert run("doctor", *filled.store).code == 0
    assert run("query", *filled.both, "--domain", DOMAIN, "--json").json["hit_tokens"] == 4 * NUM_BLOCKS


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("query", "--key", "ab" * 32, "--store", "unix://{tmp}/none"), 1, "start one with 'pagetier store'"),
        (("stats", "--store", "http://127.0.0.1:8000"), 2, "--store: got 'http://127.0.0.1:8000'; allowed: local"),
        (("stats", "--store", "local?token=x"), 2, "--store: 'local?token=x' has 'token'; allowed: ca"),
        (("events", "--store", "unix://{tmp}/none"), 1, "start one with 'pagetier store'"),
        (("top", "--store", "local", "--nvme", "{tmp}"), 2, "got --store URL and --nvme DIR"),
        (("doctor", "--store", "local", "--redis", "x"), 2, "got --store URL and --redis URL"),
        (("unpin", "--all", "--store", "grpc://127.0.0.1:9"), 1, "no store answers at grpc://127.0.0.1:9"),
    ],
    ids=str,
)
def test_errors_are_one_line_with_the_next_step(
    tmp_path: Path,
    run: Run,
    arguments: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    ran = run(*(text.replace("{tmp}", str(tmp_path)) for text in arguments))
    assert (ran.code, ran.err.count("\n")) == (code, 1) and words in ran.err, ran.err


def test_a_token_is_read_from_the_file_that_the_address_names(tmp_path: Path, run: Run) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "wrong").write_text(f"not {TOKEN}")
    with service(token=TOKEN) as running:
        url = f"unix://{running.folder}/s"
        assert run("stats", "--store", f"{url}?token_file={tmp_path}/token").code == 0
        without, wrong = run("stats", "--store", url), run("stats", "--store", f"{url}?token_file={tmp_path}/wrong")
    for ran, words in ((without, "asks for a token"), (wrong, "refuses the token")):
        assert ran.code == 1 and words in ran.err and f"{url}?token_file=FILE" in ran.err
        assert TOKEN not in ran.err
