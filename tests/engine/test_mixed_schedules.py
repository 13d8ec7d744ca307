"""Small lives in which everything may happen at once: choices that fork, swaps, aborts, weights that change in place,
tiers that go silent and come back, answers that come late, shadow checks, priorities with a gap.

Each is a few requests over a pool of twice, once or half the longest one; in every third they come all at once, and a
roomy tier takes its time to say that it has saved. All invariants are checked after every step;
at the end each request has ended, each token is one that the weights of its moment say, and nothing is held or pinned.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from pagetier.connectors.local import LocalConnector
from pagetier.connectors.staged import StagedConnector
from pagetier.engine.config import EngineConfig
from pagetier.engine.core import EngineCore
from pagetier.engine.identity import roots_of
from pagetier.engine.messages import TokenOutput
from pagetier.engine.policies.make import POLICIES
from pagetier.engine.policies.ranked import Priority
from pagetier.engine.request import Request
from pagetier.engine.transfers import Transfers
from pagetier.kvstore.job import Completion, LookupDone, PutDone
from pagetier.kvstore.memory import Faults, MemoryTier
from pagetier.kvstore.store import TieredStore
from tests.engine.ledger import LedgerBlocks
from tests.engine.test_ledger import MAX_STEPS, SOUND, Clock, make_store, random_tiers
from tests.engine.test_ledger_faults import FailingRunner, local, staged
from tests.engine.test_schedules import SHARES, tight_config
from tests.engine.test_weights_version import Heard, Life, identity_of, weights_of
from tests.engine.trace import VOCAB_SIZE, TracedRequest, TraceSize, make_trace

NUM_SEEDS = 240
SIZE = TraceSize(32, (1, 4, 12, 20, 30), 200)
CROWD = replace(SIZE, num_steps=40)


class LateConnector(LocalConnector):
    """What a job has to say comes in order, but now and then late: a few steps, or longer than anybody's patience."""

    def __init__(self, store: TieredStore, blocks: LedgerBlocks, clock: Clock, rng: random.Random) -> None:
        super().__init__(store, blocks)
        self._clock, self._rng = clock, rng
        self._delays_s = rng.choice(((0.0, 0.003), (0.0, 0.02, 0.1), (0.0, 0.0, 0.0, 3.0)))
        self._held: list[tuple[float, Completion]] = []
        self._due_s: dict[tuple[bool, int], float] = {}

    def poll(self) -> list[Completion]:
        for done in super().poll():
            job = (True, done.ticket) if isinstance(done, LookupDone) else (False, done.job)
            due_s = max(self._due_s.get(job, 0.0), self._clock() + self._delay_s(done))
            self._due_s[job] = due_s
            self._held.append((due_s, done))
        ready = [done for due_s, done in self._held if due_s <= self._clock()]
        self._held = [(due_s, done) for due_s, done in self._held if due_s > self._clock()]
        return ready

    def _delay_s(self, done: Completion) -> float:
        return self._rng.choice(self._delays_s)


class LateSaves(LateConnector):
    """Only saves are late, by up to half of the patience, so that swapping goes on: while those of one request are
    under way, another's blocks are evicted, and it is asked about, found in the tier and loaded."""

    def __init__(self, store: TieredStore, blocks: LedgerBlocks, clock: Clock, rng: random.Random) -> None:
        super().__init__(store, blocks, clock, rng)
        self._delays_s = rng.choice(((0.0, 0.1), (0.0, 0.3), (0.0, 0.0, 0.0, 1.0)))

    def _delay_s(self, done: Completion) -> float:
        return super()._delay_s(done) if isinstance(done, PutDone) else 0.0


class LoadsAmidSwap(Transfers):
    """Planted bug: a load does not end the swap that its request was in, whose last save ends it instead: the request
    is looked up again, its load forgotten, and it waits for ever."""

    def load(self, request: Request, first: int, end: int) -> None:
        swap = self._swaps.get(request)
        super().load(request, first, end)
        if swap is not None:
            self._swaps[request] = swap


