"""`LLM` on a tiny model: no sampling option sees preemption, pipeline or tiers; after Ctrl-C it goes on."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagetier.engine.llm import LLM, RequestOutput
from pagetier.engine.sampling_params import SamplingParams
from pagetier.kvstore.errors import ConfigError, PagetierError
from tests.engine.checkpoints import byte_level_tokenizer, hf_model, tokenizer_fields, write_gguf

KV_BYTES = 512  # of one token: 2 layers, k and v, 2 heads of 16, float32
NUM_NEW = 40
NUM_INTERRUPTS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path, hf_model("LlamaForCausalLM"), **tokenizer_fields(byte_level_tokenizer()))
    return path


def llm_of(checkpoint: Path, num_tokens: int = 4096, **options: Any) -> LLM:
    options = {"dtype": "float32", "threads": 1, "nvme_allow_unsafe": True, **options}
    return LLM(str(checkpoint), kv_cache_memory=num_tokens * KV_BYTES, **options)


def make_prompts() -> list[list[int]]:
    """Beginnings of one text, some of them whole blocks, and two of their own."""
    rng = random.Random(5)
    text, other = ([rng.randrange(3, 440) for _ in range(80)] for _ in range(2))
    return [text[:32], text[:33], text[:64], other[:48], text[:16], other[:7]]


PROMPTS = make_prompts()

# What each option could trip over: a token still on its way (penalties), a position counted twice (seed, min_tokens),
# a token chosen again or dropped (logprobs), an end that comes one step late (stop).
PARAMS = {
    "drawn, with log-probabilities": SamplingParams(temperature=1.0, seed=11, n=2, max_tokens=NUM_NEW, logprobs=3),
    "penalties": SamplingParams(
        temperature=0.8,
        seed=7,
        max_tokens=NUM_NEW,
        frequency_penalty=1.5,
        presence_penalty=0.5,
        repetition_penalty=1.3,
        ignore_eos=True,
    ),
    "greedy penalties": SamplingParams(
        temperature=0.0, max_tokens=NUM_NEW, frequency_penalty=2.0, repetition_penalty=1.5, logprobs=0, ignore_eos=True
    ),
    "stops": SamplingParams(
        temperature=2.0, seed=3, max_tokens=NUM_NEW, min_tokens=5, stop=("e", "th"), stop_token_ids=tuple(range(5, 25))
    ),
    "one token": SamplingParams(temperature=1.0, seed=2, max_tokens=1, n=3),
    "the best of": SamplingParams(temperature=1.5, seed=4, max_tokens=12, n=2, best_of=5),
}
CONFIGS: dict[str, Mapping[str, Any]] = {
    "tight": {"num_tokens": 128, "max_num_batched_tokens": 23},
    "tight, depth 1": {"num_tokens": 128, "pipeline_depth": 1},
    "blocks of one token": {"num_tokens": 120, "block_size": 1, "max_num_batched_tokens": 50},
    "room for one request": {"num_tokens": 104, "block_size": 8},
    "a tier, but no prefix cache": {"num_tokens": 128, "enable_prefix_caching": False, "kv_tier": ("nvme",)},
    "nvme, tight": {"num_tokens": 128, "kv_tier": ("nvme",), "load_budget_s": 30.0},
    "no chunked prefill": {"num_tokens": 128, "enable_chunked_prefill": False},
}


def comparable(answers: Sequence[RequestOutput]) -> list[Any]:
    """All that a caller sees but where its prompt's KV came from."""
    return [
        [
            (o.index, o.token_ids, o.text, o.finish_reason, o.stop_reason, [t and (t.rank, t.top) for t in o.logprobs])
            for o in answer.outputs
        ]
        for answer in answers
    ]


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> dict[str, list[Any]]:
    """Each prompt alone, nothing cached, one step at a time."""
    with llm_of(checkpoint, pipeline_depth=1, enable_prefix_caching=False) as llm:
        return {
            name: comparable([llm.generate([prompt], params)[0] for prompt in PROMPTS])
            for name, params in PARAMS.items()
        }


