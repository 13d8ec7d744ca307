"""The logical claim: whatever the configuration, every slot attention reads is the right one and answers are right."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from pagetier.engine.config import EngineConfig
from pagetier.engine.core import EngineCore
from pagetier.engine.messages import TokenOutput
from pagetier.kvstore.keys import root_key
from tests.engine.ledger import LedgerBlocks, LedgerRunner
from tests.engine.trace import VOCAB_SIZE, TracedRequest, make_trace

DOMAIN = b"ledger".ljust(32, b"\0")
MAX_STEPS = 20_000


@dataclass
class Answer:
    """What came back for one request."""

    tokens: list[int]
    finish_reason: str | None = None
    cached: dict[str, int] | None = None


def random_config(rng: random.Random, trace: list[TracedRequest]) -> EngineConfig:
    """Block sizes, pools down to what forces preemption, budgets, seats, depth, chunking."""
    block_size = rng.choice((1, 2, 4, 8, 16))
    longest = max(len(t.request.prompt_ids) + len(t.output) for t in trace)
    need = -(-longest // block_size)
    num_blocks = rng.choice((need, need + 1, need + need // 2, 2 * need, 4 * need, 20 * need))
    chunked = rng.random() < 0.8
    max_model_len = longest + 1
    budget = rng.choice((1, 3, 7, 16, 64, 256)) if chunked else max_model_len + rng.randrange(64)
    return EngineConfig(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        block_size=block_size,
        max_num_seqs=rng.choice((1, 2, 5, 16, 64)),
        max_num_batched_tokens=budget,
        enable_prefix_caching=rng.random() < 0.85,
        enable_chunked_prefill=chunked,
        pipeline_depth=rng.choice((1, 2)),
        paranoid=True,
    )


def run_trace(core: EngineCore, trace: list[TracedRequest]) -> dict[str, Answer]:
    """Feed the trace step by step until every request ended."""
    answers: dict[str, Answer] = {t.request.request_id: Answer([]) for t in trace}
    todo = list(trace)
    for step in range(MAX_STEPS):
        while todo and todo[0].arrives <= step:
            core.add_request(todo.pop(0).request)
        core.abort([t.request.request_id for t in trace if t.aborts == step])
        for output in core.step():
            take(answers[output.request_id], output)
        if not todo and not core.has_work():
            return answers
    raise AssertionError(f"wedged: {core.stats()['requests']}")


def take(answer: Answer, output: TokenOutput) -> None:
    assert answer.finish_reason is None, f"{output.request_id} answered after its end"
    answer.tokens.extend(output.token_ids)
    answer.finish_reason = output.finish_reason
    answer.cached = output.cached_tokens
    assert output.finish_reason != "error", output.error


def verify(core: EngineCore, trace: list[TracedRequest], answers: dict[str, Answer]) -> None:
    """Right answers, nothing leaked."""
    for t in trace:
        answer = answers[t.request.request_id]
        if answer.finish_reason == "abort":
            assert t.aborts is not None
            assert answer.tokens == list(t.output[: len(answer.tokens)])
        else:
            assert answer.tokens == list(t.output), t.request.request_id
            assert answer.finish_reason == t.finish_reason, t.request.request_id
    scheduler = core.scheduler
    assert scheduler.num_unfinished == 0 and not scheduler.launched
    assert scheduler.pool.num_referenced == 0, "blocks leaked"
    assert scheduler.pool.num_available == core.config.num_blocks
    assert scheduler.transfers.num_tickets == 0, "tickets leaked"


def run_seed(seed: int) -> EngineCore:
    rng = random.Random(seed)
    trace = make_trace(rng, 40, abort_rate=rng.choice((0.0, 0.2)))
    config = random_config(rng, trace)
    blocks = LedgerBlocks(config.num_blocks, config.block_size)
    expected = {t.request.request_id: [*t.request.prompt_ids, *t.output] for t in trace}
    runner = LedgerRunner(blocks, VOCAB_SIZE, expected, lazy=rng.random() < 0.7)
    core = EngineCore(config, runner, None, root_of=lambda salt: root_key(DOMAIN, salt.encode()))
    try:
        answers = run_trace(core, trace)
        verify(core, trace, answers)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, {config}: {error}") from error
    return core


@pytest.mark.parametrize("seed", range(20))
def test_no_tiers(seed: int) -> None:
    run_seed(seed)