class MixedLife(Life):
    """One engine's life; `happened` counts what is to be reached. transfers: what the core has in place of its own."""

    transfers: type[Transfers] = Transfers

    def __init__(self, rng: random.Random, config: EngineConfig, tiers: list[MemoryTier], clock: Clock) -> None:
        super().__init__(rng, config, tiers, clock)
        self.step_s = rng.choice((0.001, 0.001, 0.001, 0.02, 0.3))  # breakers open for seconds, patience is two
        self.strike_rate = rng.choice((0.0, 0.05, 0.3))
        self.disturbance_rate = rng.choice((0.0, 0.01, 0.05))
        self.reasons: dict[str, str | None] = {}
        self.happened: Counter[str] = Counter()

    def begin(self, trace: list[TracedRequest]) -> None:
        rng, config = self.rng, self.config
        expected = {t.request.request_id: list(t.request.prompt_ids) for t in trace}
        self.runner = FailingRunner(self.blocks, VOCAB_SIZE, expected, lazy=rng.random() < 0.7)
        self.runner.rng, self.runner.rate = random.Random(rng.random()), rng.choice((0.0, 0.0, 0.0, 0.03))
        self.runner.seed = weights_of(self.version)
        gap = rng.choice((1, 1, 2))
        self.core = EngineCore(
            config,
            self.runner,
            self._connect() if self.tiers else None,
            root_of=roots_of(identity_of(self.version, config.block_size)),
            make_policy=(lambda index: Priority(gap)) if config.scheduling_policy == "priority" else None,
            poison=self.blocks.poison,
            clock=self.clock,
        )
        self.core.scheduler.transfers.__class__ = self.transfers
        self.heard = {t.request.request_id: Heard() for t in trace}

    def _connect(self) -> LocalConnector | StagedConnector:
        store = make_store(self.rng, self.tiers, self.clock, self.blocks.block_nbytes, (0.02, 1.0, 10.0))
        draw = self.rng.random()
        if draw < 0.4:
            return LateConnector(store, self.blocks, self.clock, random.Random(self.rng.random()))
        return (staged if draw < 0.6 else local)(store, self.blocks, self.rng)

    def strike(self) -> None:
        """Something happens just when a request loads, or waits to be loaded again after a swap."""
        queues = self.core.scheduler.queues
        swapped = [request for request in queues.waiting if request.preempted_by == "swap"]
        targets = [*queues.loading, *swapped]
        if not targets or self.rng.random() > self.strike_rate:
            return
        match self.rng.choice(("abort", "weights", "tier")):
            case "abort":
                self.core.abort([self.rng.choice(targets).request_id])
                self.happened["struck_by_abort"] += 1
            case "weights" if self.version < 4:
                self.happened["changes_amid_swaps"] += bool(swapped)
                self.happened["changes_amid_loads"] += bool(queues.loading)
                self.change_weights()
            case _:
                self.disturb()

    def disturb(self) -> None:
        """A tier goes down or silent, fails some blocks, or is well again."""
        if not self.tiers:
            return
        faults = self.rng.choice(self.tiers).faults
        faults.delay_s = 0.0
        faults.down, faults.silent, faults.rate = self.rng.choice(
            ((True, False, 0.0), (False, True, 0.0), (False, False, 0.5), *[(False, False, 0.0)] * 5)
        )
        self.happened["disturbances"] += 1

    def play(self, trace: list[TracedRequest], changes: set[int]) -> None:
        todo, oldest = list(trace), self.version
        for step in range(MAX_STEPS):
            self.clock.sleep(0.1 if self.core.waits_for_store else self.step_s)
            while todo and todo[0].arrives <= step:
                self.core.add_request(self.hashed(todo.pop(0).request))
            self.core.abort([t.request.request_id for t in trace if t.aborts == step])
            self.strike()
            if self.rng.random() < self.disturbance_rate:
                self.disturb()
            if step in changes:
                self.change_weights()
            for output in self.core.step():
                self.take(output, range(oldest, self.version + 1))
            oldest = self.version
            if not todo and not self.core.has_work():
                return
        raise AssertionError(f"wedged: {self.core.stats()['requests']} {self.core.stats()['waiting']}")

    def take(self, output: TokenOutput, versions: range) -> None:
        name = output.request_id
        assert self.reasons.get(name) is None, f"{name} answered after its end"
        self.reasons[name] = output.finish_reason
        if output.finish_reason == "error":
            room = self.config.num_blocks * self.config.block_size
            wanted = ("the model step failed: RuntimeError", f"the KV cache holds {room}")
            assert any(text in output.error for text in wanted), output.error
            output = output._replace(finish_reason=None)
        super().take(output, versions)

    def verify(self, trace: list[TracedRequest]) -> None:
        room = self.config.num_blocks * self.config.block_size
        for t in trace:
            name, num_tokens = t.request.request_id, len(self.heard[t.request.request_id].tokens)
            reason = self.reasons.get(name)
            assert reason in ("length", "abort", "error"), f"{name}: {reason}"
            if reason == "length":
                outgrown = len(t.request.prompt_ids) + num_tokens > room
                assert outgrown or num_tokens == len(t.output), f"{name} was cut with room left"
            self.happened[reason] += 1
        super().verify([replace(t, aborts=0) for t in trace])  # how many came is judged above
        scheduler = self.core.scheduler
        assert scheduler.pool.num_available == self.config.num_blocks
        for tier in self.tiers:
            for _ in range(100):  # a window's late reads end unseen by the engine, their pins with them
                if not tier.num_pinned:
                    break
                self.clock.sleep(0.01)
                self.core.scheduler.poll_transfers()
            assert not tier.num_pinned, f"{tier.name}: pins leaked"
        preemption = scheduler.preemption
        self.happened["recomputes"] += preemption.num_preemptions - preemption.num_swaps
        self.happened["swaps"] += preemption.num_swaps
        self.happened["loaded_blocks"] += preemption.swapped_in_blocks
        self.happened["shadow_checks"] += scheduler.shadow.checked
        served = scheduler.hits.hit_tokens
        self.happened["served_by_tiers"] += sum(served.get(tier.name, 0) > 0 for tier in self.tiers)
        self.happened["forks"] += sum(
            event["event"] == "forked"
            for t in trace
            for sequence in self.core.timelines(t.request.request_id)
            for event in sequence["events"]
        )


