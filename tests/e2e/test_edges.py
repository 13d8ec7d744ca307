"""Requests at the edges of what an engine takes: the real model, a pool of twelve blocks, checked at every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagetier.engine.llm import LLM, CompletionOutput
from pagetier.engine.sampling_params import SamplingParams
from pagetier.kvstore.errors import ClosedError, PagetierError
from tests.e2e.smollm2 import (  # noqa: F401
    KV_BYTES,
    PATIENT,
    Answer,
    Traced,
    assert_same,
    cold_answers,
    engine_of,
    request,
    run,
    smollm2,
    text_ids,
)
from tests.kvstore.valkey import Valkey, valkey, valkey_server  # noqa: F401

POOL_TOKENS = 192
QUESTION = "The capital of France is"
ANSWER = " Paris.\n\nThe answer is:"  # the model's own
BAD_IDS = (-1, 49_152, 1 << 31, 1 << 40)


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:  # noqa: F811
    with LLM(str(smollm2), dtype="float32", kv_cache_memory=POOL_TOKENS * KV_BYTES, paranoid=True) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> Iterator[None]:
    yield
    assert set(llm.stats()["requests"].values()) == {0}


def greedy(llm: LLM, prompts: str | Sequence[Sequence[int]], **options: Any) -> list[CompletionOutput]:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, **options})
    return [answer.outputs[0] for answer in llm.generate(prompts, params)]


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 32, 33, 48])
def test_a_prompt_comes_twice(llm: LLM, text_ids: list[int], num_tokens: int) -> None:  # noqa: F811
    """All of it is on the device the second time, the last token is computed all the same."""
    first = greedy(llm, [text_ids[:num_tokens]])
    assert greedy(llm, [text_ids[:num_tokens]]) == first
    assert greedy(llm, [text_ids[:num_tokens]], max_tokens=1)[0].token_ids == first[0].token_ids[:1]


def test_refused_prompts_are_named_and_leave_nothing_behind(llm: LLM, text_ids: list[int]) -> None:  # noqa: F811
    good = text_ids[:20]
    sound = greedy(llm, [good])
    refused: list[tuple[str | list[list[int]], str]] = [
        ("", "the prompt is empty"),
        ([good, []], "the prompt is empty"),
        ([good, text_ids[: POOL_TOKENS + 1]], "193 tokens, but the KV cache holds 192"),
        ([good, [0] * 8192], "8192 tokens, but prompt and output together may have 8192"),
        *(([good, [5, token]], f"token id {token}; allowed: 0 to 49151") for token in BAD_IDS),
    ]
    for bad, reason in refused:
        with pytest.raises(PagetierError, match=reason):
            greedy(llm, bad)
        assert set(llm.stats()["requests"].values()) == {0}, reason
    assert greedy(llm, []) == []
    assert greedy(llm, [good]) == sound


def test_a_bad_token_id_fails_its_own_request_alone(smollm2: Path, text_ids: list[int]) -> None:  # noqa: F811
    """In a core, where others run in the same step."""
    good = request("good", text_ids[:9], 3)
    requests = [good, *(request(str(token), (5, token), 3) for token in BAD_IDS)]
    ends: dict[str, str | None] = {}
    with engine_of(smollm2, num_tokens=POOL_TOKENS) as engine:
        for spec in requests:
            engine.core.add_request(spec)
        while engine.core.has_work() or len(ends) < len(requests):
            ends |= {output.request_id: output.finish_reason for output in engine.core.step()}
    assert ends == {"good": "length", **{str(token): "error" for token in BAD_IDS}}


@pytest.mark.parametrize(("num_prompt", "num_output"), [(192, 1), (191, 2), (177, 16), (176, 17), (175, 18)])
@pytest.mark.parametrize("max_tokens", [10**9, None])
def test_a_lone_request_that_outgrows_the_pool_ends_with_length(
    llm: LLM,
    text_ids: list[int],  # noqa: F811
    num_prompt: int,
    num_output: int,
    max_tokens: int | None,
) -> None:
    """The last token is sampled from a full pool; its own KV has no place and needs none."""
    output = greedy(llm, [text_ids[:num_prompt]], max_tokens=max_tokens)[0]
    assert (output.finish_reason, len(output.token_ids)) == ("length", num_output)


def test_requests_that_outgrow_the_pool_together_take_turns(llm: LLM, text_ids: list[int]) -> None:  # noqa: F811
    prompts = [text_ids[i * 200 : i * 200 + 75] for i in range(2)]
    alone = [greedy(llm, [prompt], max_tokens=24)[0].token_ids for prompt in prompts]
    before = llm.stats()["preemptions"]["recompute"]
    together = greedy(llm, prompts, max_tokens=24)
    assert [output.token_ids for output in together] == alone
    assert llm.stats()["preemptions"]["recompute"] > before


def test_choices_do_not_depend_on_the_batch(llm: LLM, text_ids: list[int]) -> None:  # noqa: F811
    params = SamplingParams(temperature=1.0, n=4, seed=3, max_tokens=6)
    alone = llm.generate([text_ids[:16]], params)[0]
    assert len({tuple(output.token_ids) for output in alone.outputs}) == 4
    assert [output.index for output in alone.outputs] == [0, 1, 2, 3]
    for answer in llm.generate([text_ids[:16], text_ids[:16]], params):
        assert answer.outputs == alone.outputs


@pytest.mark.parametrize("stop", ["Paris", " Paris", ".", "\n\nThe", "The answer", "er is", "no such text"])
def test_stop_strings_cut_the_text(llm: LLM, stop: str) -> None:
    output = greedy(llm, QUESTION, max_tokens=8, stop=(stop,))[0]
    assert output.text == ANSWER.split(stop)[0]
    ended = stop in ANSWER
    assert (output.finish_reason, output.stop_reason) == (("stop", stop) if ended else ("length", None))


def test_salts_do_not_see_each_other(llm: LLM, text_ids: list[int]) -> None:  # noqa: F811
    prompt, params = text_ids[1000:1064], SamplingParams(temperature=0.0, max_tokens=2)
    cached = [llm.generate([prompt], params, cache_salt=salt)[0].cached_tokens for salt in ("a", "a", "b", "")]
    assert cached == [{}, {"device": 63}, {}, {}]


def test_after_close(smollm2: Path) -> None:  # noqa: F811
    llm = LLM(str(smollm2), dtype="float32", kv_cache_memory=POOL_TOKENS * KV_BYTES)
    llm.close()
    llm.close()
    with pytest.raises(ClosedError):
        llm.generate(QUESTION)


def test_aborted_at_every_step(
    smollm2: Path,  # noqa: F811
    text_ids: list[int],  # noqa: F811
    tmp_path: Path,
    valkey: Valkey,  # noqa: F811
) -> None:
    """Lookups, loads, saves and steps under way: nothing leaks, and what was stored meanwhile is right."""
    documents = [request(f"d{i}", text_ids[i * 300 : i * 300 + 117], 3) for i in range(2)]
    cold = cold_answers(smollm2, documents)
    stores: dict[str, Any] = {"redis_url": valkey.url, "nvme_path": tmp_path / "nvme", **PATIENT}
    with engine_of(smollm2, ("nvme", "redis"), num_tokens=POOL_TOKENS, paranoid=True, **stores) as engine:
        for steps in (0, 1, 2, 3, 5, 8, 13):
            trace = [Traced(replace(d, request_id=f"{d.request_id}-{steps}"), aborts=steps) for d in documents]
            answers = run(engine, trace)
            assert_same(answers, {name: cold[name.split("-")[0]] for name in answers}, aborted=True)
        assert_same(run(engine, [Traced(d) for d in documents]), cold)


def test_two_engines_share_folder_and_valkey(
    smollm2: Path,  # noqa: F811
    text_ids: list[int],  # noqa: F811
    tmp_path: Path,
    valkey: Valkey,  # noqa: F811
) -> None:
    """Both write and read at once; what the one computed the other finds, under the same salt only."""
    documents = [request(f"d{i}", text_ids[i * 300 : i * 300 + 117], 3) for i in range(3)]
    cold = cold_answers(smollm2, documents)
    stores: dict[str, Any] = {"redis_url": valkey.url, "nvme_path": tmp_path / "nvme", **PATIENT}
    with (
        engine_of(smollm2, ("nvme", "redis"), **stores) as one,
        engine_of(smollm2, ("nvme", "redis"), **stores) as two,
    ):
        trace = [Traced(d, arrives=3 * i) for i, d in enumerate(documents)]
        others = {f"{d.request_id}-two": Answer() for d in documents}
        for spec in reversed(documents):
            two.core.add_request(replace(spec, request_id=f"{spec.request_id}-two"))

        def step_the_other(_: int = 0) -> None:
            for output in two.core.step():
                others[output.request_id].take(output)

        assert_same(run(one, trace, step_the_other), cold)
        while two.core.has_work():
            step_the_other()
        assert_same({name.split("-")[0]: answer for name, answer in others.items()}, cold)
        fresh = request("fresh", text_ids[1200:1317], 3)
        wanted = run(one, [Traced(fresh)])
        one.core.flush(30.0)
        other_salt = replace(fresh, request_id="salted", cache_salt="tenant")
        found = run(two, [Traced(fresh), Traced(other_salt)])
        assert sum(found["fresh"].cached_tokens.get(tier, 0) for tier in ("nvme", "redis")) == 112
        assert found["salted"].cached_tokens == {}
        assert found["fresh"].token_ids == found["salted"].token_ids == wanted["fresh"].token_ids
