"""The logical claim where the engine itself is in trouble: steps that raise, pools smaller than a request."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from pagetier.connectors.local import LocalConnector
from pagetier.connectors.staged import StagedConnector
from pagetier.engine.batch import Batch, StepResult
from pagetier.engine.config import EngineConfig
from pagetier.engine.core import EngineCore
from pagetier.kvstore.store import TieredStore
from tests.engine.ledger import LedgerBlocks, LedgerRunner
from tests.engine.test_ledger import (
    MAX_STEPS,
    SOUND,
    Answer,
    Clock,
    ledger_root,
    make_store,
    random_config,
    random_tiers,
)
from tests.engine.trace import VOCAB_SIZE, TracedRequest, make_trace

NUM_SEEDS = 40


class FailingRunner(LedgerRunner):
    """Some batches raise: when they are launched, or when they are collected, with or without part of their work done.

    What builds on a failed batch's tokens must never be seen to run: they are out of the vocabulary.
    """

    rate = 0.0
    rng = random.Random(0)
    num_failures = 0

    def launch(self, batch: Batch) -> None:
        if self.rng.random() < self.rate / 2:
            self.num_failures += 1
            raise RuntimeError("launch failed")
        super().launch(batch)

    def _run(self, batch: Batch) -> StepResult:
        fails, works = self.rng.random() < self.rate / 2, self.rng.random() < 0.5
        if fails and not works:
            self._last_sampled[:] = VOCAB_SIZE
        if not fails or works:
            result = super()._run(batch)
        if fails:
            self.num_failures += 1
            raise RuntimeError("step failed")
        return result


class LateStaging:
    """Implements `connectors.staged.Staging`: a copy, like one on a stream of the device, happens as late as it may."""

    def __init__(self, blocks: LedgerBlocks, num_slots: int, rng: random.Random) -> None:
        self.num_slots = num_slots
        self._blocks, self._rng = blocks, rng
        self._slots = [bytearray(blocks.block_nbytes) for _ in range(num_slots)]
        self._queue: deque[tuple[int, list[tuple[memoryview, memoryview]]]] = deque()
        self._num_started = self._num_done = 0

    def view(self, slot: int) -> memoryview:
        return memoryview(self._slots[slot])

    def start_copy_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> object:
        pairs = zip(slots, block_ids, strict=True)
        return self._start([(self.view(slot), self._blocks.readable(block)) for slot, block in pairs])

    def start_copy_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> object:
        pairs = zip(slots, block_ids, strict=True)
        return self._start([(self._blocks.writable(block), self.view(slot)) for slot, block in pairs])

    def _start(self, copies: list[tuple[memoryview, memoryview]]) -> int:
        self._num_started += 1
        self._queue.append((self._num_started, copies))
        return self._num_started

    def is_done(self, token: object) -> bool:
        assert isinstance(token, int)
        while self._num_done < token and self._rng.random() < 0.5:
            self._num_done, copies = self._queue.popleft()
            for destination, source in copies:
                destination[:] = source
        return self._num_done >= token

    def close(self) -> None:
        self._queue.clear()


def staged(store: TieredStore, blocks: LedgerBlocks, rng: random.Random) -> StagedConnector:
    """As on a GPU, with a window of a few blocks."""
    return StagedConnector(store, LateStaging(blocks, rng.choice((1, 2, 5, 40)), rng))


def local(store: TieredStore, blocks: LedgerBlocks, rng: random.Random) -> LocalConnector:
    return LocalConnector(store, blocks)


@dataclass
class Outcome:
    """What a run is judged by."""

    answers: dict[str, Answer]
    errors: dict[str, str]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Failures are made on purpose, and each is logged with its traceback."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def run_until_empty(core: EngineCore, trace: list[TracedRequest], clock: Clock) -> Outcome:
    outcome = Outcome({t.request.request_id: Answer([]) for t in trace}, {})
    todo = list(trace)
    for step in range(MAX_STEPS):
        clock.sleep(0.001)
        while todo and todo[0].arrives <= step:
            core.add_request(todo.pop(0).request)
        core.abort([t.request.request_id for t in trace if t.aborts == step])
        for output in core.step():
            answer = outcome.answers[output.request_id]
            assert answer.finish_reason is None, f"{output.request_id} answered after its end"
            answer.tokens.extend(output.token_ids)
            answer.finish_reason = output.finish_reason
            if output.finish_reason == "error":
                outcome.errors[output.request_id] = output.error
        if not todo and not core.has_work():
            return outcome
    raise AssertionError(f"wedged: {core.stats()['requests']}")


def verify_prefixes(core: EngineCore, trace: list[TracedRequest], outcome: Outcome) -> None:
    """Every request ended, with right tokens as far as it came; nothing leaked."""
    for t in trace:
        answer = outcome.answers[t.request.request_id]
        assert answer.tokens == list(t.output[: len(answer.tokens)]), t.request.request_id
        assert answer.finish_reason in ("stop", "length", "abort", "error"), t.request.request_id
        if answer.finish_reason == "stop":
            assert answer.tokens == list(t.output), t.request.request_id
    scheduler = core.scheduler
    assert scheduler.num_unfinished == 0 and not scheduler.launched
    assert scheduler.pool.num_referenced == 0, "blocks leaked"
    assert scheduler.pool.num_available == core.config.num_blocks
    assert scheduler.transfers.num_tickets == 0, "tickets leaked"


def run_faulty(
    seed: int,
    rate: float,
    small_pool: bool,
    connect: Callable[[TieredStore, LedgerBlocks, random.Random], LocalConnector | StagedConnector] = local,
) -> tuple[int, int]:
    """One engine; the number of failures, and of requests that ended with an error."""
    rng = random.Random(seed)
    trace = make_trace(rng, 30, abort_rate=rng.choice((0.0, 0.3)))
    config = random_config(rng, trace)
    if small_pool:
        config = replace(config, num_blocks=rng.choice((1, 2, 3, 5, max(1, config.num_blocks // 3))))
    else:
        config = replace(config, num_blocks=max(config.num_blocks, -(-config.max_model_len // config.block_size)))
    clock = Clock()
    blocks = LedgerBlocks(config.num_blocks, config.block_size)
    tiers = random_tiers(SOUND, rng, clock, blocks.block_nbytes)
    expected = {t.request.request_id: [*t.request.prompt_ids, *t.output] for t in trace}
    runner = FailingRunner(blocks, VOCAB_SIZE, expected, lazy=rng.random() < 0.7)
    runner.rng, runner.rate = random.Random(rng.random()), rate
    connector = connect(make_store(rng, tiers, clock, blocks.block_nbytes), blocks, rng) if tiers else None
    core = EngineCore(
        config,
        runner,
        connector,
        root_of=ledger_root,
        poison=blocks.poison,
        clock=clock,
    )
    try:
        outcome = run_until_empty(core, trace, clock)
        verify_prefixes(core, trace, outcome)
        check_errors(outcome, config, trace, failing=rate > 0)
        if connector is not None:
            for _ in range(100):  # a window's late reads end unseen by the engine, their pins with them
                clock.sleep(0.01)
                assert not connector.poll(), "an answer after the last"
            connector.check()
        assert all(tier.num_pinned == 0 for tier in tiers), "pins leaked"
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, {config}: {error}") from error
    finally:
        core.close()
    return runner.num_failures, len(outcome.errors)


def check_errors(outcome: Outcome, config: EngineConfig, trace: list[TracedRequest], failing: bool) -> None:
    """Errors are said in words: the step's, or that the prompt does not fit; nothing else ends a request early."""
    room = config.num_blocks * config.block_size
    for t in trace:
        name, answer = t.request.request_id, outcome.answers[t.request.request_id]
        fits = len(t.request.prompt_ids) <= room
        if name in outcome.errors:
            wanted = "the model step failed: RuntimeError" if fits else f"the KV cache holds {room}"
            assert wanted in outcome.errors[name] and (failing or not fits), outcome.errors[name]
        elif answer.finish_reason == "length":
            outgrown = len(t.request.prompt_ids) + len(answer.tokens) > room
            assert outgrown or answer.tokens == list(t.output), f"{name} was cut with room left"


@pytest.mark.parametrize("small_pool", [False, True], ids=["pool that fits", "pool smaller than a request"])
def test_a_step_that_raises_ends_its_requests_and_no_others(small_pool: bool) -> None:
    failures = errors = 0
    for seed in range(NUM_SEEDS):
        failed, ended = run_faulty(seed, rate=0.05, small_pool=small_pool)
        failures, errors = failures + failed, errors + ended
    assert failures > NUM_SEEDS and errors > NUM_SEEDS


def test_pools_smaller_than_a_request() -> None:
    """Down to one block: each is answered with what fits, or refused with the numbers; none waits for ever."""
    for seed in range(NUM_SEEDS):
        run_faulty(seed, rate=0.0, small_pool=True)


def test_blocks_that_pass_through_a_staging_window() -> None:
    """The device's copies run beside its steps: none may read a block too soon or write one too late."""
    for seed in range(NUM_SEEDS):
        run_faulty(seed, rate=0.02 * (seed % 2), small_pool=seed % 3 == 0, connect=staged)
