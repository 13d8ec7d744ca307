"""Request bodies: what is taken, what is refused by name, and what is safely ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagetier.engine.sampling_params import SamplingParams
from pagetier.engine.server.errors import ApiError
from pagetier.engine.server.protocol import ChatCompletionRequest, CompletionRequest, parse_body

MESSAGES = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> CompletionRequest:
    return parse_body(CompletionRequest, json.dumps({"prompt": "p"} | fields).encode())


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_body(ChatCompletionRequest, json.dumps({"messages": MESSAGES} | fields).encode())


def refusal(kind: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        kind(**fields).params()
    return caught.value


def test_every_sampling_field_reaches_the_engine() -> None:
    body = completion(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        seed=7,
        max_tokens=9,
        min_tokens=2,
        n=3,
        stop=["a", "b"],
        stop_token_ids=[4],
        ignore_eos=True,
        logprobs=2,
        logit_bias={"11": -5},
    )
    assert body.params() == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        seed=7,
        max_tokens=9,
        min_tokens=2,
        n=3,
        stop=("a", "b"),
        stop_token_ids=(4,),
        ignore_eos=True,
        logprobs=2,
        logit_bias=((11, -5.0),),
    )


def test_null_means_default_everywhere() -> None:
    names = [name for name in CompletionRequest.model_fields if name not in ("prompt", "max_tokens")]
    optional = [name for name in names if CompletionRequest.model_fields[name].default is None]
    assert completion(**dict.fromkeys(optional)).params() == SamplingParams()
    assert completion(max_tokens=None).params().max_tokens is None


def test_chat_has_no_default_length_and_prefers_the_newer_field() -> None:
    assert chat().params().max_tokens is None
    assert chat(max_tokens=5).params().max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=6).params().max_tokens == 6


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_the_four_forms_of_a_prompt(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts == expected


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""], {"text": "a"}, 3])
def test_empty_and_malformed_prompts_are_refused(prompt: Any) -> None:
    assert refusal(completion, prompt=prompt).param == "prompt"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"best_of": 3},
        {"suffix": "x"},
        {"guided_json": {}},
        {"use_beam_search": True},
        {"prompt_logprobs": 1},
        {"bad_words": ["x"]},
        {"modalities": ["text", "audio"]},
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(fields: dict[str, Any]) -> None:
    error = refusal(chat, **fields)
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", next(iter(fields)))


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": None},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"response_format": {"type": "text"}},
        {"best_of": 1},
        {"suffix": ""},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
    ],
)
def test_neutral_and_descriptive_fields_are_ignored(fields: dict[str, Any]) -> None:
    assert chat(**fields).params() == chat().params()


def test_unknown_fields_are_refused_with_the_nearest_known_name() -> None:
    error = refusal(completion, temprature=0.5)
    assert error.code == "unknown_parameter"
    assert "did you mean 'temperature'?" in str(error)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"best_of": 0}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["fine", "half \ud800"]}, "stop"),
        ({"top_k": 1 << 70}, "top_k"),
        ({"min_tokens": 1 << 70, "max_tokens": None}, "min_tokens"),
        ({"logprobs": 99}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"min_tokens": 99}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"priority": 1 << 40}, "priority"),
        ({"cache_salt": "x" * 2000}, "cache_salt"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
    ],
)
def test_bad_values_name_their_field(fields: dict[str, Any], param: str) -> None:
    error = refusal(completion, **fields)
    assert (error.status, error.param) == (400, param)
    assert "\n" not in str(error)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_bodies_that_are_no_json_object_are_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(CompletionRequest, data)
    assert caught.value.status == 400


def test_content_parts_of_text_are_joined_and_others_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).template_messages() == [
        {"role": "user", "content": "ab"}
    ]
    image = chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    with pytest.raises(ApiError, match=r"messages\[0\].content: got a part of type 'image_url'"):
        image.template_messages()


def test_messages_with_tool_calls_are_refused_and_names_pass() -> None:
    named = chat(messages=[{"role": "user", "content": "a", "name": "Eve", "tool_calls": []}])
    assert named.template_messages() == [{"role": "user", "content": "a", "name": "Eve"}]
    calling = chat(messages=[{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}])
    with pytest.raises(ApiError, match=r"messages\[0\].tool_calls"):
        calling.template_messages()


def test_top_logprobs_needs_logprobs() -> None:
    assert refusal(chat, top_logprobs=2).param == "top_logprobs"
    assert chat(logprobs=True).params().logprobs == 0
    assert chat(logprobs=True, top_logprobs=2).params().logprobs == 2


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "bogus", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "system", "content": None}, "messages[0].content"),
    ],
)
def test_a_message_that_cannot_be_meant_is_refused(message: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(messages=[message]).template_messages()
    assert refused.value.status == 400 and refused.value.param == param
