"""The engine's scheduler in virtual time: real plans and real blocks, steps that take what a model of them says.

The model is a nominal one, or the compiled core's own fit of its steps (`StepModel.measured`): seconds are then those
of this machine when nothing else runs on it. What is unfair: a step's Python counts nothing, for any side.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np

from pagetier.benchmarks.rig import Setup, Weights, open_rig
from pagetier.benchmarks.workload import FIRST_ORDINARY_ID, VOCAB_SIZE, Workload
from pagetier.connectors.base import Connector
from pagetier.engine.batch import Batch, StepResult
from pagetier.engine.config import EngineConfig
from pagetier.engine.core import EngineCore
from pagetier.engine.messages import EngineRequest
from pagetier.engine.sampling_params import SamplingParams
from pagetier.engine.tables import BlockTables
from pagetier.kvstore.keys import root_key

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds of a step, of each of its tokens, and of each pair of a new token and one it attends to."""

    per_step_s: float
    per_token_s: float
    per_pair_s: float

    @classmethod
    def measured(cls) -> StepModel:
        """Of the default model in bf16 here, learnt from a few seconds of prefill and decode."""
        with open_rig(Weights.load("bfloat16"), Setup()) as rig:
            rig.generate(Workload("fit", ((700, 24),) * 8).requests(0))
            fit = rig.model.prefill_model.fit
        assert fit is not None, "nothing was prefilled"
        return cls(fit.per_step_s, fit.per_token_s, fit.per_pair_s)

    def seconds(self, batch: Batch) -> float:
        new = np.diff(batch.query_start_loc)  # (num_rows,)
        pairs = float((new * (batch.seq_lens - new / 2)).sum())
        return self.per_step_s + self.per_token_s * batch.num_tokens + self.per_pair_s * pairs

    def prefill_s(self, num_new: int, context: int) -> float:
        """Seconds to compute `num_new` tokens of one request behind `context` others, in steps of 512."""
        num_steps = -(-num_new // 512)
        pairs = num_new * (context + num_new / 2)
        return self.per_step_s * num_steps + self.per_token_s * num_new + self.per_pair_s * pairs


NOMINAL = StepModel(6e-3, 3.2e-4, 2.5e-7)  # near what two Zen 5 cores take


class VirtualClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class VirtualRunner:
    """Implements `runner.base.Runner`: answers at once, and lets the clock pass. num_computed: tokens since start."""

    def __init__(self, model: StepModel, clock: VirtualClock) -> None:
        self.num_computed = 0
        self._model, self._clock = model, clock
        self._results: deque[StepResult] = deque()

    def prefill_s(self, num_new: int, context: int) -> float | None:
        return self._model.prefill_s(num_new, context)

    def launch(self, batch: Batch) -> None:
        self._clock.now_s += self._model.seconds(batch)
        self.num_computed += batch.num_tokens
        count = len(batch.samples)
        tokens = np.array([FIRST_ORDINARY_ID + row.position % 1000 for row in batch.samples], np.int64)
        self._results.append(StepResult(batch.step, tokens, (None,) * count))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self._results.clear()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and when it comes. num_new: how long its answer will be, which no scheduler knows."""

    at_s: float
    prompt_ids: tuple[int, ...]
    num_new: int
    group: str = ""
    priority: int = 0


@dataclass(slots=True)
class Served:
    """What came of a run: latencies over tokens of output, when all was done, what the pool held meanwhile."""

    per_token_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    held_tokens: float = 0.0  # room in blocks that requests held, summed over the steps of a crowded pool
    filled_tokens: float = 0.0  # of which had KV in them
    most_running: int = 0

    @property
    def filled_share(self) -> float:
        return self.filled_tokens / self.held_tokens if self.held_tokens else 0.0

    @property
    def mean_per_token_s(self) -> float:
        return sum(self.per_token_s) / len(self.per_token_s)


class VirtualEngine:
    """An engine in virtual time. make_tables: how requests get their blocks. make_connector: to a tier, if any."""

    def __init__(
        self,
        config: EngineConfig,
        model: StepModel,
        make_tables: Callable[..., BlockTables] = BlockTables,
        make_connector: Callable[[VirtualClock], Connector] | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.runner = VirtualRunner(model, self.clock)
        self.core = EngineCore(
            config,
            self.runner,
            None if make_connector is None else make_connector(self.clock),
            root_of=lambda salt: root_key(bytes(32), salt.encode()),
            clock=self.clock,
            make_tables=make_tables,
        )
        self._config = config

    def add(self, name: str, arrival: Arrival) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=arrival.num_new, ignore_eos=True)
        self.core.add_request(
            EngineRequest(name, arrival.prompt_ids, params, seed=0, group=arrival.group, priority=arrival.priority)
        )

    def note(self, served: Served) -> None:
        """Count what the pool holds now."""
        running = self.core.scheduler.queues.running
        served.most_running = max(served.most_running, len(running))
        if self.core.scheduler.queues.waiting:
            served.held_tokens += self._config.block_size * self.core.scheduler.pool.num_referenced
            served.filled_tokens += sum(request.num_computed_tokens for request in running)


Admit = Callable[[Sequence[float], float, bool], int]  # (arrivals waiting, now, idle) -> how many to hand over now


def at_once(waiting: Sequence[float], now_s: float, is_idle: bool) -> int:
    """Iteration-level scheduling: the engine has every request as soon as it comes."""
    return len(waiting)


def serve(engine: VirtualEngine, arrivals: Sequence[Arrival], admit: Admit = at_once, pads: bool = False) -> Served:
    """Let all of them arrive, be answered, and time pass where there is nothing to do.

    pads: what is handed over together is computed to the end of its longest row, and answered then.
    """
    served, waiting, sent_s = Served(), deque[int](), {}
    todo, core, clock = deque(range(len(arrivals))), engine.core, engine.clock
    while todo or waiting or core.has_work():
        while todo and arrivals[todo[0]].at_s <= clock.now_s:
            waiting.append(todo.popleft())
        count = admit([arrivals[i].at_s for i in waiting], clock.now_s, not core.has_work())
        batch = [waiting.popleft() for _ in range(count)]
        longest = max((arrivals[index].num_new for index in batch), default=0)
        for index in batch:
            sent_s[str(index)] = arrivals[index]
            engine.add(str(index), replace(arrivals[index], num_new=longest) if pads else arrivals[index])
        if not core.has_work():
            clock.now_s = max(clock.now_s + 1e-3, arrivals[todo[0]].at_s if todo and not waiting else 0.0)
            continue
        for output in core.step():
            if output.finish_reason is not None:
                arrival = sent_s.pop(output.request_id)
                served.per_token_s.append((clock.now_s - arrival.at_s) / arrival.num_new)
        if core.waits_for_store:
            clock.now_s += 1e-3
        engine.note(served)
    served.end_s = clock.now_s
    core.close()
    return served


def chat_lengths(count: int, seed: int) -> list[tuple[int, int]]:
    """(prompt, output) tokens like ShareGPT's: log-normal, with the means of Kwon et al. 2023, figure 11, 161 and 338,
    whatever the count: one of each of `count` equally likely strata, in random pairs."""
    draw = random.Random(seed)

    def lengths(mu: float, sigma: float) -> list[int]:
        levels = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
        draw.shuffle(levels)
        return [min(1024, max(4, int(math.exp(mu + sigma * level)))) for level in levels]

    return list(zip(lengths(4.32, 1.35), lengths(5.54, 0.85), strict=True))


def chats(count: int, per_s: float | None, seed: int) -> list[Arrival]:
    """Strangers' requests of such lengths that come as a Poisson process, all at once where no rate is given."""
    draw, now_s, arrivals = random.Random(seed), 0.0, []
    for prompt, output in chat_lengths(count, seed):
        now_s += draw.expovariate(per_s) if per_s else 0.0
        arrivals.append(Arrival(now_s, random_ids(draw, prompt), output))
    return arrivals


def random_ids(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(FIRST_ORDINARY_ID, VOCAB_SIZE) for _ in range(count))
