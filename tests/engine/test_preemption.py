"""Swapping out: begun in time, one victim at a time, kept below till it is loaded again; stuck bytes hold up nobody."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pagetier.connectors.local import LocalConnector
from pagetier.engine.config import EngineConfig
from pagetier.engine.core import EngineCore
from pagetier.engine.messages import EngineRequest
from pagetier.engine.request import Request
from pagetier.engine.transfers import PATIENCE_S
from pagetier.kvstore.block import Part
from pagetier.kvstore.executor import SeededExecutor
from pagetier.kvstore.job import Completion, PutDone
from pagetier.kvstore.memory import MemoryTier
from pagetier.kvstore.store import TieredStore
from tests.engine.ledger import LedgerBlocks, LedgerRunner, expected_tokens
from tests.engine.test_ledger import Clock
from tests.engine.test_scheduler import request, root_of
from tests.engine.trace import VOCAB_SIZE


class SlowToPut(LocalConnector):
    """Puts are done when the test says so."""

    is_holding = False

    def poll(self) -> list[Completion]:
        held: list[Completion] = getattr(self, "held", [])
        held = [*held, *super().poll()]
        ready = [done for done in held if not (self.is_holding and isinstance(done, PutDone))]
        self.held = [done for done in held if done not in ready]
        return ready


class Rig:
    """A core on the ledger model over one tier; `left`: tokens that requests have yet to get."""

    def __init__(self, config: EngineConfig, requests: list[EngineRequest], capacity: int = 1 << 20) -> None:
        self.clock, self.step_s = Clock(), 0.001
        blocks = LedgerBlocks(config.num_blocks, config.block_size)
        self.tier = MemoryTier(capacity, name="nvme", clock=self.clock, sleep=self.clock.sleep)
        store = TieredStore(
            [self.tier],
            part=Part(0, 0, 1, 0, 1),
            payload_bytes=blocks.block_nbytes,
            clock=self.clock,
            make_executor=SeededExecutor.inline().factory,
        )
        self.connector = SlowToPut(store, blocks)
        expected = {r.request_id: expected_tokens(r.prompt_ids, r.params.max_tokens or 0, VOCAB_SIZE) for r in requests}
        runner = LedgerRunner(blocks, VOCAB_SIZE, expected, lazy=True)
        self.core = EngineCore(config, runner, self.connector, root_of=root_of, poison=blocks.poison, clock=self.clock)
        self.left = {r.request_id: r.params.max_tokens or 0 for r in requests}
        self.reasons: dict[str, str | None] = {}
        for each in requests:
            self.core.add_request(each)

    def step(self) -> set[str]:
        """The requests that got a token."""
        self.clock.sleep(self.step_s)
        came = set()
        for output in self.core.step():
            self.left[output.request_id] -= len(output.token_ids)
            self.reasons[output.request_id] = output.finish_reason
            came.add(output.request_id)
        return came

    @property
    def running(self) -> list[Request]:
        return self.core.scheduler.queues.running

    @property
    def num_preemptions(self) -> int:
        return self.core.scheduler.preemption.num_preemptions


def config(num_blocks: int, depth: int = 2, mode: str = "swap") -> EngineConfig:
    return EngineConfig(
        num_blocks=num_blocks,
        max_model_len=400,
        block_size=8,
        pipeline_depth=depth,
        preemption_mode=mode,
        paranoid=True,
    )


def prompts(count: int, num_prompt: int, max_tokens: int) -> list[EngineRequest]:
    rng = random.Random(3)
    return [request(f"r{i}", [rng.randrange(VOCAB_SIZE) for _ in range(num_prompt)], max_tokens) for i in range(count)]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_swap_begins_before_anybody_waits(depth: int) -> None:
    """With two steps' growth left: when the last block is given out, the victim's come free."""
    rig = Rig(config(23, depth), prompts(4, 37, 60))
    while not rig.num_preemptions:
        rig.step()
    assert rig.core.scheduler.pool.num_available > 0, "the pool had run dry"
    victim = next(iter(rig.core.scheduler.queues.waiting)).request_id
    assert victim == "r3", "the latest"
    for _ in range(8):
        assert rig.step() >= {"r0", "r1", "r2"}, "nobody else lost a step"
    assert rig.num_preemptions == 1
    while rig.core.has_work():
        rig.step()
    assert set(rig.left.values()) == {0}
    rig.core.close()


def test_who_finds_no_block_waits_for_those_coming_free() -> None:
    """One victim is enough, however long its bytes take; those with room go on."""
    rig = Rig(config(23), prompts(4, 37, 60))
    while not all(rig.left[f"r{i}"] < 59 for i in range(4)):
        rig.step()  # their prompts have been saved
    rig.connector.is_holding = True
    for _ in range(200):
        rig.step()
    assert rig.num_preemptions == 1 and rig.core.scheduler.pool.num_available == 0
    assert all(rig.left[f"r{i}"] for i in range(3)), "they wait"
    rig.connector.is_holding = False
    while rig.core.has_work():
        rig.step()
    assert set(rig.left.values()) == {0}
    rig.core.close()


def test_one_that_outgrows_the_pool_preempts_nobody() -> None:
    """It ends: not even all of the others' blocks would be enough."""
    rig = Rig(config(23, depth=1), prompts(4, 37, 60))
    while len(rig.running) < 4:
        rig.step()
    first, scheduler = rig.running[0], rig.core.scheduler
    assert not scheduler.preemption.find_blocks(first, 23 * 8 + 1)
    assert rig.num_preemptions == 0 and first.finish_reason == "length" and len(rig.running) == 3
    rig.core.close()


