"""W2: iterations against batches, on lengths like ShareGPT's. In virtual time, and once for real.

A batch computes all of its rows to the end of the longest, as padded batches do; what a row makes past its own end does
not count. Its prompts are prefilled without padding, in favour of batching.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace

from pagetier.benchmarks.pairing import measure_pairs
from pagetier.benchmarks.preemption.baselines import static_batches, window_batches
from pagetier.benchmarks.preemption.virtual import (
    Served,
    StepModel,
    VirtualEngine,
    at_once,
    chat_lengths,
    chats,
    serve,
)
from pagetier.benchmarks.report import Row
from pagetier.benchmarks.rig import Rig, Weights, open_rig
from pagetier.benchmarks.workload import Request, Workload
from pagetier.engine.config import EngineConfig

BATCH = 16
WINDOW_S = 0.1


def batching_rows(model: StepModel, num_requests: int, note: str) -> Iterator[Row]:
    """Tokens a second of a queue that never runs dry, and latency a token at a rate that all can bear."""
    config = EngineConfig(
        num_blocks=4096, max_model_len=2048, max_num_seqs=64, enable_prefix_caching=False, pipeline_depth=1
    )
    ways = {
        "iteration": at_once,
        "static": static_batches(BATCH),
        "window": window_batches(BATCH, WINDOW_S),
    }
    num_tokens = sum(output for _, output in chat_lengths(num_requests, 1))

    def served(name: str, rate: float | None) -> Served:
        return serve(VirtualEngine(config, model), chats(num_requests, rate, seed=1), ways[name], name != "iteration")

    speeds = {}
    for name in ways:
        speeds[name] = num_tokens / served(name, None).end_s
        yield Row(f"w2_{name}", speeds[name], "tok/s", note=note)
    for other, target in (("static", ">= 2"), ("window", None)):
        yield Row(f"w2_iteration_vs_{other}", speeds["iteration"] / speeds[other], "ratio", target, note=note)
    rate = 0.5 * num_requests * speeds["static"] / num_tokens
    how = f"{rate:.2g} requests a second, half of what static batching bears; {note}"
    for name in ways:
        yield Row(f"w2_latency_{name}", 1e3 * served(name, rate).mean_per_token_s, "ms", note=how)


def real_row(num_requests: int, num_runs: int, note: str) -> Row:
    """The same on the machine: all requests at once, against batches of 16 one after the other."""
    lengths = tuple((min(prompt, 512), min(output, 384)) for prompt, output in chat_lengths(num_requests, 1))
    requests = Workload("chats", lengths).requests(0)
    num_tokens = sum(output for _, output in lengths)
    with open_rig(Weights.load("bfloat16")) as rig:
        pairs = measure_pairs(
            lambda: num_tokens / rig.generate(requests)[1], lambda: num_tokens / _batched_s(rig, requests), num_runs
        )
    how = f"{statistics.median(pairs.ours):.0f} against {statistics.median(pairs.theirs):.0f} tokens/s; {note}"
    return Row("w2_iteration_vs_static_real", pairs.ratio, "ratio", ">= 2", runs=num_runs, note=how)


def _batched_s(rig: Rig, requests: list[Request]) -> float:
    elapsed_s = 0.0
    for first in range(0, len(requests), BATCH):
        batch = requests[first : first + BATCH]
        longest = max(request.num_new for request in batch)
        elapsed_s += rig.generate([replace(request, num_new=longest) for request in batch])[1]
    return elapsed_s