class CrowdedLife(MixedLife):
    """Requests that come at once, so that many are swapped out and wait together; the tier stays well, and little
    else happens to keep them from their turn."""

    def __init__(self, rng: random.Random, config: EngineConfig, tiers: list[MemoryTier], clock: Clock) -> None:
        super().__init__(rng, config, tiers, clock)
        self.step_s, self.disturbance_rate = 0.001, 0.0
        self.strike_rate = rng.choice((0.0, 0.0, 0.05))

    def _connect(self) -> LocalConnector:
        store = make_store(self.rng, self.tiers, self.clock, self.blocks.block_nbytes, (1.0,))
        return LateSaves(store, self.blocks, self.clock, random.Random(self.rng.random()))


def mixed_trace(rng: random.Random, size: TraceSize) -> list[TracedRequest]:
    """Requests that end by length only: what they say depends on when the weights change."""
    trace = []
    for traced in make_trace(rng, rng.randrange(6, 30), rng.choice((0.0, 0.2)), size):
        params = replace(traced.request.params, ignore_eos=True)
        output = (0,) * (params.max_tokens or 0)  # only its length counts
        trace.append(replace(traced, request=replace(traced.request, params=params), output=output))
    return trace


def mixed_tiers(rng: random.Random, clock: Clock, block_nbytes: int) -> list[MemoryTier]:
    """Mostly one or two that are roomy and sound to begin with, so that there is something to lose."""
    if rng.random() < 0.2:
        return random_tiers(SOUND, rng, clock, block_nbytes)
    chosen = rng.choice(((("nvme", True),), (("redis", False),), (("nvme", True), ("redis", False))))
    return [
        sound_tier(block_nbytes * rng.choice((20, 500, 500)), name, rng, clock, at_once=at_once)
        for name, at_once in chosen
    ]


