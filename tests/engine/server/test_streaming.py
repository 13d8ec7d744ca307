"""Streamed and whole answers agree for every option, and text is what the tokens say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.server.stack import Stack, running_stack

TEXT = "héllo wörld 😀 end"


@pytest.fixture(scope="module", params=[1, 3], ids=["one token a step", "three tokens a step"])
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with running_stack(tokens_per_output=request.param) as running:
        yield running


def stream(stack: Stack, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a streamed answer, checked for their frame."""
    with stack.http.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def folded_completion(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What a client puts together from the chunks, by choice index."""
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        mine = choices.setdefault(choice["index"], {"text": "", "logprobs": None, "finish": None, "stop": None})
        assert mine["finish"] is None, "nothing comes after the end of a choice"
        mine["text"] += choice["text"]
        if choice["logprobs"] is not None:
            mine["logprobs"] = mine["logprobs"] or {name: [] for name in choice["logprobs"]}
            for name, values in choice["logprobs"].items():
                mine["logprobs"][name] += values
        mine["finish"], mine["stop"] = choice["finish_reason"], choice["stop_reason"]
    return choices


def folded_chat(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        first = choice["index"] not in choices
        assert ("role" in choice["delta"]) == first, "the role is told once"
        mine = choices.setdefault(choice["index"], {"text": "", "logprobs": None, "finish": None, "stop": None})
        mine["text"] += choice["delta"].get("content", "")
        if choice["logprobs"] is not None:
            mine["logprobs"] = (mine["logprobs"] or []) + choice["logprobs"]["content"]
        mine["finish"], mine["stop"] = choice["finish_reason"], choice["stop_reason"]
    return choices


OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 3},
    {"max_tokens": 2},  # cuts a code point
    {"n": 3},
    {"stop": "wör"},
    {"stop": ["d 😀", "lo w"]},
    {"stop": "lo", "include_stop_str_in_output": True},
    {"stop": "l", "min_tokens": 6},
    {"stop": "never"},
    {"stop": " end!"},  # held back to the end, then let go
    {"stop_token_ids": [ord("w")]},
    {"stop_token_ids": [ord("w")], "include_stop_str_in_output": True},
    {"ignore_eos": True, "max_tokens": 40},
    {"skip_special_tokens": False},
    {"seed": 1, "temperature": 0},
    {"n": 2, "stop": "ld", "seed": 5},
]


@pytest.mark.parametrize("options", [*OPTIONS, {"best_of": 4}, {"n": 2, "best_of": 4, "stop": "ld"}], ids=str)
@pytest.mark.parametrize("more", [{}, {"echo": True}, {"logprobs": 0}, {"logprobs": 2}], ids=str)
def test_completions_agree(stack: Stack, options: dict[str, Any], more: dict[str, Any]) -> None:
    body = {"prompt": TEXT, "max_tokens": 40} | more | options
    whole = stack.post("/v1/completions", body)
    events = stream(stack, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    expected = {
        c["index"]: {
            "text": c["text"],
            "logprobs": c["logprobs"],
            "finish": c["finish_reason"],
            "stop": c["stop_reason"],
        }
        for c in whole["choices"]
    }
    assert folded_completion(events) == expected
    assert same_counts(events[-1]["usage"], whole["usage"])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("logprobs", [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}], ids=str)
def test_chats_agree(stack: Stack, options: dict[str, Any], logprobs: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": TEXT}]} | logprobs | options
    whole = stack.post("/v1/chat/completions", body)
    events = stream(stack, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    expected = {
        c["index"]: {
            "text": c["message"]["content"],
            "logprobs": c["logprobs"] and c["logprobs"]["content"],
            "finish": c["finish_reason"],
            "stop": c["stop_reason"],
        }
        for c in whole["choices"]
    }
    assert folded_chat(events) == expected
    assert same_counts(events[-1]["usage"], whole["usage"])


@pytest.mark.parametrize("prompt", [TEXT, [TEXT, "abc"]], ids=["one prompt", "two"])
def test_the_best_of_are_the_likeliest(stack: Stack, prompt: Any) -> None:
    """Best first, and nothing of the log-probabilities they are ranked by is told unless asked for."""
    body = {"prompt": prompt, "max_tokens": 5, "ignore_eos": True}
    every = stack.post("/v1/completions", body | {"n": 4, "logprobs": 0})["choices"]
    best = stack.post("/v1/completions", body | {"n": 2, "best_of": 4})
    expected = []
    for first in range(0, len(every), 4):
        mine = every[first : first + 4]
        ranked = sorted(mine, key=lambda c: (-sum(c["logprobs"]["token_logprobs"]), c["index"]))
        expected += [c["text"] for c in ranked[:2]]
    assert [c["text"] for c in best["choices"]] == expected
    assert [c["index"] for c in best["choices"]] == list(range(len(expected)))
    assert all(c["logprobs"] is None for c in best["choices"])
    assert best["usage"]["completion_tokens"] == 5 * len(every), "all that was generated counts"


def same_counts(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens"))


def complete(stack: Stack, **fields: Any) -> dict[str, Any]:
    body = {"prompt": TEXT, "max_tokens": 40} | fields
    choice: dict[str, Any] = stack.post("/v1/completions", body)["choices"][0]
    return choice


def test_characters_split_over_tokens_arrive_whole(stack: Stack) -> None:
    events = stream(stack, "/v1/completions", {"prompt": TEXT, "max_tokens": 40})
    texts = [choice["text"] for event in events for choice in event["choices"]]
    assert "".join(texts) == TEXT
    assert not any("�" in text for text in texts)


def test_a_character_cut_by_the_length_becomes_one_replacement(stack: Stack) -> None:
    assert complete(stack, max_tokens=2)["text"] == "h�"


def test_a_stop_string_over_tokens_ends_the_text_before_it(stack: Stack) -> None:
    choice = complete(stack, stop=["wör"])
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("héllo ", "stop", "wör")
    usage = stack.post("/v1/completions", {"prompt": TEXT, "max_tokens": 40, "stop": "wör"})["usage"]
    assert usage["completion_tokens"] == len("héllo wör".encode()), "tokens up to the stop string count, later ones not"


def test_no_part_of_a_stop_string_is_streamed(stack: Stack) -> None:
    events = stream(stack, "/v1/completions", {"prompt": TEXT, "max_tokens": 40, "stop": "wörld"})
    assert "w" not in "".join(choice["text"] for event in events for choice in event["choices"])


def test_stop_strings_wait_for_min_tokens(stack: Stack) -> None:
    assert complete(stack, stop="l", min_tokens=5)["text"] == "héllo wör"


def test_stop_token_ids_end_the_text_without_their_own(stack: Stack) -> None:
    choice = complete(stack, stop_token_ids=[ord("w")])
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("héllo ", "stop", ord("w"))


def test_special_tokens_do_not_leak_unless_asked_for(stack: Stack) -> None:
    assert complete(stack)["text"] == TEXT
    assert complete(stack, prompt="a<|im_end|>b")["text"] == "ab"
    shown = complete(stack, prompt="a<|im_end|>b", skip_special_tokens=False)
    assert shown["text"] == "a<|im_end|>b"
    assert (shown["finish_reason"], shown["stop_reason"]) == ("stop", None), "the end of text is no stop string"


def test_choices_of_one_seed_differ(stack: Stack) -> None:
    whole = stack.post("/v1/completions", {"prompt": "abc", "n": 3, "seed": 1})
    assert [c["text"] for c in whole["choices"]] == ["abc", "bca", "cab"]
    assert whole["usage"]["prompt_tokens"] == 3, "a prompt counts once"


def test_several_prompts_come_back_in_order(stack: Stack) -> None:
    whole = stack.post("/v1/completions", {"prompt": ["ab", "cd"], "n": 2, "echo": True})
    assert [(c["index"], c["text"]) for c in whole["choices"]] == [(0, "abab"), (1, "abba"), (2, "cdcd"), (3, "cddc")]


def test_token_ids_are_a_prompt(stack: Stack) -> None:
    assert complete(stack, prompt=list(b"xyz"))["text"] == "xyz"
    assert complete(stack, prompt=list(b"xyz"), echo=True)["text"] == "xyzxyz"


def test_usage_is_on_the_last_chunk_only(stack: Stack) -> None:
    body = {"prompt": "abc", "stream_options": {"include_usage": True}}
    events = stream(stack, "/v1/completions", body)
    assert [event["usage"] is None for event in events] == [True] * (len(events) - 1) + [False]
    assert events[-1]["choices"] == []
    assert not any("usage" in event for event in stream(stack, "/v1/completions", {"prompt": "abc"}))
    body["stream_options"]["continuous_usage_stats"] = True  # type: ignore[index]
    assert all(event["usage"]["prompt_tokens"] == 3 for event in stream(stack, "/v1/completions", body))


def test_cached_tokens_are_told_by_tier(stack: Stack) -> None:
    body = {"prompt": "a prompt of its own, seen twice", "cache_salt": str(id(stack))}
    first, second = (stack.post("/v1/completions", body)["usage"]["prompt_tokens_details"] for _ in range(2))
    assert first == {"cached_tokens": 0, "cached_tokens_by_tier": {"device": 0, "nvme": 0}}
    assert second == {"cached_tokens": 28, "cached_tokens_by_tier": {"device": 28, "nvme": 0}}, "the keys were hashed"
    salted = stack.post("/v1/completions", body | {"cache_salt": "other"})["usage"]["prompt_tokens_details"]
    assert salted["cached_tokens"] == 0, "tenants do not share"


def test_offsets_point_into_the_text(stack: Stack) -> None:
    choice = complete(stack, logprobs=0, prompt="aé<|im_end|>b")
    assert choice["text"] == "aéb"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 3]


def test_chat_logprobs_carry_the_tokens_real_bytes(stack: Stack) -> None:
    body = {"messages": [{"role": "user", "content": "é"}], "logprobs": True, "top_logprobs": 1}
    content = stack.post("/v1/chat/completions", body)["choices"][0]["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]) == "é<eos>".encode()
    assert content[0]["logprob"] == content[0]["top_logprobs"][0]["logprob"] == -0xC3 / 256
