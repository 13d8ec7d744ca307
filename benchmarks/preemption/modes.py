"""W5: preempted requests computed again, or brought back by way of a lower tier.

Prompts of 2,000 to 4,000 tokens, outputs of 256 to 512, a device pool that holds a share of what all would need. Half
of the requests are urgent and come one by one while the others decode, so each preempts one: where all are equal, a
whole prompt is admitted only when it fits beside what runs, and outputs grow by a tenth of it, so that hardly anybody
is preempted, and whoever is finds most of its blocks still cached. All sides get the same requests at the same counts
of tokens. `recompute` has no tier at all, as an engine without tiers, and pays for no write-through.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from pagetier.benchmarks.preemption.link import SlowLink, as_connector
from pagetier.benchmarks.preemption.outcome import LOW_PRIORITY, Outcome, compared
from pagetier.benchmarks.preemption.served import BLOCK_SIZE, KV_BYTES, add, open_engine, step
from pagetier.benchmarks.report import Row
from pagetier.benchmarks.workload import Request, Workload
from pagetier.connectors.base import Connector
from pagetier.engine.build import Engine
from pagetier.engine.config import PREEMPTION_MODES

NUM_PAIRS = 2  # requests that wait, and as many urgent ones: some 20 s


@dataclass(frozen=True, slots=True)
class Link:
    """How fast copies to and from the tier are; None: a third of where loading is as quick as computing."""

    name: str
    bytes_per_s: float | None


LINKS = (Link("link_25gb", 25e9), Link("link_third_of_break_even", None))


def lengths() -> tuple[tuple[int, int], ...]:
    draw = random.Random(1)
    return tuple((draw.randrange(2000, 4000), draw.randrange(256, 512)) for _ in range(2 * NUM_PAIRS))


def num_blocks(share: float) -> int:
    """Of a pool that holds so much of what all requests need, and at least the longest."""
    demands = [-(-(prompt + new) // BLOCK_SIZE) for prompt, new in lengths()]
    return max(int(share * sum(demands)), max(demands) + 1)


def mode_rows(share: float, num_runs: int, note: str) -> Iterator[Row]:
    """New tokens per second in each mode, in turn, and hybrid over the others."""
    found: dict[str, list[Outcome]] = {mode: [] for mode in PREEMPTION_MODES}
    for seed in range(num_runs):
        for mode, outcomes in found.items():
            tier = None if mode == "recompute" else "nvme"
            with open_engine(num_blocks(share), tier, preemption_mode=mode, scheduling_policy="priority") as served:
                outcomes.append(run_requests(served, seed))
            last = outcomes[-1]
            yield Row(f"w5_pool_{share:.0%}_{mode}".replace("%", ""), last.speed, "tok/s", note=f"{last.how}; {note}")
    yield from compared(f"w5_pool_{share:.0%}".rstrip("%"), found, 1.3 if share == 0.4 else None, note)


def run_requests(served: Engine, seed: int) -> Outcome:
    """Half of them at once; the others one by one, as often as a share of all tokens has come."""
    requests = Workload("modes", lengths()).requests(seed)
    patient, urgent = requests[:NUM_PAIRS], requests[NUM_PAIRS:]
    total = sum(request.num_new for request in requests)
    warm_up(served)
    start_s = time.perf_counter()
    for index, request in enumerate(patient):
        add(served, f"patient-{index}", request.prompt_ids, request.num_new, LOW_PRIORITY)
    num_came = 0
    while served.core.has_work() or urgent:
        if urgent and num_came >= (len(requests) - NUM_PAIRS - len(urgent) + 0.3) * total / (2 * NUM_PAIRS):
            request = urgent.pop(0)
            add(served, f"urgent-{len(urgent)}", request.prompt_ids, request.num_new)
        num_came += step(served)
    elapsed_s = time.perf_counter() - start_s
    stats = served.core.stats()
    ways = stats["preemptions"]
    return Outcome(total / elapsed_s, ways["recompute"], ways["swap"], stats["resumptions"]["recomputed_tokens"])


def warm_up(served: Engine) -> None:
    """A short request, so that the engine knows how long its steps take."""
    request = Request([seed % 1000 + 100 for seed in range(600)], 4)
    add(served, "first", request.prompt_ids, request.num_new)
    while served.core.has_work():
        step(served)


def link_row(link: Link, note: str) -> Row:
    """Hybrid over host memory whose copies are throttled, against computing again, in a pool of 40 %."""
    outcomes = {}
    for mode in ("recompute", "hybrid"):
        links: list[SlowLink] = []

        def wrap(connector: Connector, block_nbytes: int, links: list[SlowLink] = links) -> Connector:
            links.append(SlowLink(connector, block_nbytes))
            return as_connector(links[0])

        tier = None if mode == "recompute" else "host"
        with open_engine(num_blocks(0.4), tier, wrap, preemption_mode=mode, scheduling_policy="priority") as served:
            if links:
                links[0].bytes_per_s = link.bytes_per_s or break_even_bytes_per_s(served) / 3
            outcomes[mode] = run_requests(served, 0)
    ratio = outcomes["hybrid"].speed / outcomes["recompute"].speed
    how = f"{outcomes['hybrid'].how} against {outcomes['recompute'].how}; {note}"
    return Row(f"w5_{link.name}_hybrid_vs_recompute", ratio, "ratio", ">= 0.9", note=how)


def break_even_bytes_per_s(served: Engine) -> float:
    """KV bytes of a prompt over the time that its prefill takes."""
    warm_up(served)
    seconds = served.core.scheduler.transfers.cost.recompute_s(2000)
    assert seconds is not None, "it has prefilled"
    return 2000 * KV_BYTES / seconds