@pytest.mark.parametrize("name", CONFIGS)
def test_no_option_sees_what_the_cache_did(
    name: str, checkpoint: Path, alone: dict[str, list[Any]], tmp_path: Path
) -> None:
    with llm_of(checkpoint, paranoid=True, nvme_path=tmp_path, **CONFIGS[name]) as llm:
        for _ in range(2):  # the second time over what the first left
            for params_name, params in PARAMS.items():
                answers = llm.generate(PROMPTS, params)
                assert comparable(answers) == alone[params_name], params_name
                for answer in answers:
                    assert sum(answer.cached_tokens.values()) < len(answer.prompt_token_ids)
        stats = llm.stats()
        assert stats["preemptions"]["recompute"] or "nvme" in CONFIGS[name].get("kv_tier", ()), "the pool is not tight"
        assert set(stats["requests"].values()) == {0}
        assert 0.0 <= stats["lookup"]["hit_rate"] < 1.0
        cached = CONFIGS[name].get("enable_prefix_caching", True)
        assert bool(stats["lookup"]["hit_tokens"]) == cached


def test_the_options_bite(alone: dict[str, list[Any]]) -> None:
    """Else their equality says nothing."""
    reasons = [output[3] for answer in alone["stops"] for output in answer]
    assert "stop" in reasons
    drawn, repeated = alone["drawn, with log-probabilities"][2], alone["penalties"][2]
    assert drawn[0][1] != drawn[1][1] and len(set(repeated[0][1])) > NUM_NEW // 2


def test_the_best_of_are_the_likeliest(checkpoint: Path) -> None:
    """Those that `n` alone would give, ordered by their cumulative log-probability; nothing unasked is told."""
    drawn = SamplingParams(temperature=1.5, seed=4, max_tokens=12, logprobs=0)
    with llm_of(checkpoint) as llm:
        every = llm.generate([PROMPTS[0]], replace(drawn, n=6))[0].outputs
        best = llm.generate([PROMPTS[0]], replace(drawn, n=2, best_of=6, logprobs=None))[0].outputs
    sums = [sum(token.logprob for token in output.logprobs if token is not None) for output in every]
    assert [output.cumulative_logprob for output in every] == pytest.approx(sums)
    assert len(set(sums)) == 6, "each choice has random numbers of its own"
    order = sorted(range(6), key=lambda i: -sums[i])[:2]
    assert [output.token_ids for output in best] == [every[i].token_ids for i in order]
    assert [output.index for output in best] == [0, 1] and not best[0].logprobs
    assert [output.cumulative_logprob for output in best] == pytest.approx([sums[i] for i in order])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises, even where the tests were begun by a shell that had it ignored, as one does for `make test &`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("depth", [1, 2])
