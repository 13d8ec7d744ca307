"""A tier that hangs for ever in a save or a load: its blocks are nobody else's, and still every request ends, with what
fits the rest or with a line that says why; and all is as before once the transfers end."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pagetier.connectors.local import LocalConnector
from pagetier.connectors.staged import StagedConnector
from pagetier.engine.config import PREEMPTION_MODES, EngineConfig
from pagetier.engine.core import EngineCore
from pagetier.engine.messages import TIERS_HANG, EngineRequest
from pagetier.engine.policies.make import POLICIES
from pagetier.engine.transfers import MIN_SAVED_BLOCKS, PATIENCE_S
from pagetier.kvstore.block import BlockName, BlockStatus, Part
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.executor import SeededExecutor, Task
from pagetier.kvstore.job import Completion, LoadDone, LoadQuiesced, PutDone
from pagetier.kvstore.memory import MemoryTier
from pagetier.kvstore.store import TieredStore
from tests.engine.ledger import LedgerBlocks, LedgerRunner, expected_tokens
from tests.engine.test_ledger import Clock
from tests.engine.test_ledger_faults import LateStaging
from tests.engine.test_scheduler import request, root_of
from tests.engine.trace import VOCAB_SIZE

BLOCK_SIZE, PROMPT, OUTPUT = 8, 61, 40
NEED = -(-(PROMPT + OUTPUT) // BLOCK_SIZE)  # blocks of one long request
TIMEOUT_S, STEP_S = 10.0, 0.05
NUM_SEEDS = 30
WAYS = ("save", "load", "late bytes")  # what hangs: writes, reads without an answer, reads whose bytes may still land


class Hanging(LocalConnector):
    """While `hangs` names them, saves or loads do not end. What they write lands at any time; what they read must stay
    as it was."""

    hangs = ""

    def __init__(self, store: TieredStore, blocks: LedgerBlocks) -> None:
        super().__init__(store, blocks)
        self._pool = blocks
        self._saving: dict[int, list[tuple[memoryview, bytes]]] = {}
        self._loading: dict[int, list[memoryview]] = {}
        self._hung: list[Completion] = []
        self._own: list[Completion] = []

    @property
    def num_hung(self) -> int:
        return len(self._hung)

    def submit_save(self, blocks: Sequence[BlockName], block_ids: Sequence[int]) -> int:
        job = super().submit_save(blocks, block_ids)
        self._saving[job] = [(view := self._pool.readable(i), bytes(view)) for i in block_ids]
        return job

    def submit_load(self, ticket: int, blocks: Sequence[BlockName], block_ids: Sequence[int]) -> int:
        if self.hangs not in ("load", "late bytes"):
            return super().submit_load(ticket, blocks, block_ids)
        job = -1 - len(self._loading)
        self._loading[job] = [self._pool.writable(i) for i in block_ids]
        failed = LoadDone(job, (BlockStatus.TIMEOUT,) * len(blocks), (None,) * len(blocks), self.hangs == "load")
        if self.hangs == "load":
            self._hung.append(failed)
        else:
            self._own.append(failed)
            self._hung.append(LoadQuiesced(job))
        return job

    def poll(self) -> list[Completion]:
        own, self._own = self._own, []
        done = super().poll()
        if self.hangs:
            self._hung += [one for one in done if isinstance(one, PutDone) and self.hangs == "save"]
            done = [one for one in done if one not in self._hung]
        else:
            done, self._hung = [*self._hung, *done], []
        for hung in self._hung:
            if isinstance(hung, LoadDone | LoadQuiesced):
                for view in self._loading[hung.job]:
                    view[:] = b"\xff" * len(view)
        for one in done:
            for view, before in self._saving.pop(one.job, ()) if isinstance(one, PutDone) else ():
                assert view == before, "a block was given to another while it was saved"
        return [*own, *done]


class Slow(Hanging):
    """Each save takes longer than anybody counts on its blocks, but not so long that it is given up."""

    SAVE_S = 1.6 * PATIENCE_S

    def __init__(self, store: TieredStore, blocks: LedgerBlocks) -> None:
        super().__init__(store, blocks)
        self.clock: Callable[[], float] = lambda: 0.0
        self._ending: list[tuple[float, PutDone]] = []

    def poll(self) -> list[Completion]:
        now_s, others = self.clock(), []
        for done in super().poll():
            if isinstance(done, PutDone):
                self._ending.append((now_s + self.SAVE_S, done))
            else:
                others.append(done)
        ended = [done for end_s, done in self._ending if end_s <= now_s]
        self._ending = [one for one in self._ending if one[0] > now_s]
        return [*others, *ended]


class Narrow(Hanging):
    """Writes one block after the other, each in its time."""

    BLOCK_S = TIMEOUT_S / 150

    def __init__(self, store: TieredStore, blocks: LedgerBlocks) -> None:
        super().__init__(store, blocks)
        self.clock: Callable[[], float] = lambda: 0.0
        self._ending: list[tuple[float, PutDone]] = []

    def poll(self) -> list[Completion]:
        now_s, others = self.clock(), []
        for done in super().poll():
            if isinstance(done, PutDone):
                begin_s = max([now_s, *(end_s for end_s, _ in self._ending[-1:])])
                end_s = begin_s + self.BLOCK_S * len(done.statuses)
                self._ending.append((end_s, replace(done, ended_s=end_s)))
            else:
                others.append(done)
        ended = [done for end_s, done in self._ending if end_s <= now_s]
        self._ending = [one for one in self._ending if one[0] > now_s]
        return [*others, *ended]


class Halting(SeededExecutor):
    """Threads that stay for ever in what they began while `is_halted`."""

    is_halted = False

    def __init__(self) -> None:
        super().__init__(eagerness=1.0)
        self._stuck: list[Task] = []

    def _run(self, task: Task) -> None:
        if not self.is_halted:
            super()._run(task)
        elif (following := task()) is not None:
            self._stuck.append(following)

    def pump(self) -> None:
        if not self.is_halted:
            self._tasks, self._stuck = [*self._stuck, *self._tasks], []
        super().pump()


class Rig:
    """A core on the ledger model over one tier, in virtual time. Requests are known beforehand, and sent by name."""

    def __init__(
        self,
        config: EngineConfig,
        requests: Sequence[EngineRequest],
        staged: random.Random | None = None,
        make_hanging: Callable[[TieredStore, LedgerBlocks], Hanging] = Hanging,
    ) -> None:
        self.clock, self.config = Clock(), config
        blocks = LedgerBlocks(config.num_blocks, config.block_size)
        self.tier = MemoryTier(1 << 20, name="nvme", clock=self.clock, sleep=self.clock.sleep)
        self.reads, self.writes = Halting(), Halting()
        self.store = TieredStore(
            [self.tier],
            part=Part(0, 0, 1, 0, 1),
            payload_bytes=blocks.block_nbytes,
            clock=self.clock,
            make_executor=lambda name, _: self.reads if "read" in name else self.writes,
        )
        self.hanging = make_hanging(self.store, blocks)
        connector = self.hanging if staged is None else StagedConnector(self.store, LateStaging(blocks, 4, staged))
        self.requests = {each.request_id: each for each in requests}
        self.outputs = {
            r.request_id: expected_tokens(r.prompt_ids, r.params.max_tokens or 0, VOCAB_SIZE)[len(r.prompt_ids) :]
            for r in requests
        }
        expected = {r.request_id: [*r.prompt_ids, *self.outputs[r.request_id]] for r in requests}
        runner = LedgerRunner(blocks, VOCAB_SIZE, expected, lazy=True)
        self.core = EngineCore(config, runner, connector, root_of=root_of, poison=blocks.poison, clock=self.clock)
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str | None] = {}
        self.errors: dict[str, str] = {}

    def send(self, *names: str) -> None:
        for name in names:
            self.tokens[name], self.reasons[name] = [], None
            self.core.add_request(self.requests[name])

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.clock.sleep(STEP_S)
            for output in self.core.step():
                name = output.request_id
                assert self.reasons[name] is None, f"{name} answered after its end"
                self.tokens[name].extend(output.token_ids)
                self.reasons[name], self.errors[name] = output.finish_reason, output.error

    def run(self, limit_s: float = 4 * TIMEOUT_S) -> float:
        """Until every request has ended; how long that took."""
        begin_s = self.clock()
        while None in self.reasons.values():
            self.step()
            assert self.clock() < begin_s + limit_s, f"wedged: {self.core.stats()['requests']}"
        return self.clock() - begin_s

    def empty_the_device(self) -> None:
        """What was computed is in the tier alone."""
        self.step(20)
        self.core.scheduler.pool.purge()
        assert not self.core.has_work() and self.core.scheduler.pool.num_available == self.config.num_blocks

    def end_transfers(self) -> None:
        """The medium is well again; nothing may be held once it has ended what it began."""
        self.hanging.hangs, self.reads.is_halted, self.writes.is_halted = "", False, False
        self.step(20)
        scheduler = self.core.scheduler
        assert None in self.reasons.values() or not self.core.has_work()
        if not self.core.has_work():
            assert scheduler.pool.num_referenced == 0 and scheduler.transfers.num_tickets == 0
            assert scheduler.pool.num_available == self.config.num_blocks and self.tier.num_pinned == 0

    def ends(self) -> Counter[str]:
        """How the requests ended, each with right tokens as far as it came, for a reason that holds."""
        ends: Counter[str] = Counter()
        room = self.config.num_blocks * self.config.block_size
        for name, tokens in self.tokens.items():
            num_prompt, error = len(self.requests[name].prompt_ids), self.errors[name]
            assert tokens == self.outputs[name][: len(tokens)], name
            if self.reasons[name] == "length":
                assert tokens == self.outputs[name] or num_prompt + len(tokens) > room, f"{name} was cut with room left"
                ends["length"] += 1
            elif num_prompt > room:
                assert f"the KV cache holds {room}" in error
            else:
                assert error.startswith(TIERS_HANG) and "\n" not in error, error
                assert num_prompt + len(tokens) + 1 <= room, f"{name} has outgrown the pool, whatever hangs"
                ends["hung"] += 1
        return ends


def config_of(num_blocks: int, **fields: Any) -> EngineConfig:
    fields = {"transfer_timeout_s": TIMEOUT_S} | fields
    return EngineConfig(num_blocks=num_blocks, max_model_len=400, block_size=BLOCK_SIZE, paranoid=True, **fields)


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)  # each request that is cut short is logged
    yield
    logging.disable(logging.NOTSET)


def life(seed: int, way: str, share: float, hang_s: float) -> Counter[str]:
    """Some requests over a tier that hangs for that long; how they ended."""
    rng = random.Random(f"{seed}-{way}-{share}")
    lengths = [rng.choice((5, 21, 43, 61)) for _ in range(rng.choice((1, 1, 2, 5)))]
    outputs = [rng.choice((2, 20, OUTPUT)) for _ in lengths]
    prompts = [prompt(rng, n) for n in lengths]
    old = [request(f"old{i}", p, 1) for i, p in enumerate(prompts)]
    now = [request(f"now{i}", p + prompt(rng, 2), n) for i, (p, n) in enumerate(zip(prompts, outputs, strict=True))]
    now = [replace(r, priority=rng.randrange(3), tenant=rng.choice("ab")) for r in now]
    later = [replace(r, request_id=r.request_id.replace("now", "later")) for r in now]
    longest = max(len(r.prompt_ids) + (r.params.max_tokens or 0) for r in now)
    config = config_of(
        max(1, int(-(-longest // BLOCK_SIZE) * share)),
        scheduling_policy=rng.choice(list(POLICIES)),
        preemption_mode=rng.choice(PREEMPTION_MODES),
        pipeline_depth=rng.choice((1, 2)),
        max_num_batched_tokens=rng.choice((16, 512)),
        shadow_one_in=rng.choice((0, 2)),
    )
    rig = Rig(config, [*old, *now, *later])
    if way != "save":
        rig.send(*(r.request_id for r in old))
        rig.run()
        rig.empty_the_device()
    rig.hanging.hangs = way
    rig.send(*(r.request_id for r in now))
    if hang_s < TIMEOUT_S:
        rig.step(round(hang_s / STEP_S))
        rig.end_transfers()
    rig.run()
    ends = rig.ends()
    rig.end_transfers()
    rig.send(*(r.request_id for r in later))
    rig.run()
    assert rig.ends()["hung"] == ends["hung"], "the tier is well, and a request ended as if it were not"
    rig.end_transfers()
    rig.core.close()
    return ends


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("share", [2.0, 1.0, 0.5])
def test_every_request_ends_while_a_tier_hangs(share: float, way: str) -> None:
    """Of a pool of so many times the longest request; and once the tier is well, all are answered."""
    ends: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        try:
            ends += life(seed, way, share, math.inf)
        except AssertionError as error:
            raise AssertionError(f"life({seed}, {way!r}, {share}, math.inf): {error}") from error
    assert ends["length"] > NUM_SEEDS / 2 and (share > 1 or ends["hung"]), ends


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_tier_that_comes_back_in_time_ends_nobody(share: float, way: str) -> None:
    for seed in range(NUM_SEEDS):
        assert not life(seed, way, share, TIMEOUT_S / 2)["hung"], f"life({seed}, {way!r}, {share}, {TIMEOUT_S / 2})"


def hung_save(num_blocks: int, *others: EngineRequest, **fields: Any) -> Rig:
    """A tier that keeps the last blocks of a prompt, and with them all before: what it was given in time is stored."""
    rng = random.Random(1)
    rig = Rig(config_of(num_blocks, **fields), [request("first", prompt(rng, PROMPT), 1), *others])
    rig.hanging.hangs = "save"
    rig.send("first")
    rig.run()
    return rig


def test_a_narrow_tier_is_given_what_it_writes_in_time() -> None:
    """An eighth of the pool would take it longer than a tier has that does not hang."""
    rng = random.Random(3)
    rig = Rig(config_of(1600), [request(f"r{i}", prompt(rng, PROMPT), 1) for i in range(61)], make_hanging=Narrow)
    assert isinstance(rig.hanging, Narrow)
    rig.hanging.clock = rig.clock
    rig.send("r0")
    rig.run()
    rig.step(20)  # how fast it is becomes known
    rig.send(*list(rig.requests)[1:])
    transfers, num_late = rig.core.scheduler.transfers, 0
    for _ in range(round(2 * TIMEOUT_S / STEP_S)):
        rig.step()
        num_late += len(transfers.held_blocks(TIMEOUT_S))
    assert not num_late and rig.ends() == {"length": 61}
    rig.core.close()


def narrow_rig(block_s: float) -> Rig:
    rng = random.Random(4)
    rig = Rig(config_of(1600), [request(f"r{i}", prompt(rng, PROMPT), 1) for i in range(30)], make_hanging=Narrow)
    assert isinstance(rig.hanging, Narrow)
    rig.hanging.clock, rig.hanging.BLOCK_S = rig.clock, block_s
    return rig


def test_saves_that_waited_for_one_another_are_no_slower_for_it() -> None:
    """A burst as large as may be leaves as much room for the next one, if it was written in time."""
    rig = narrow_rig(block_s=0.012)
    transfers = rig.core.scheduler.transfers
    room = transfers.save_room
    rig.send(*rig.requests)
    rig.run()
    rig.step(round(5 / STEP_S))
    assert room == 200 and transfers.save_room == room
    rig.core.close()


def test_a_tier_that_has_never_written_in_time_is_given_little() -> None:
    rig = narrow_rig(block_s=TIMEOUT_S / 4)
    transfers = rig.core.scheduler.transfers
    for name in rig.requests:
        rig.send(name)
        rig.step(round(TIMEOUT_S / 10 / STEP_S))
    assert transfers.save_room == 0 and len(transfers.held_blocks(0.0)) == MIN_SAVED_BLOCKS
    rig.core.close()


def test_who_fits_goes_on_past_who_does_not_and_that_one_ends_in_time() -> None:
    rng = random.Random(2)
    rig = hung_save(14, request("long", prompt(rng, 95), 4), *(request(f"s{i}", prompt(rng, 9), 5) for i in range(3)))
    rig.send("long")
    rig.step(round(PATIENCE_S / STEP_S))
    rig.send("s0", "s1", "s2")
    rig.step(20)
    assert [rig.reasons[name] for name in ("s0", "s1", "s2", "long")] == ["length", "length", "length", None]
    assert 0.8 * TIMEOUT_S < rig.run() + PATIENCE_S + 20 * STEP_S < 1.1 * TIMEOUT_S
    assert rig.ends() == {"length": 4, "hung": 1}
    error = rig.errors["long"]
    assert "5 more of the 14 blocks of the KV cache are needed" in error and "10 s" in error and "doctor" in error, (
        error
    )


def test_the_next_that_does_not_fit_is_answered_at_once() -> None:
    rng = random.Random(3)
    rig = hung_save(14, *(request(f"long{i}", prompt(rng, 95), 4) for i in range(3)))
    rig.send("long0")
    rig.run()
    rig.send("long1")
    assert rig.run() <= 2 * STEP_S
    rig.end_transfers()
    rig.send("long2")
    rig.run()
    assert rig.ends() == {"length": 2, "hung": 2}


@pytest.mark.parametrize("late_s", [0.0, 2 * TIMEOUT_S], ids=["then waits", "ends at once"])
def test_one_that_grows_into_what_a_tier_keeps_ends_with_all_that_fits(late_s: float) -> None:
    """It had begun to answer: it keeps its tokens, and no other is preempted for it."""
    rng = random.Random(4)
    grows, small = request("grows", prompt(rng, 15), 80), request("small", prompt(rng, 3), 4)
    rig = hung_save(14, grows, replace(small, priority=1), scheduling_policy="priority", preemption_mode="recompute")
    num_held = rig.core.scheduler.pool.num_referenced
    rig.step(round(late_s / STEP_S))
    rig.send("grows")
    assert (rig.run() < TIMEOUT_S / 2) == (late_s > 0)
    assert rig.errors["grows"].startswith(TIERS_HANG)
    assert len(rig.tokens["grows"]) == (14 - num_held) * BLOCK_SIZE - 15 + 1
    rig.send("small")
    rig.run()
    assert rig.core.scheduler.preemption.num_preemptions == 0 and rig.ends() == {"length": 2, "hung": 1}


def test_one_whose_load_hangs_holds_up_nobody() -> None:
    rng = random.Random(7)
    long, small = prompt(rng, PROMPT), request("small", prompt(rng, 9), 4)
    rig = Rig(config_of(10), [request("old", long, 1), request("now", [*long, 1], 4), small])
    rig.send("old")
    rig.run()
    rig.empty_the_device()
    rig.hanging.hangs = "late bytes"
    rig.send("now")
    rig.step(round(2 * PATIENCE_S / STEP_S))
    rig.send("small")
    rig.step(10)
    assert rig.reasons["small"] == "length" and rig.reasons["now"] is None
    rig.run()
    assert rig.ends() == {"length": 2, "hung": 1}


def test_an_urgent_request_that_would_not_fit_preempts_nobody() -> None:
    rng = random.Random(5)
    urgent, small = request("urgent", prompt(rng, 95), 4), request("small", prompt(rng, 9), 20)
    rig = hung_save(14, urgent, replace(small, priority=2), scheduling_policy="priority")
    rig.step(round(PATIENCE_S / STEP_S))
    rig.send("small", "urgent")
    rig.run()
    assert rig.core.scheduler.preemption.num_preemptions == 0 and rig.ends() == {"length": 2, "hung": 1}


def test_an_urgent_request_that_fits_does_not_wait_behind_one_that_would_not() -> None:
    """In a pool that is full of others: it preempts them, whoever waits before it."""
    rng = random.Random(10)
    low, big, fits = (
        request("low", prompt(rng, 41), 15),
        request("big", prompt(rng, 95), 4),
        request("fits", [1] * 20, 2),
    )
    requests = [replace(low, priority=2), replace(big, priority=0), replace(fits, priority=1)]
    rig = hung_save(14, *requests, scheduling_policy="priority")
    rig.step(round(PATIENCE_S / STEP_S))
    rig.send("low")
    rig.step(4)
    rig.send("big", "fits")
    rig.step(8)
    assert rig.reasons["fits"] == "length" and rig.reasons["low"] is None and rig.reasons["big"] is None
    assert rig.core.scheduler.preemption.num_preemptions == 1
    rig.run()
    assert rig.ends() == {"length": 3, "hung": 1}


def test_a_long_request_behind_a_slow_tier_is_passed_over_for_a_while_only() -> None:
    """What is let past it is saved as slowly, so there is always a save that keeps blocks, and none to complain of."""
    rng = random.Random(11)
    num_small = round(4 * TIMEOUT_S)
    small = [request(f"small{i}", prompt(rng, 2 * BLOCK_SIZE + 1), 2) for i in range(num_small)]
    rig = Rig(config_of(14), [*small, request("long", prompt(rng, 13 * BLOCK_SIZE - 1), 1)], make_hanging=Slow)
    assert isinstance(rig.hanging, Slow)
    rig.hanging.clock = rig.clock
    num_passed = 0
    for i in range(num_small):
        rig.send(f"small{i}")
        rig.step(round(1 / STEP_S))
        if i == 5:
            rig.send("long")
        if rig.reasons.get("long", "") is None:
            num_passed = i
    assert rig.reasons["long"] == "length", "it starves"
    assert TIMEOUT_S / 2 < num_passed - 5 < 2 * TIMEOUT_S
    rig.run()
    assert rig.ends() == {"length": num_small + 1}


def test_blocks_that_a_request_shares_with_a_hung_save_are_no_loss_to_it() -> None:
    """The prompt that is being saved, asked again: it waits for those who run, not for the tier."""
    rng, first = random.Random(9), prompt(random.Random(1), PROMPT)
    rig = hung_save(NEED, request("again", [*first, 1, 2], OUTPUT - 2), request("other", prompt(rng, 9), 30))
    rig.step(round(2 * TIMEOUT_S / STEP_S))
    rig.send("other")
    rig.step(25)
    rig.send("again")
    rig.run()
    assert rig.ends() == {"length": 3}


def test_one_that_outgrows_the_pool_ends_for_that_whatever_hangs() -> None:
    rig = hung_save(9, request("again", [*prompt(random.Random(1), PROMPT), 1], OUTPUT))
    rig.step(round(2 * TIMEOUT_S / STEP_S))
    rig.send("again")
    assert rig.run() < TIMEOUT_S / 2
    assert rig.ends() == {"length": 2} and len(rig.tokens["again"]) == 9 * BLOCK_SIZE - PROMPT


def test_what_a_hung_save_keeps_in_the_index_counts_as_kept() -> None:
    """The tail of a chain is being saved: what comes before it cannot be evicted either."""
    rng = random.Random(8)
    head = prompt(rng, 8 * BLOCK_SIZE)
    requests = [request("head", head, 1), request("tail", head + prompt(rng, 2 * BLOCK_SIZE), 1)]
    rig = Rig(config_of(14), [*requests, request("long", prompt(rng, 9 * BLOCK_SIZE), 1)])
    rig.send("head")
    rig.run()
    rig.step(10)
    rig.hanging.hangs = "save"
    rig.send("tail")
    rig.run()
    assert rig.core.scheduler.pool.num_referenced <= 3, "with room for the last one but for their parents"
    rig.send("long")
    rig.run()
    assert rig.ends() == {"length": 2, "hung": 1}


def test_a_load_without_an_answer_is_given_up_and_computed() -> None:
    """With threads that never come back, on a device whose window they fill: later loads find no slot."""
    rng = random.Random(6)
    prompts = [prompt(rng, PROMPT) for _ in range(2)]
    requests = [request(f"{when}{i}", p + [i], 4) for when in ("old", "now") for i, p in enumerate(prompts)]
    rig = Rig(config_of(6 * NEED), requests, staged=rng)
    rig.send("old0", "old1")
    rig.run()
    rig.empty_the_device()
    rig.reads.is_halted = True
    rig.send("now0", "now1")
    assert TIMEOUT_S < rig.run() < 1.5 * TIMEOUT_S, "the first waits for its budget, the second for a slot"
    assert rig.ends() == {"length": 4}
    rig.end_transfers()
    rig.core.close()


@pytest.mark.parametrize("way", ["save", "load"])
def test_a_transfer_that_hung_says_nothing_of_what_one_costs(way: str) -> None:
    long = prompt(random.Random(12), PROMPT)
    rig = Rig(config_of(2 * NEED), [request("old", long, 1), request("now", [*long, 1], 4)])
    if way == "load":
        rig.send("old")
        rig.run()
        rig.empty_the_device()
    rig.hanging.hangs, rig.writes.is_halted = way if way == "load" else "", way == "save"
    rig.send("now")
    rig.step(round(3 * TIMEOUT_S / STEP_S))
    rig.end_transfers()
    swap_s = rig.core.scheduler.transfers.cost.swap_s(1, 1)
    assert swap_s is None or swap_s < 10 * STEP_S
    assert rig.ends()["length"] == len(rig.tokens)


def test_a_load_that_is_given_up_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    logging.disable(logging.NOTSET)
    long = prompt(random.Random(13), PROMPT)
    rig = Rig(config_of(3 * NEED), [request("old", long, 1), request("now", [*long, 1], 4)])
    rig.send("old")
    rig.run()
    rig.empty_the_device()
    rig.hanging.hangs = "load"
    rig.send("now")
    rig.step(round(2 * TIMEOUT_S / STEP_S))
    said = [record.getMessage() for record in caplog.records if "no answer" in record.getMessage()]
    assert rig.reasons["now"] == "length" and len(said) == 1
    assert f"a load of {PROMPT // BLOCK_SIZE} blocks has no answer after 10 s: request now" in said[0]


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan, math.inf])
def test_a_timeout_that_is_none_is_refused(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="--kv-transfer-timeout: got"):
        config_of(1, transfer_timeout_s=timeout_s)
