"""Does preemption keep work, and does priority act? `pagetier bench preemption`.

The default model in bf16 on a CPU. Modes of preemption are compared on the same requests in one run, in turn: prompts
of 2,000 to 4,000 tokens, outputs of 256 to 512, a device pool that holds a share of what they would need together, an
NVMe tier below it. What is unfair: the tier is empty at the start of every measurement, and its file system may cache.
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pagetier.benchmarks.cpu.overhead import Crowd
from pagetier.benchmarks.pairing import measure_pairs, percentile, wait_until_idle
from pagetier.benchmarks.report import Row
from pagetier.benchmarks.workload import Workload
from pagetier.engine.build import Engine, ServeConfig, build_engine
from pagetier.engine.config import PREEMPTION_MODES
from pagetier.engine.messages import EngineRequest
from pagetier.engine.sampling_params import SamplingParams
from pagetier.kvstore.config import StoreConfig

BLOCK_SIZE = 16
POLICIES = ("fcfs", "priority", "fair", "lpm")
ARRIVALS = 100
URGENT_TOKENS = 512
LOW_PRIORITY = 10

Say = Callable[[str], None]


def run(full: bool, say: Say) -> list[Row]:
    """Quick: one measurement a row at small sizes. Full: five."""
    note = wait_until_idle(600.0 if full else 0.0)
    say("planning with 10,000 waiting requests, by policy")
    rows = [planning_row(policy, 300 if full else 100, note) for policy in POLICIES]
    say("an urgent request in a full pool")
    rows.append(urgent_row(5 if full else 2, note))
    for share in (0.3, 0.4, 0.6) if full else (0.4,):
        say(f"preemption modes, a pool of {share:.0%} of the demand")
        rows += mode_rows(share, 5 if full else 1, 12 if full else 6, note)
    return rows


# ---- planning


def planning_row(policy: str, num_steps: int, note: str) -> Row:
    """p99 of a step's planning and committing: 64 seats, 10,000 waiting at first and 100 more in every step."""
    crowd = Crowd(64, 10_000, policy, max_new=8)
    seconds = []
    for step in range(num_steps):
        start_s = time.perf_counter()
        crowd.add(ARRIVALS, f"late-{step}")
        added_s = time.perf_counter() - start_s
        seconds.append(crowd.step().plan_commit_s + added_s)
    crowd.core.close()
    p50, p99 = (1e3 * percentile(seconds, share) for share in (0.5, 0.99))
    return Row(f"plan_10000_waiting_{policy}", p99, "ms", "<= 10", p50, p99, num_steps, note)


# ---- priority


def urgent_row(num_runs: int, note: str) -> Row:
    """Time to first token of an urgent request that finds the pool full of others, over that on an idle engine."""
    with engine(num_blocks=400, scheduling_policy="priority") as served:

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


# ---- modes


def mode_rows(share: float, num_runs: int, num_requests: int, note: str) -> list[Row]:
    """New tokens per second in each mode, one after the other, and hybrid over the others."""
    draw = random.Random(1)
    lengths = tuple((draw.randrange(2000, 4000), draw.randrange(256, 512)) for _ in range(num_requests))
    workload = Workload(f"pool_{share:.0%}", lengths)
    demand = sum(-(-(prompt + new) // BLOCK_SIZE) for prompt, new in lengths)
    speeds: dict[str, list[float]] = {mode: [] for mode in PREEMPTION_MODES}
    counts: dict[str, str] = {}
    for seed in range(num_runs):
        for mode, found in speeds.items():
            with engine(int(share * demand), preemption_mode=mode) as served:
                found.append(speed(served, workload, seed))
                counts[mode] = ", ".join(f"{n} by {kind}" for kind, n in served.core.stats()["preemptions"].items())
    percent = f"{share:.0%}".rstrip("%")
    middle = {mode: statistics.median(found) for mode, found in speeds.items()}
    rows = [
        Row(f"pool_{percent}_{mode}", value, "tok/s", runs=num_runs, note=f"{counts[mode]} in the last run; {note}")
        for mode, value in middle.items()
    ]
    over = statistics.median(h / r for h, r in zip(speeds["hybrid"], speeds["recompute"], strict=True))
    best = statistics.median(
        h / max(r, s) for h, r, s in zip(speeds["hybrid"], speeds["recompute"], speeds["swap"], strict=True)
    )
    target = ">= 1.3" if share == 0.4 else None
    rows.append(Row(f"pool_{percent}_hybrid_vs_recompute", over, "ratio", target, runs=num_runs, note=note))
    rows.append(Row(f"pool_{percent}_hybrid_vs_better", best, "ratio", ">= 0.9", runs=num_runs, note=note))
    return rows


def speed(served: Engine, workload: Workload, seed: int) -> float:
    start_s = time.perf_counter()
    for index, request in enumerate(workload.requests(seed)):
        add(served, str(index), request.prompt_ids, request.num_new)
    drain(served)
    return workload.num_counted / (time.perf_counter() - start_s)


# ---- an engine


@contextmanager
def engine(num_blocks: int, **options: str) -> Iterator[Engine]:
    """The default model with a pool of so many blocks and an empty NVMe tier."""
    folder = Path(tempfile.mkdtemp(prefix="pgt-"))
    store = StoreConfig(tiers=("nvme",), nvme_path=folder)
    memory = num_blocks * BLOCK_SIZE * 23_040  # bytes a token of the default model in bf16
    served = build_engine(ServeConfig(dtype="bfloat16", kv_cache_memory=memory, store=store, **options))  # type: ignore[arg-type]
    try:
        yield served
    finally:
        served.core.close()
        shutil.rmtree(folder, ignore_errors=True)


def add(served: Engine, name: str, prompt_ids: Sequence[int], num_new: int, priority: int = 0) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    served.core.add_request(EngineRequest(name, tuple(prompt_ids), params, seed=0, priority=priority))
    return name


def drain(served: Engine) -> None:
    """Step until nothing is left."""
    while served.core.has_work():
        served.core.step()
        if served.core.waits_for_store:
            time.sleep(0.0005)
