"""Rows on what is not arithmetic: planning at scale, the gaps between kernels, memory beside weights and pool."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pagetier.benchmarks.cpu.child import ChildError, footprint
from pagetier.benchmarks.pairing import percentile
from pagetier.benchmarks.report import Row
from pagetier.benchmarks.rig import Rig, Weights
from pagetier.benchmarks.workload import decode
from pagetier.engine.batch import Batch, StepResult
from pagetier.engine.config import EngineConfig
from pagetier.engine.core import EngineCore
from pagetier.engine.interpreter import set_for_an_engine
from pagetier.engine.messages import EngineRequest
from pagetier.engine.plan import build_batch
from pagetier.engine.sampling_params import SamplingParams
from pagetier.kvstore.keys import chain_names, hash_named, root_key

MIB = 1 << 20
BLOCK_SIZE = 16


class NullRunner:
    """Implements `runner.base.Runner`: answers every batch at once with token 7."""

    def __init__(self) -> None:
        self._results: deque[StepResult] = deque()

    def prefill_s(self, num_new: int, context: int) -> float | None:
        return None

    def launch(self, batch: Batch) -> None:
        num_samples = len(batch.samples)
        self._results.append(StepResult(batch.step, np.full(num_samples, 7, np.int64), (None,) * num_samples))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self._results.clear()


@dataclass(slots=True)
class StepTimes:
    """Seconds of the last step: in the scheduler's plan and commit, and in making the batch's arrays."""

    plan_commit_s: float = 0.0
    build_s: float = 0.0


class Crowd:
    """An engine whose seats are all taken by requests that decode, and a queue behind them; steps as `EngineCore.step`
    makes them, with a clock between the parts."""

    def __init__(self, num_running: int, num_waiting: int, policy: str = "fcfs", max_new: int = 2048) -> None:
        self._hash = hash_named("sha256")
        self._root = root_key(bytes(32), b"", self._hash)
        config = EngineConfig(
            num_blocks=num_running * 32,
            block_size=BLOCK_SIZE,
            max_model_len=4096,
            max_num_seqs=num_running,
            max_num_batched_tokens=num_running * 64,
            max_num_queued_reqs=num_waiting,
            scheduling_policy=policy,
        )
        self._runner = NullRunner()
        self.core = EngineCore(config, self._runner, None, root_of=lambda salt: self._root)
        self._draw = np.random.default_rng(0)
        self._params = SamplingParams(temperature=0.0, max_tokens=max_new, ignore_eos=True)
        self.add(self.arrivals(num_running + num_waiting, "first"))
        for _ in range(4):
            self.step()  # all seats are taken, and two steps are in flight

    def arrivals(self, num_requests: int, name: str) -> list[EngineRequest]:
        """Requests of 16 to 47 tokens, whose blocks fill up at different steps, of 16 tenants and priorities, with the
        keys that the API process hashes."""
        requests = []
        for index in range(num_requests):
            prompt = tuple(self._draw.integers(0, 49_152, 16 + index % 32).tolist())
            names = chain_names(self._root, np.array(prompt, np.uint32), BLOCK_SIZE, hash_=self._hash)
            keys, group = b"".join(name.key for name in names), index % 16
            requests.append(
                EngineRequest(
                    f"{name}-{index}",
                    prompt,
                    self._params,
                    0,
                    priority=group,
                    tenant=str(group),
                    keys=keys,
                    root=self._root,
                )
            )
        return requests

    def add(self, requests: Iterable[EngineRequest]) -> None:
        """Queue them."""
        for request in requests:
            self.core.add_request(request)

    def step(self) -> StepTimes:
        scheduler, config = self.core.scheduler, self.core.config
        start_s = time.perf_counter()
        scheduler.poll_transfers()
        plan = scheduler.plan()
        planned_s = time.perf_counter()
        if plan is not None:
            self._runner.launch(build_batch(plan, config.block_size, 1))
        times = StepTimes(planned_s - start_s, time.perf_counter() - planned_s)
        if scheduler.launched and (plan is None or len(scheduler.launched) >= config.pipeline_depth):
            result, launched = self._runner.collect(), scheduler.launched[0]
            start_s = time.perf_counter()
            scheduler.commit(launched, result)
            times.plan_commit_s += time.perf_counter() - start_s
        return times


def plan_rows(num_steps: int, note: str, num_running: int = 1_000, num_waiting: int = 10_000) -> list[Row]:
    """Times of plan and commit of one step, two steps in flight as in serving; of the batch's arrays apart."""
    crowd = Crowd(num_running, num_waiting)
    with set_for_an_engine():
        times = [crowd.step() for _ in range(num_steps)]
    crowd.core.close()
    return [
        _p99_row(
            f"plan_commit_{num_running}_running_{num_waiting}_waiting", [t.plan_commit_s for t in times], "<= 5", note
        ),
        _p99_row(f"batch_arrays_{num_running}_rows", [t.build_s for t in times], None, note),
    ]


def _p99_row(name: str, seconds: list[float], target: str | None, note: str) -> Row:
    p50, p99 = (1e3 * percentile(seconds, share) for share in (0.5, 0.99))
    return Row(name, p99, "ms", target, p50, p99, len(seconds), note)


def non_kernel_row(rig: Rig, num_steps: int, note: str) -> Row:
    """Time of a decode step at batch 32 that no kernel runs in: planning that was not hidden, hand-over, sampling."""
    outputs = rig.add(decode(32, num_steps + 12).requests(seed=1))
    while min(map(len, outputs.values())) < 4:
        rig.take_step(outputs)
    start_s, start_kernel_s = time.perf_counter(), rig.kernel_s
    for _ in range(num_steps):
        assert rig.take_step(outputs) == 32
    elapsed_s, kernel_s = time.perf_counter() - start_s, rig.kernel_s - start_kernel_s
    while rig.core.has_work():
        rig.take_step(outputs)
    value = 1e3 * (elapsed_s - kernel_s) / num_steps
    how = f"of {1e3 * elapsed_s / num_steps:.1f} ms a step"
    return Row("decode_32_non_kernel", value, "ms", "<= 1.0", runs=num_steps, note=f"{how}; {note}" if note else how)


def memory_row(weights: Weights, note: str) -> Row:
    """Resident memory of an engine's process less its weights, each counted once, and its pool."""
    name, pool_bytes = "memory_beyond_weights_and_pool", 64 * MIB
    try:
        found = footprint(weights.dtype, pool_bytes)
    except ChildError as error:
        return Row(name, None, "MiB", "<= 500", note=str(error))
    known = pool_bytes + sum(tensor.numel() * tensor.element_size() for tensor in weights.tensors.values())
    how = f"at most {(found.peak_bytes - known) / MIB:.0f} MiB while loading"
    value = (found.resident_bytes - known) / MIB
    return Row(name, value, "MiB", "<= 500", note=f"{how}; {note}" if note else how)
