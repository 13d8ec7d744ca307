"""W5 in virtual time: pools far too small for all, each way to preempt, over links of several speeds.

Lengths as in `modes`, more requests. `crowd`: all come at once and are equal. `urgent`: half of them come one by one
and outrank the others, so that each preempts one. `chats`: lengths like ShareGPT's, all at once. `recompute` has no
tier at all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pagetier.benchmarks.preemption.outcome import LOW_PRIORITY, Outcome, compared
from pagetier.benchmarks.preemption.served import BLOCK_SIZE, KV_BYTES
from pagetier.benchmarks.preemption.virtual import Arrival, StepModel, VirtualEngine, chats, random_ids, serve
from pagetier.benchmarks.preemption.virtual_tier import VirtualTier, as_connector
from pagetier.benchmarks.report import Row
from pagetier.engine.config import PREEMPTION_MODES, EngineConfig

NVME_BYTES_PER_S = 1.2e9  # what `bench tiers` measures for records of 360 KiB, reads and writes, rounded down
LINK_BYTES_PER_S = 25e9  # of a GPU
SHARES = (0.3, 0.4, 0.6)


def crowd(count: int) -> list[Arrival]:
    """All at once, all equal."""
    draw = random.Random(1)
    return [Arrival(0.0, random_ids(draw, draw.randrange(2000, 4000)), draw.randrange(256, 512)) for _ in range(count)]


def urgent(model: StepModel, count: int) -> list[Arrival]:
    """The same requests; every other one comes on its own, spread over the time that all of them take, and outranks
    those that were there from the start."""
    arrivals = crowd(count)
    whole_s = play(model, arrivals, "recompute", 1.0, None).end_s
    return sorted(
        (
            replace(arrival, at_s=whole_s * i / count) if i % 2 else replace(arrival, priority=LOW_PRIORITY)
            for i, arrival in enumerate(arrivals)
        ),
        key=lambda arrival: arrival.at_s,
    )


@dataclass(frozen=True, slots=True)
class Played:
    end_s: float
    outcome: Outcome


def num_blocks(arrivals: list[Arrival], share: float) -> int:
    """Of a pool that holds so much of what all need, and at least the longest."""
    demands = [-(-(len(arrival.prompt_ids) + arrival.num_new) // BLOCK_SIZE) for arrival in arrivals]
    return max(int(share * sum(demands)), max(demands) + 1)


def play(model: StepModel, arrivals: list[Arrival], mode: str, share: float, bytes_per_s: float | None) -> Played:
    """One way to preempt, over a link of that speed; None: no tier."""
    config = EngineConfig(
        num_blocks=num_blocks(arrivals, share),
        max_model_len=8192,
        pipeline_depth=1,
        preemption_mode=mode,
        scheduling_policy="priority",
    )
    block_nbytes = BLOCK_SIZE * KV_BYTES
    engine = VirtualEngine(
        config,
        model,
        make_connector=None
        if bytes_per_s is None
        else lambda clock: as_connector(VirtualTier(clock, bytes_per_s, block_nbytes)),
    )
    served = serve(engine, arrivals)
    stats = engine.core.stats()
    ways = stats["preemptions"]
    speed = sum(arrival.num_new for arrival in arrivals) / served.end_s
    outcome = Outcome(speed, ways["recompute"], ways["swap"], stats["resumptions"]["recomputed_tokens"])
    return Played(served.end_s, outcome)


def pressure_rows(model: StepModel, count: int, note: str) -> Iterator[Row]:
    """Each workload in each mode and pool; then other links, in a pool of 40 % with urgent requests."""
    rush = urgent(model, count)
    for name, arrivals in (("crowd", crowd(count)), ("urgent", rush), ("chats", chats(4 * count, None, seed=1))):
        for share in SHARES:
            yield from _mode_rows(model, f"w5_{name}_{share:.0%}".rstrip("%"), arrivals, share, note)
    base = play(model, rush, "recompute", 0.4, None).outcome
    third = KV_BYTES * 2000 / model.prefill_s(2000, 0) / 3
    for name, bytes_per_s in (("25gb", LINK_BYTES_PER_S), ("third_of_break_even", third)):
        found = play(model, rush, "hybrid", 0.4, bytes_per_s).outcome
        how = f"{bytes_per_s / 1e6:.4g} MB/s; {found.how}; {note}"
        yield Row(f"w5_urgent_link_{name}_hybrid_vs_recompute", found.speed / base.speed, "ratio", ">= 0.9", note=how)


def _mode_rows(model: StepModel, name: str, arrivals: list[Arrival], share: float, note: str) -> Iterator[Row]:
    found = {}
    for mode in PREEMPTION_MODES:
        outcome = play(model, arrivals, mode, share, None if mode == "recompute" else NVME_BYTES_PER_S).outcome
        found[mode] = [outcome]
        yield Row(f"{name}_{mode}", outcome.speed, "tok/s", note=f"{outcome.how}; {note}")
    yield from compared(name, found, 1.3 if share == 0.4 and "chats" not in name else None, note)