def test_nobody_counts_on_stuck_bytes() -> None:
    """A tier that hangs keeps the blocks it was given; after a while others are preempted instead."""
    rig = Rig(config(30), prompts(4, 37, 60))
    rig.connector.is_holding = True
    rig.step_s = PATIENCE_S / 50
    for _ in range(600):
        rig.step()
    assert rig.left["r0"] == 0 and rig.num_preemptions > 1
    rig.connector.is_holding = False
    while rig.core.has_work():
        rig.step()
    assert set(rig.left.values()) == {0} and set(rig.reasons.values()) == {"length"}
    rig.core.close()


@pytest.mark.parametrize("mode", ["recompute", "swap", "hybrid"])
def test_saves_leave_half_of_the_pool_to_others(mode: str) -> None:
    """Onto a tier that takes for ever: prompts that come one after the other are all answered meanwhile."""
    requests = prompts(12, 61, 2)
    rig = Rig(config(20, mode=mode), requests)
    rig.connector.is_holding = True
    rig.step_s = PATIENCE_S / 7
    for _ in range(400):
        rig.step()
        assert rig.core.scheduler.pool.num_available >= 20 - 10 - sum(len(r.block_ids) for r in rig.running)
    assert set(rig.left.values()) == {0}, "some waited for blocks that the tier kept"
    rig.connector.is_holding = False
    while rig.core.has_work():
        rig.step()
    rig.core.close()


def test_what_did_not_fit_of_a_save_is_saved_when_it_is_touched() -> None:
    """A chain in a tier has no holes: behind a block for which there was no room nothing is saved until that is."""
    requests = prompts(2, 157, 2)
    rig = Rig(config(60), requests)
    rig.connector.is_holding = True
    for _ in range(60):
        rig.step()
    assert set(rig.left.values()) == {0}
    stored = {record.name.key: record.name for record in rig.tier.records(rig.clock() + 1)}
    assert len(stored) == 30, "half of the pool, of the 38 blocks of both prompts"
    assert all(name.parent in stored or name.parent == name.root for name in stored.values())
    rig.connector.is_holding = False
    for each in requests:
        rig.left["again"] = 2
        rig.core.add_request(replace(each, request_id="again", prompt_ids=(*each.prompt_ids, 1)))
        while rig.core.has_work():
            rig.step()
    assert len(list(rig.tier.records(rig.clock() + 1))) == 38
    rig.core.close()


def test_what_was_swapped_out_is_pinned_until_it_is_loaded() -> None:
    """All of its blocks, its prompt's included, from the end of the puts until the request runs again."""
    rig = Rig(config(23), prompts(4, 37, 60))
    while not rig.num_preemptions:
        rig.step()
    victim = next(iter(rig.core.scheduler.queues.waiting))
    num_blocks = victim.num_known_tokens // 8
    for _ in range(3):
        rig.step()
    assert victim.request_id == "r3" and rig.tier.num_pinned >= num_blocks - 1
    while rig.left["r0"]:
        assert rig.tier.num_pinned >= num_blocks - 1
        rig.step()
    while rig.core.has_work():
        rig.step()
    assert rig.tier.num_pinned == 0 and set(rig.left.values()) == {0}
    rig.core.close()


@pytest.mark.parametrize("mode", ["recompute", "swap", "hybrid"])
@pytest.mark.parametrize("capacity_blocks", [0, 3, 1000])
@pytest.mark.parametrize("share", [2.0, 1.0, 0.5])
def test_pools_of_twice_once_and_half_a_request(share: float, capacity_blocks: int, mode: str) -> None:
    """Over a tier of any size: all end, those for whom there is no room with what fits."""
    requests = prompts(6, 61, 40)
    need = -(-(61 + 40) // 8)
    blocks = max(1, int(need * share))
    rig = Rig(config(blocks, mode=mode), requests, capacity=max(1, capacity_blocks * 128))
    for _ in range(5000):
        rig.step()
        if not rig.core.has_work():
            break
    assert not rig.core.has_work(), "wedged"
    wanted = {"length"} if 61 <= blocks * 8 else {"error"}
    assert set(rig.reasons.values()) == wanted
    if share >= 1:
        assert set(rig.left.values()) == {0}
    assert rig.core.scheduler.pool.num_referenced == 0 and rig.tier.num_pinned == 0
    rig.core.close()
