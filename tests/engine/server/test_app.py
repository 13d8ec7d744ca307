"""Routes and refusals over a live engine double."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

from pagetier.engine.messages import EngineRequest
from pagetier.engine.sampling_params import SamplingParams
from pagetier.engine.server.protocol import ChatCompletionRequest, CompletionRequest
from tests.engine.server.double import DOMAIN
from tests.engine.server.stack import Stack, running_stack


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack() as running:
        yield running


@pytest.fixture
def slow() -> Iterator[Stack]:
    """Each token takes 20 ms, so that requests can be caught while they run."""
    with running_stack(step_s=0.02, limits={"max_len_tokens": 1 << 20}) as running:
        yield running


ENDLESS = {"ignore_eos": True, "max_tokens": 1 << 19}  # hours, at 20 ms a token
PATIENCE_S = 30.0  # for what takes well under a second, unless the machine is busy with something else


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "did not come true in time"
        time.sleep(0.005)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


def test_the_openai_client_is_served(stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused") as client:
        assert [model.id for model in client.models.list()] == ["double", "alias"]
        assert client.models.retrieve("alias").id == "alias"
        text = client.completions.create(model="double", prompt="abc").choices[0].text
        chat = client.chat.completions.create(
            model="alias", messages=[{"role": "user", "content": "hey"}], logprobs=True
        )
        chunks = list(client.completions.create(model="double", prompt="abc", stream=True))
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="double", prompt="a", suffix="b")
    assert text == "abc"
    assert chat.choices[0].message.content == "hey" and chat.model == "alias"
    assert chat.usage is not None and chat.usage.prompt_tokens == 3
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"


def test_a_prompt_that_is_too_long_gets_the_numbers(stack: Stack) -> None:
    answer = stack.http.post("/v1/completions", json={"prompt": "x" * 50, "max_tokens": 20})
    error = error_of(answer)
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded" and error["param"] == "prompt"
    assert "64 tokens" in error["message"] and "50 prompt tokens plus max_tokens 20" in error["message"]
    assert stack.http.post("/v1/completions", json={"prompt": "x" * 50, "max_tokens": 14}).status_code == 200
    chat = {"messages": [{"role": "user", "content": "x" * 64}]}
    assert error_of(stack.http.post("/v1/chat/completions", json=chat))["param"] == "messages"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [5, 259]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "a", "stop_token_ids": [300]}, "stop_token_ids"),
        ({"prompt": "a", "logit_bias": {"259": 1}}, "logit_bias"),
        ({"prompt": "a", "n": 9}, "n"),
        ({"prompt": "half \ud83d of a pair"}, "prompt"),
    ],
)
def test_what_the_engine_could_not_take_is_refused_before(stack: Stack, fields: dict[str, Any], param: str) -> None:
    answer = stack.http.post("/v1/completions", content=json.dumps(fields))
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


@pytest.mark.parametrize("n", [0, -1, 129, 10_000])
def test_every_wrong_number_of_choices_is_told_the_same_bounds(stack: Stack, n: int) -> None:
    error = error_of(stack.http.post("/v1/completions", json={"prompt": "a", "n": n}))
    assert (error["message"], error["param"]) == (f"n: got {n}; allowed: 1 to 128", "n")


@pytest.mark.parametrize("count", [-1, 21])
def test_top_logprobs_is_blamed_by_its_own_name(stack: Stack, count: int) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": count}
    error = error_of(stack.http.post("/v1/chat/completions", json=body))
    assert (error["message"], error["param"]) == (f"top_logprobs: got {count}; allowed: 0 to 20", "top_logprobs")


STRANGE: tuple[Any, ...] = (
    *(None, True, 0, -1, 1 << 70, -(1 << 70), 1e400, float("nan"), 1e-320),
    *("", "\ud800", "x" * 70_000, [], [[]], {}),
    *([1 << 70], ["\udfff"], [""] * 99, {"\ud800": 1}, {"1": "\ud800"}, {"99999999999999999999": 1}),
)


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_no_value_of_any_field_is_an_internal_error(stack: Stack, kind: type[BaseModel]) -> None:
    """Taken or refused; what the protocol takes, the message to the engine must be able to carry."""
    path, sound = "/v1/completions", {"prompt": "a", "max_tokens": 1, "temperature": 0}
    if kind is ChatCompletionRequest:
        path, sound = "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for name in kind.model_fields:
        for value in STRANGE:
            answer = stack.http.post(path, content=json.dumps({**sound, name: value}))
            assert answer.status_code in (200, 400, 404), f"{name} = {value!r:.80}: {answer.text[:500]}"


def test_refusals_have_the_openai_shape(stack: Stack) -> None:
    for answer, status in (
        (stack.http.post("/v1/completions", json={"prompt": "a", "model": "nope"}), 404),
        (stack.http.get("/v1/models/nope"), 404),
        (stack.http.get("/v1/nothing"), 404),
        (stack.http.get("/v1/completions"), 405),
        (stack.http.post("/v1/completions", content=b"{"), 400),
        (stack.http.post("/v1/completions", json={}), 400),
        (stack.http.post("/v1/chat/completions", json={"messages": []}), 400),
        (stack.http.post("/v1/chat/completions", json={"messages": [{"role": "bad", "content": "x"}]}), 400),
        (stack.http.post("/v1/completions", content=b" " * (33 << 20)), 413),
    ):
        assert answer.status_code == status, answer.text
        error_of(answer)


def test_a_request_that_the_engine_fails_is_an_error_and_the_next_is_served(stack: Stack) -> None:
    answer = stack.http.post("/v1/completions", json={"prompt": "FAIL"})
    assert answer.status_code == 500 and "told to fail" in error_of(answer)["message"]
    streamed = stack.http.post("/v1/completions", json={"prompt": "FAIL", "stream": True}).text
    assert "told to fail" in streamed and streamed.endswith("data: [DONE]\n\n")
    assert stack.post("/v1/completions", {"prompt": "ok"})["choices"][0]["text"] == "ok"


def test_no_room_beside_what_a_hung_tier_keeps_is_503(stack: Stack) -> None:
    """The server is well: whoever asks later, or for less, is answered."""
    answer = stack.http.post("/v1/completions", json={"prompt": "HANG"})
    assert (answer.status_code, error_of(answer)["code"]) == (503, "kv_tiers_hang")
    assert error_of(answer)["message"] == "the KV tiers hang: restart" and int(answer.headers["retry-after"]) > 0
    streamed = stack.http.post("/v1/completions", json={"prompt": "HANG", "stream": True}).text
    assert "kv_tiers_hang" in streamed and streamed.endswith("data: [DONE]\n\n")
    assert stack.post("/v1/completions", {"prompt": "ok"})["choices"][0]["text"] == "ok"


def test_api_key_guards_the_openai_routes() -> None:
    with running_stack(api_key="secret") as stack:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            answer = stack.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
        right = {"Authorization": "Bearer secret"}
        assert stack.http.post("/v1/completions", json={"prompt": "a"}, headers=right).status_code == 200
        assert stack.http.get("/health").status_code == 200


def test_the_timeline_of_a_request_is_asked_by_its_id(slow: Stack) -> None:
    """While it runs; an unknown one is a 404."""
    body = ENDLESS | {"prompt": "abc", "n": 2, "stream": True}
    with slow.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # closes the stream when it is dropped
        first = next(line for line in lines if line.startswith("data: "))
        name = json.loads(first.removeprefix("data: "))["id"]
        told = httpx.get(f"{slow.url}/v1/requests/{name}").json()
        assert told["id"] == name
        assert [sequence["request_id"] for sequence in told["sequences"]] == [f"{name}-0", f"{name}-1"]
    missing = slow.http.get("/v1/requests/cmpl-nobody")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "request_not_found")


def test_stats_have_the_documented_shape(stack: Stack) -> None:
    stats = stack.stats()
    counters = ["lookup", "tiers", "preemptions", "resumptions", "harmful_hits", "given_up_loads", "verify"]
    assert list(stats) == ["model", "domain", "uptime_s", *counters]
    assert (stats["model"], stats["domain"]) == ("double", DOMAIN.hex())
    assert set(stats["lookup"]) == {"lookup_tokens", "hit_tokens", "hit_rate"}
    assert list(stats["tiers"]["device"]) == [
        "hit_blocks",
        "hit_tokens",
        "hit_rate",
        "blocks",
        "bytes",
        "capacity_bytes",
        "evictions",
        "errors",
        "corrupt",
        "quarantined",
        "scrubbed_bytes",
        "read_bytes",
        "written_bytes",
        "breaker",
    ]
    assert sum(tier["hit_rate"] for tier in stats["tiers"].values()) == pytest.approx(stats["lookup"]["hit_rate"])


def test_metrics_parse_and_agree_with_stats(stack: Stack) -> None:
    stack.post("/v1/completions", {"prompt": "abcdefgh"})
    stack.http.get("/v1/models/a-name-from-outside")
    stats, text = stack.stats(), stack.http.get("/metrics").text
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    model = (("model_name", "double"),)
    assert samples["vllm:prefix_cache_queries_total", model] == stats["lookup"]["lookup_tokens"]
    assert samples["vllm:num_requests_running", model] == 0
    assert samples["vllm:kv_cache_usage_perc", model] == 0.25
    assert samples["vllm:time_to_first_token_seconds_count", model] >= 1
    assert samples["vllm:generation_tokens_total", model] >= 9
    device = (("tier", "device"),)
    assert samples["pagetier_tier_hit_tokens_total", device] == stats["tiers"]["device"]["hit_tokens"]
    assert samples["pagetier_tier_breaker", (("tier", "nvme"),)] == 0
    assert "a-name-from-outside" not in text, "labels do not grow with what clients send"


def test_health_shows_the_breakers(stack: Stack) -> None:
    assert stack.http.get("/health").json() == {"status": "ok", "tiers": {"nvme": "closed"}}
    assert stack.http.get("/ready").json() == {"ready": True}


def aborted(stack: Stack) -> int:
    """What the engine double counted. The test's thread may not touch the client, so its loop asks."""
    stats = asyncio.run_coroutine_threadsafe(stack.service.client.stats(5), stack.loop).result(5)
    count: int = stats["requests"]["aborted"]
    return count


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_left_by_its_client_is_aborted(slow: Stack, path: str) -> None:
    body: dict[str, Any] = ENDLESS | {"stream": True, "n": 2}
    body |= {"prompt": "abc"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "abc"}]}
    with slow.http.stream("POST", path, json=body) as answer:
        lines = answer.iter_lines()  # kept: the stream is closed with its iterator
        next(lines)
        assert slow.service.client.num_open == 2
    wait_until(lambda: slow.service.client.num_open == 0)
    assert aborted(slow) == 2


