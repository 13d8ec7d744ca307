"""What the scheduler promises beyond right tokens: nobody waits without need, and planning stays cheap."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from pagetier.connectors.local import LocalConnector
from pagetier.engine.batch import StepResult
from pagetier.engine.block_pool import BlockPool
from pagetier.engine.config import EngineConfig
from pagetier.engine.core import EngineCore
from pagetier.engine.lookups import LOOKAHEAD
from pagetier.engine.messages import EngineRequest
from pagetier.engine.policies.ranked import Fcfs
from pagetier.engine.prefix_index import Match, PrefixIndex
from pagetier.engine.sampling_params import SamplingParams
from pagetier.engine.scheduler import Scheduler
from pagetier.engine.transfers import Transfers
from pagetier.kvstore.block import Part
from pagetier.kvstore.executor import SeededExecutor
from pagetier.kvstore.job import Completion, PutDone
from pagetier.kvstore.keys import hash_named, root_key
from pagetier.kvstore.memory import Faults, MemoryTier
from pagetier.kvstore.store import TieredStore
from tests.engine.ledger import LedgerBlocks, LedgerRunner, expected_tokens
from tests.engine.test_ledger import DOMAIN, Clock
from tests.engine.trace import VOCAB_SIZE


def root_of(salt: str) -> bytes:
    return root_key(DOMAIN, salt.encode())


def request(name: str, prompt: list[int], max_tokens: int) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(name, tuple(prompt), params, seed=0)


def store_of(
    blocks: LedgerBlocks, clock: Clock, faults: Faults, with_nvme: bool = False, eagerness: float = 1.0
) -> TieredStore:
    """One tier whose lookups are I/O, below a sound one that answers at once if wanted. eagerness: of its threads."""
    nvme = MemoryTier(1 << 20, name="nvme", clock=clock, sleep=clock.sleep)
    tier = MemoryTier(1 << 20, name="redis", answers_at_once=False, faults=faults, clock=clock, sleep=clock.sleep)
    return TieredStore(
        [nvme, tier] if with_nvme else [tier],
        part=Part(0, 0, 1, 0, 1),
        payload_bytes=blocks.block_nbytes,
        clock=clock,
        make_executor=SeededExecutor(eagerness=eagerness).factory,
    )


class Rig:
    """A core on the ledger model over such a tier."""

    def __init__(
        self,
        requests: list[EngineRequest],
        config: EngineConfig,
        faults: Faults,
        connector: type[LocalConnector] = LocalConnector,
        with_nvme: bool = False,
        eagerness: float = 1.0,
    ) -> None:
        self.clock = Clock()
        blocks = LedgerBlocks(config.num_blocks, config.block_size)
        expected = {r.request_id: expected_tokens(r.prompt_ids, r.params.max_tokens or 0, VOCAB_SIZE) for r in requests}
        runner = LedgerRunner(blocks, VOCAB_SIZE, expected, lazy=True)
        self.connector: Any = connector(store_of(blocks, self.clock, faults, with_nvme, eagerness), blocks)
        self.core = EngineCore(config, runner, self.connector, root_of=root_of, clock=self.clock)

    def step(self) -> dict[str, int]:
        """Tokens of each request that came with this step."""
        self.clock.sleep(0.001)
        return {output.request_id: len(output.token_ids) for output in self.core.step()}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prefill_takes_no_step_from_decodes(depth: int) -> None:
    """Not even that of a request which came first and had to wait for a tier meanwhile."""
    rng = random.Random(0)
    long = request("long", [rng.randrange(VOCAB_SIZE) for _ in range(400)], 4)
    short = [request(f"short{i}", [rng.randrange(VOCAB_SIZE)], 60) for i in range(3)]
    config = EngineConfig(
        num_blocks=200,
        max_model_len=500,
        block_size=4,
        max_num_batched_tokens=16,
        pipeline_depth=depth,
        paranoid=True,
    )
    rig = Rig([long, *short], config, Faults(silent=True), eagerness=0.0)
    for spec in (long, *short):
        rig.core.add_request(spec)
    num_tokens = dict.fromkeys(("long", *(s.request_id for s in short)), 0)
    first_of_long = 0
    for step in range(1, 200):
        came = rig.step()
        for name, count in came.items():
            num_tokens[name] += count
        first_of_long = first_of_long or (step if came.get("long") else 0)
        for spec in short:
            assert num_tokens[spec.request_id] >= min(step - depth, 60), f"{spec.request_id} waits at step {step}"
        if not rig.core.has_work():
            break
    assert num_tokens == {"long": 4, "short0": 60, "short1": 60, "short2": 60}
    assert first_of_long < 60, "the prompt was computed beside the decodes"
    rig.core.close()


class SlowToPut(LocalConnector):
    """Puts are done when the test says so."""

    is_holding = True
    held: list[Completion]

    def poll(self) -> list[Completion]:
        self.held = [*getattr(self, "held", []), *super().poll()]
        ready = [c for c in self.held if not (self.is_holding and isinstance(c, PutDone))]
        self.held = [c for c in self.held if c not in ready]
        return ready


@pytest.mark.parametrize("depth", [1, 2])
def test_who_waits_for_a_block_holds_up_only_those_who_need_one(depth: int) -> None:
    """A tier that takes its time keeps a finished request's blocks; decodes with room in theirs go on."""
    rng = random.Random(1)
    config = EngineConfig(num_blocks=10, max_model_len=300, block_size=16, pipeline_depth=depth, paranoid=True)
    gone, first, second = (
        request(name, [rng.randrange(VOCAB_SIZE) for _ in range(num_prompt)], max_tokens)
        for name, num_prompt, max_tokens in (("gone", 160, 1), ("first", 28, 30), ("second", 32, 30))
    )
    rig = Rig([gone, first, second], config, Faults(), SlowToPut)
    rig.core.add_request(gone)
    while rig.core.scheduler.num_unfinished:
        rig.step()
    num_tokens = {"first": 0, "second": 0}
    for spec in (first, second):
        rig.core.add_request(spec)
    for step in range(200):
        rig.connector.is_holding = step < 60
        for name, count in rig.step().items():
            num_tokens[name] += count
        if step == 50:  # the one needs its third block and the other its fourth
            assert num_tokens == {"first": 5, "second": 17}
            assert rig.core.waits_for_store, "who steps it would spin"
    assert num_tokens == {"first": 30, "second": 30}
    assert not rig.core.has_work() and rig.core.scheduler.preemption.num_preemptions == 0
    rig.core.close()


