"""Planning with a long queue, and an urgent request that finds the pool full."""

from __future__ import annotations

import random
import time

from pagetier.benchmarks.cpu.overhead import Crowd
from pagetier.benchmarks.pairing import measure_pairs, percentile
from pagetier.benchmarks.preemption.served import add, drain, open_engine
from pagetier.benchmarks.report import Row
from pagetier.benchmarks.workload import Workload
from pagetier.engine.build import Engine
from pagetier.engine.interpreter import set_for_an_engine

POLICIES = ("fcfs", "priority", "fair", "lpm")
ARRIVALS = 100
URGENT_TOKENS = 512
LOW_PRIORITY = 10


def planning_row(policy: str, num_steps: int, note: str) -> Row:
    """p99 of a step's planning and committing: 64 seats, 10,000 waiting at first and 100 more in every step, which come
    hashed as from the API process. The note says what it took of the processor, the batch's arrays included, which
    other programs change less."""
    crowd = Crowd(64, 10_000, policy, max_new=8)
    seconds, processor_s = [], []
    with set_for_an_engine():
        for step in range(num_steps):
            arrivals = crowd.arrivals(ARRIVALS, f"late-{step}")
            start_s, before_s = time.perf_counter(), time.thread_time()
            crowd.add(arrivals)
            added_s = time.perf_counter() - start_s
            seconds.append(crowd.step().plan_commit_s + added_s)
            processor_s.append(time.thread_time() - before_s)
    crowd.core.close()
    p50, p99 = (1e3 * percentile(seconds, share) for share in (0.5, 0.99))
    cpu50, cpu99 = (1e3 * percentile(processor_s, share) for share in (0.5, 0.99))
    note = f"processor time: median {cpu50:.1f} ms, p99 {cpu99:.1f} ms; {note}"
    return Row(f"plan_10000_waiting_{policy}", p99, "ms", "<= 10", p50, p99, num_steps, note)


def urgent_row(num_runs: int, note: str) -> Row:
    """Time to first token of an urgent request that finds the pool full of others, over that on an idle engine."""
    with open_engine(400, scheduling_policy="priority") as served:

        def idle() -> float:
            return first_token_s(served, 0)

        def beside() -> float:
            prompts = Workload("crowd", ((1500, 400),) * 4).requests(0)
            names = [add(served, f"low-{i}", r.prompt_ids, r.num_new, LOW_PRIORITY) for i, r in enumerate(prompts)]
            steps_until_full(served)
            found = first_token_s(served, 0)
            served.core.abort(names)
            drain(served)
            return found

        idle()
        pairs = measure_pairs(beside, idle, num_runs)
    return Row("urgent_ttft_full_vs_idle", pairs.ratio, "ratio", "<= 2", runs=num_runs, note=note)


def steps_until_full(served: Engine) -> None:
    """Until a request waits for blocks that others hold, and those decode."""
    for _ in range(40):
        served.core.step()


def first_token_s(served: Engine, priority: int) -> float:
    """Of a request of its own tokens; it is ended then."""
    ids = random.Random(time.perf_counter_ns())
    start_s = time.perf_counter()
    add(served, "urgent", [ids.randrange(100, 49_152) for _ in range(URGENT_TOKENS)], 8, priority)
    while not any(output.request_id == "urgent" for output in served.core.step()):
        pass
    elapsed_s = time.perf_counter() - start_s
    served.core.abort(["urgent"])
    return elapsed_s