def test_a_whole_answer_nobody_waits_for_is_aborted(slow: Stack) -> None:
    def give_up() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{slow.url}/v1/completions", json=ENDLESS | {"prompt": "abc"}, timeout=1.0)

    client = threading.Thread(target=give_up)
    client.start()
    wait_until(lambda: slow.service.client.num_open == 1)
    client.join()
    wait_until(lambda: slow.service.client.num_open == 0)
    assert aborted(slow) == 1


def test_a_stop_string_ends_the_sequence_in_the_engine(slow: Stack) -> None:
    slow.post("/v1/completions", ENDLESS | {"prompt": "abc", "stop": "b"})
    assert aborted(slow) == 1
    assert slow.service.client.num_open == 0


def test_a_full_queue_answers_503_with_retry_after(slow: Stack) -> None:
    with slow.http.stream("POST", "/v1/completions", json=ENDLESS | {"prompt": "abc", "n": 8, "stream": True}) as full:
        lines = full.iter_lines()  # kept: the stream is closed with its iterator
        next(lines)
        answer = httpx.post(f"{slow.url}/v1/completions", json={"prompt": "abc"})
    wait_until(lambda: slow.service.client.num_open == 0)
    assert answer.status_code == 503 and 1 <= int(answer.headers["retry-after"]) <= 60
    assert "8 sequences are running or waiting, allowed: 8" in error_of(answer)["message"]
    assert slow.http.post("/v1/completions", json={"prompt": "abc"}).status_code == 200