class CountingIndex(PrefixIndex):
    num_matches = 0

    def match(self, root: bytes, tokens: bytes, max_tokens: int) -> Match:
        self.num_matches += 1
        return super().match(root, tokens, max_tokens)


def test_planning_does_not_look_at_all_who_wait() -> None:
    """Thousands wait, long prompts among them: a step matches those it admits and a few more."""
    rng = random.Random(2)
    config = EngineConfig(
        num_blocks=4000, max_model_len=200, block_size=16, max_num_seqs=64, max_num_batched_tokens=512
    )
    clock, index = Clock(), CountingIndex(config.block_size)
    pool, blocks = BlockPool(config.num_blocks, index), LedgerBlocks(config.num_blocks, config.block_size)
    connector = LocalConnector(store_of(blocks, clock, Faults()), blocks)
    transfers = Transfers(connector, pool)
    scheduler = Scheduler(config, pool, index, transfers, root_of, hash_named("sha256"), Fcfs())
    for i in range(2000):
        scheduler.add(request(f"r{i}", [rng.randrange(VOCAB_SIZE) for _ in range(100)], 1))
    num_admitted = 0
    while num_admitted < 100:
        before = index.num_matches
        clock.sleep(0.001)
        scheduler.poll_transfers()
        plan = scheduler.plan()
        assert index.num_matches - before <= 4 * LOOKAHEAD
        if plan is not None:
            num_admitted += sum(row.start == 0 for row in plan.rows)
            samples = sum(row.sample >= 0 for row in plan.rows)
            scheduler.commit(plan, StepResult(plan.step, np.zeros(samples, np.int64), (None,) * samples))
    connector.close()


def test_a_prefix_hot_on_the_device_is_stored_again_when_a_tier_comes_back() -> None:
    """Among other traffic, which is how the tier's return is noticed."""
    rng = random.Random(5)
    hot = [rng.randrange(VOCAB_SIZE) for _ in range(33)]
    others = [[rng.randrange(VOCAB_SIZE) for _ in range(9)] for _ in range(10)]
    prompts = [prompt for other in others for prompt in (hot, other)]
    requests = [request(f"r{i}", prompt, 2) for i, prompt in enumerate(prompts)]
    faults = Faults()
    rig = Rig(requests, EngineConfig(num_blocks=64, max_model_len=64, block_size=4), faults, with_nvme=True)
    for i, each in enumerate(requests):
        faults.down = i < 10
        rig.core.add_request(each)
        while rig.core.has_work():
            rig.step()
        rig.clock.sleep(40.0)  # past the breaker's longest pause
    tiers = rig.core.stats()["tiers"]
    assert tiers["nvme"]["blocks"] == 8 + 10 * 2, "stored at once"
    assert tiers["redis"]["blocks"] == 8 + 5 * 2, "the whole hot prefix, though nobody computed it after the outage"
    rig.core.close()


def test_a_refusal_is_work_for_an_idle_engine() -> None:
    """Else the loop that steps only while there is work would never hand it out."""
    rig = Rig([], EngineConfig(num_blocks=4, max_model_len=64, block_size=4), Faults())
    assert not rig.core.has_work()
    rig.core.add_request(request("too long", [1] * 100, 4))
    assert rig.core.has_work()
    (output,) = rig.core.step()
    assert (output.request_id, output.finish_reason) == ("too long", "error")
    assert not rig.core.has_work()
    rig.core.close()


@pytest.mark.parametrize("with_nvme", [True, False])
def test_short_tails_fill_a_step_whatever_the_tiers_must_be_asked_about(with_nvme: bool) -> None:
    """Fifty requests share a prefix that the device has; each has a block of its own that only a tier could have."""
    rng = random.Random(6)
    prefix = [rng.randrange(VOCAB_SIZE) for _ in range(64)]
    first = request("first", prefix, 1)
    others = [request(f"r{i}", prefix + [rng.randrange(VOCAB_SIZE) for _ in range(6)], 8) for i in range(50)]
    config = EngineConfig(num_blocks=400, max_model_len=100, block_size=4, max_num_batched_tokens=128, paranoid=True)
    rig = Rig([first, *others], config, Faults(), with_nvme=with_nvme)
    rig.core.add_request(first)
    while rig.core.has_work():
        rig.step()
    for each in others:
        rig.core.add_request(each)
    came: dict[str, int] = {}
    num_steps = 0
    while len(came) < 50:
        came |= rig.step()
        num_steps += 1
    # 300 tokens of tails and decodes beside them; a tier that must be asked over a wire answers a few in each step
    assert num_steps <= (7 if with_nvme else 2 * 50 // LOOKAHEAD + 4)
    rig.core.close()
