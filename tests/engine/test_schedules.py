"""Twenty thousand small lives on the ledger model: aborts, preemptions, swaps, failing tiers and steps, tiny pools.

Each is a few requests, choices of one prompt and shared prefixes among them, over a pool of twice, once or half the
longest one, so that nearly every step is short of blocks. All invariants are checked after every step; at the end each
request has ended, with right tokens as far as it came, and nothing is held or pinned.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest

from pagetier.engine.config import PREEMPTION_MODES, SCHEDULING_POLICIES, EngineConfig
from pagetier.engine.core import EngineCore
from tests.engine.ledger import LedgerBlocks
from tests.engine.test_ledger import SOUND, Clock, ledger_root, make_store, random_tiers
from tests.engine.test_ledger_faults import (
    FailingRunner,
    check_errors,
    local,
    run_until_empty,
    staged,
    verify_prefixes,
)
from tests.engine.trace import SHORT, VOCAB_SIZE, TracedRequest, make_trace

NUM_SEEDS = 20_000
SEEDS_PER_TASK = 250
SHARES = (2.0, 1.0, 0.5)  # of the longest request


def tight_config(rng: random.Random, trace: list[TracedRequest], share: float) -> EngineConfig:
    block_size = rng.choice((1, 2, 4, 4, 8))
    longest = max(len(t.request.prompt_ids) + len(t.output) for t in trace)
    need = -(-longest // block_size)
    chunked = rng.random() < 0.8
    return EngineConfig(
        num_blocks=max(1, int(need * share)),
        max_model_len=longest + 1,
        block_size=block_size,
        max_num_seqs=rng.choice((3, 16)),
        max_num_batched_tokens=rng.choice((4, 16, 64)) if chunked else longest + 1 + rng.randrange(16),
        enable_prefix_caching=rng.random() < 0.9,
        enable_chunked_prefill=chunked,
        pipeline_depth=rng.choice((1, 2)),
        scheduling_policy=rng.choice(SCHEDULING_POLICIES),
        preemption_mode=rng.choice(PREEMPTION_MODES),
        paranoid=True,
    )


def run_schedule(seed: int) -> Counter[str]:
    """One life; what happened in it."""
    rng = random.Random(seed)
    trace = make_trace(rng, rng.randrange(3, 9), rng.choice((0.0, 0.3)), SHORT)
    share = SHARES[seed % 3]
    config = tight_config(rng, trace, share)
    clock, blocks = Clock(), LedgerBlocks(config.num_blocks, config.block_size)
    tiers = random_tiers(SOUND, rng, clock, blocks.block_nbytes)
    expected = {t.request.request_id: [*t.request.prompt_ids, *t.output] for t in trace}
    runner = FailingRunner(blocks, VOCAB_SIZE, expected, lazy=rng.random() < 0.7)
    runner.rng, runner.rate = random.Random(rng.random()), rng.choice((0.0, 0.0, 0.05))
    connect = staged if rng.random() < 0.2 else local
    connector = connect(make_store(rng, tiers, clock, blocks.block_nbytes), blocks, rng) if tiers else None
    core = EngineCore(config, runner, connector, root_of=ledger_root, poison=blocks.poison, clock=clock)
    try:
        outcome = run_until_empty(core, trace, clock)
        verify_prefixes(core, trace, outcome)
        check_errors(outcome, config, trace, failing=runner.rate > 0)
        if connector is not None:
            for _ in range(100):  # a window's late reads end unseen by the engine, their pins with them
                if not any(tier.num_pinned for tier in tiers):
                    break
                clock.sleep(0.01)
                assert not connector.poll(), "an answer after the last"
            connector.check()
        assert all(tier.num_pinned == 0 for tier in tiers), "pins leaked"
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, {config}: {error}") from error
    finally:
        core.close()
    preemption, reasons = core.scheduler.preemption, Counter(a.finish_reason for a in outcome.answers.values())
    return Counter(
        schedules=1,
        recomputes=preemption.num_preemptions - preemption.num_swaps,
        swaps=preemption.num_swaps,
        loaded_blocks=preemption.swapped_in_blocks,
        aborts=reasons["abort"],
        errors=reasons["error"],
        failures=runner.num_failures,
        slots_checked=runner.num_slots_checked,
        simulated_us=round(clock.now_s * 1e6),
    )


def run_schedules(first_seed: int, num_seeds: int) -> Counter[str]:
    logging.disable(logging.ERROR)  # failures are made on purpose, and each is logged with its traceback
    happened: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + num_seeds):
        happened += run_schedule(seed)
    return happened


def test_a_seed_lives_the_same_life_whatever_ran_before_it_and_however_fast() -> None:
    """Else a failure on a busy machine could not be replayed."""
    seeds = range(60)
    lives = {seed: run_schedule(seed) for seed in seeds}
    for seed in random.Random(0).sample(seeds, len(seeds)):
        assert run_schedule(seed) == lives[seed], f"seed {seed}"


@pytest.mark.timeout(1800)
def test_twenty_thousand_schedules() -> None:
    """On all cores. A failure names its seed: `run_schedule(SEED)` replays it."""
    workers = len(os.sched_getaffinity(0))
    happened: Counter[str] = Counter()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        starts = range(0, NUM_SEEDS, SEEDS_PER_TASK)
        for done in [pool.submit(run_schedules, start, SEEDS_PER_TASK) for start in starts]:
            happened += done.result()
    for what in ("recomputes", "swaps", "loaded_blocks", "aborts", "errors", "failures"):
        assert happened[what] > NUM_SEEDS / 20, f"too few {what}: {happened}"