def test_too_many_prompt_tokens_answer_503_with_retry_after() -> None:
    """Those of prompts without output count; alone, a request is never too long to wait."""
    with running_stack(limits={"max_num_queued_tokens": 8}) as stack:
        backlog = stack.service.client.backlog
        other = EngineRequest("other", tuple(range(6)), SamplingParams(), seed=0)
        stack.loop.call_soon_threadsafe(backlog.add, [other])
        wait_until(lambda: backlog.num_tokens == 6)
        answer = httpx.post(f"{stack.url}/v1/completions", json={"prompt": "abc", "n": 2})
        assert answer.status_code == 503 and 1 <= int(answer.headers["retry-after"]) <= 60
        message = error_of(answer)["message"]
        assert "6 prompt tokens wait to be computed, 3 would be added, allowed: 8 (--max-num-queued-tokens)" in message
        assert stack.http.post("/v1/completions", json={"prompt": "ab", "n": 2}).status_code == 200
        stack.loop.call_soon_threadsafe(backlog.end, "other")
        wait_until(lambda: backlog.num_tokens == 0)
        assert stack.http.post("/v1/completions", json={"prompt": "a" * 12}).status_code == 200
        assert backlog.num_tokens == backlog.num_open == 0


def test_silence_is_broken_by_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagetier.engine.server.app.PING_S", 0.02)
    with running_stack(step_s=0.2) as stack:
        text = stack.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "stream": True}).text
    assert text.startswith(": ping\n\n")
    assert text.endswith("data: [DONE]\n\n")


def test_answers_do_not_wait_for_a_delayed_ack(stack: Stack) -> None:
    """Nagle's algorithm holds a body back until the client acknowledges the header: 40 ms each on Linux."""
    times = []
    for _ in range(20):
        start_s = time.monotonic()
        stack.http.get("/v1/models")
        times.append(time.monotonic() - start_s)
    assert sorted(times)[len(times) // 2] < 0.02