def test_an_interrupted_call_leaves_an_engine_that_goes_on(checkpoint: Path, depth: int) -> None:
    """Ctrl-C at any moment: the call ends at once, and the next one is right."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    rng = random.Random(depth)
    with llm_of(checkpoint, 512, pipeline_depth=depth, paranoid=True) as llm:
        start_s = time.monotonic()
        expected = comparable(llm.generate(PROMPTS, params))
        took_s = time.monotonic() - start_s
        num_cut = 0
        for _ in range(NUM_INTERRUPTS):
            timer = threading.Timer(rng.random() * took_s, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start()  # it may come before this returns
                llm.generate(PROMPTS * 2, params)
                num_cut -= 1
                time.sleep(10 + took_s)  # it came too late to cut the call; let it come here
            num_cut += 1
            timer.join()
            assert comparable(llm.generate(PROMPTS, params)) == expected
        assert num_cut > 0 and set(llm.stats()["requests"].values()) == {0}


def test_a_handler_of_the_callers_own_is_called_and_comes_back(checkpoint: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    mine = signal.getsignal(signal.SIGINT)
    try:
        with llm_of(checkpoint) as llm:
            timer = threading.Timer(0.005, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            answers = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True))
            timer.join()
        assert [len(answer.outputs[0].token_ids) for answer in answers] == [NUM_NEW] * len(PROMPTS)
        assert seen == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_unfit_prompt_among_good_ones_ends_the_call_and_not_the_engine(checkpoint: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    with llm_of(checkpoint, 128, paranoid=True) as llm:
        expected = comparable(llm.generate(PROMPTS, params))
        for bad in ([5] * 128, [5] * 1000, [], [-1], [512]):
            for at in range(0, len(PROMPTS), 2):
                with pytest.raises(PagetierError):
                    llm.generate([*PROMPTS[:at], bad, *PROMPTS[at:]], params)
            assert comparable(llm.generate(PROMPTS, params)) == expected


def test_prompts_are_texts_or_ids_and_none_is_lost(checkpoint: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2)
    ids = PROMPTS[5]
    with llm_of(checkpoint) as llm:
        [expected] = comparable(llm.generate([ids], params))
        forms: list[Any] = [ids, tuple(ids), np.array(ids), list(np.array(ids)), [np.array(ids)], (tuple(ids),)]
        for one in forms:
            assert comparable(llm.generate(one, params)) == [expected]
        both: list[Any] = ["a", ids, "b"]
        assert len(llm.generate(both, params)) == 3
        mixtures: list[Any] = [[5, "a"], ["a", 5], [ids, 5]]
        for mixture in mixtures:
            with pytest.raises(ConfigError, match="prompts: got .*token id 5"):
                llm.generate(mixture, params)


def test_engines_of_one_process_share_nothing_but_the_store(checkpoint: Path, tmp_path: Path) -> None:
    """Their calls alternate on one thread each; one folder below both."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=NUM_NEW, ignore_eos=True)
    options: dict[str, Any] = {"kv_tier": ("nvme",), "nvme_path": tmp_path, "load_budget_s": 30.0, "paranoid": True}
    with llm_of(checkpoint) as reference:
        expected = comparable(reference.generate(PROMPTS, params))
    got: dict[int, list[Any]] = {}

    def use(number: int, llm: LLM) -> None:
        got[number] = [comparable(llm.generate(PROMPTS, params)) for _ in range(4)]

    with llm_of(checkpoint, 128, **options) as one, llm_of(checkpoint, 160, pipeline_depth=1, **options) as two:
        threads = [threading.Thread(target=use, args=pair) for pair in enumerate((one, two))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert got == {0: [expected] * 4, 1: [expected] * 4}


GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def cached(llm: LLM, prompt: list[int]) -> dict[str, int]:
    return llm.generate([prompt], GREEDY)[0].cached_tokens


def test_other_weights_reuse_nothing_and_the_same_version_finds_its_own(checkpoint: Path, tmp_path: Path) -> None:
    (prompt,) = (PROMPTS[2] + [5],)
    options: dict[str, Any] = {"kv_tier": ("nvme",), "nvme_path": tmp_path, "load_budget_s": 30.0, "paranoid": True}
    with llm_of(checkpoint, **options) as llm:
        first = llm.domain
        assert (llm.weights_version, cached(llm, prompt), cached(llm, prompt)) == ("", {}, {"device": 64})
        assert llm.set_weights_version("v2") == llm.weights_version == "v2"
        assert llm.domain != first
        assert (cached(llm, prompt), cached(llm, prompt)) == ({}, {"device": 64})
        drawn = llm.set_weights_version()
        assert cached(llm, prompt) == {}
        assert llm.set_weights_version() != drawn
        assert llm.set_weights_version("") == "" and llm.domain == first
        assert cached(llm, prompt) == {"device": 64}, "a version is the caller's word that the weights are the same"
    for version, found in (("v2", {"nvme": 64}), ("v3", {}), (drawn, {"nvme": 64})):
        with llm_of(checkpoint, weights_version=version, **options) as llm:
            assert cached(llm, prompt) == found, version


@pytest.mark.parametrize("version", ["x" * 257, "two\nlines", "\ud800", 5])
def test_what_is_no_version_is_refused_and_changes_nothing(checkpoint: Path, version: Any) -> None:
    with llm_of(checkpoint) as llm:
        before = llm.domain
        with pytest.raises(ConfigError, match="weights_version: got"):
            llm.set_weights_version(version)
        assert llm.domain == before
        with pytest.raises(ConfigError, match="weights_version: got"):
            llm_of(checkpoint, weights_version=version)


def test_a_salt_that_is_no_text_is_refused_by_name(checkpoint: Path) -> None:
    with llm_of(checkpoint) as llm:
        with pytest.raises(ConfigError, match="cache_salt: contains half of a surrogate pair"):
            llm.generate("a", GREEDY, cache_salt="\ud800")
        assert len(llm.generate("a", GREEDY, cache_salt="é")[0].outputs[0].token_ids) == 4