def sound_tier(capacity_bytes: int, name: str, rng: random.Random, clock: Clock, *, at_once: bool) -> MemoryTier:
    faults = Faults(rng=random.Random(rng.random()))
    return MemoryTier(capacity_bytes, name=name, answers_at_once=at_once, faults=faults, clock=clock, sleep=clock.sleep)


def mixed_life(rng: random.Random) -> tuple[MixedLife, list[TracedRequest]]:
    """Anything goes."""
    trace, clock = mixed_trace(rng, SIZE), Clock()
    config = mixed_config(rng, trace, (*SHARES, 1.5, 3.0))
    tiers = mixed_tiers(rng, clock, LedgerBlocks(1, config.block_size).block_nbytes)
    return MixedLife(rng, config, tiers, clock), trace


def crowded_life(rng: random.Random) -> tuple[MixedLife, list[TracedRequest]]:
    """Whoever is preempted is swapped out, onto a tier that has room for all."""
    trace, clock = mixed_trace(rng, CROWD), Clock()
    config = mixed_config(rng, trace, (1.0, 1.5, 2.0))
    config = replace(config, preemption_mode="swap", enable_prefix_caching=True)
    capacity_bytes = 500 * LedgerBlocks(1, config.block_size).block_nbytes
    return CrowdedLife(rng, config, [sound_tier(capacity_bytes, "nvme", rng, clock, at_once=True)], clock), trace


def mixed_config(rng: random.Random, trace: list[TracedRequest], shares: Sequence[float]) -> EngineConfig:
    config = tight_config(rng, trace, rng.choice(shares))
    return replace(
        config,
        scheduling_policy=rng.choice((*POLICIES, "priority", "priority")),
        preemption_mode=rng.choice((config.preemption_mode, "swap")),
        shadow_one_in=rng.choice((0, 0, 1, 3)) if config.max_num_batched_tokens >= config.block_size else 0,
    )


def run_mixed(seed: int, transfers: type[Transfers] = Transfers) -> Counter[str]:
    """One life; what happened in it."""
    rng = random.Random(f"mixed-{seed}")
    life, trace = (crowded_life if seed % 3 == 0 else mixed_life)(rng)
    life.transfers = transfers
    try:
        life.begin(trace)
        life.play(trace, set(rng.sample(range(300), rng.choice((0, 0, 1, 3)))))
        for tier in life.tiers:
            tier.faults.down = tier.faults.silent = False
        life.verify(trace)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, {life.config}: {error}") from error
    finally:
        life.core.close()
    return life.happened


def run_mixed_seeds(first_seed: int, num_seeds: int, transfers: type[Transfers] = Transfers) -> Counter[str]:
    logging.disable(logging.ERROR)  # failures are made on purpose, and each is logged with its traceback
    happened: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + num_seeds):
        happened += run_mixed(seed, transfers)
    return happened


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    yield
    logging.disable(logging.NOTSET)


def test_everything_at_once() -> None:
    """A failure names its seed: `run_mixed(SEED)` replays it."""
    happened = run_mixed_seeds(0, NUM_SEEDS)
    for what in ("recomputes", "swaps", "loaded_blocks", "forks", "disturbances", "abort", "error"):
        assert happened[what] > NUM_SEEDS / 20, f"too few {what}: {happened}"
    for what in ("shadow_checks", "struck_by_abort", "changes_amid_swaps", "changes_amid_loads"):
        assert happened[what] > NUM_SEEDS / 100, f"too few {what}: {happened}"


def test_a_planted_bug_is_found() -> None:
    with pytest.raises(AssertionError, match=r"loads, and is to be looked up again"):
        run_mixed_seeds(0, NUM_SEEDS, LoadsAmidSwap)
