"""W6: what n choices of one prompt share. Blocks and tokens are the scheduler's own counts; time plays no part."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pagetier.benchmarks.preemption.virtual import NOMINAL, Arrival, VirtualEngine, chat_lengths, random_ids
from pagetier.benchmarks.report import Row
from pagetier.engine.config import EngineConfig

COUNTS = (2, 4, 8)
PAPER = {2: 0.163, 4: 0.163, 8: 0.163}  # the least that Kwon et al. 2023, figure 15, have on ShareGPT: 16.2 to 30.5 %


@dataclass(frozen=True, slots=True)
class Shared:
    """Of a run: blocks in all tables and distinct ones, summed over its steps; prompt tokens that were computed."""

    listed: int
    distinct: int
    prompt_work: int

    @property
    def saved(self) -> float:
        return 1 - self.distinct / self.listed


def choice_rows(num_prompts: int, note: str) -> Iterator[Row]:
    once = run_choices(1, num_prompts)
    for n in COUNTS:
        found = run_choices(n, num_prompts)
        yield Row(f"w6_blocks_saved_n{n}", found.saved, "ratio", f">= {PAPER[n]}", runs=num_prompts, note=note)
        work, target = found.prompt_work / once.prompt_work, "<= 1.05" if n == 8 else None
        yield Row(f"w6_prompt_work_n{n}_vs_n1", work, "ratio", target, runs=num_prompts, note=note)


def run_choices(n: int, num_prompts: int) -> Shared:
    """Prompts of ShareGPT's lengths one after the other, without a prefix cache, n choices each."""
    config = EngineConfig(num_blocks=4096, max_model_len=2049, enable_prefix_caching=False, pipeline_depth=1)
    engine, draw = VirtualEngine(config, NOMINAL), random.Random(n)
    listed = distinct = num_output = 0
    for index, (prompt, output) in enumerate(chat_lengths(num_prompts, 5)):
        arrival = Arrival(0.0, random_ids(draw, prompt), output, group=str(index))
        for choice in range(n):
            engine.add(f"{index}-{choice}", arrival)
        num_output += n * (output - 1)  # the first token comes with the prompt
        while engine.core.has_work():
            engine.core.step()
            listed += sum(len(request.block_ids) for request in engine.core.scheduler.queues.running)
            distinct += engine.core.scheduler.pool.num_referenced
    engine.core.close()
    return Shared(listed, distinct, engine.runner.num_computed - num_output)
