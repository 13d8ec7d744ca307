"""W3: how near the hit rate comes to what an unbounded cache would give, under `lpm`, and what looking up costs.

Virtual time; the pool holds a part of what is asked for. Optimal: every token that an earlier prompt or answer began
with in the same place is a hit, whatever the order.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator

from pagetier.benchmarks.preemption.virtual import Arrival, StepModel, VirtualEngine, random_ids, serve
from pagetier.benchmarks.report import Row
from pagetier.engine.config import EngineConfig

Tokens = tuple[int, ...]
POOL_BLOCKS = 1024  # 16,384 tokens


def few_shot(draw: random.Random, scale: int) -> list[Tokens]:
    """Twelve tasks of five examples, questions of all of them mixed."""
    tasks = [random_ids(draw, 5 * 120) for _ in range(12)]
    return [draw.choice(tasks) + random_ids(draw, 40) for _ in range(40 * scale)]


def multi_turn(draw: random.Random, scale: int) -> list[Tokens]:
    """Chats of four turns over one system prompt, each turn with all before it; turns of different chats alternate."""
    system = random_ids(draw, 200)
    chats = [system + random_ids(draw, 60) for _ in range(10 * scale)]
    turns = []
    for _ in range(4):
        turns += chats
        chats = [chat + random_ids(draw, 120) for chat in chats]
    return turns


def agent_tree(draw: random.Random, scale: int) -> list[Tokens]:
    """A program's system prompt, its tools, a plan for each, several thoughts that begin with each plan."""
    system, prompts = random_ids(draw, 400), []
    for _ in range(6):
        tool = system + random_ids(draw, 200)
        for _ in range(2 * scale):
            plan = tool + random_ids(draw, 150)
            prompts += [plan + random_ids(draw, 30) for _ in range(4)]
    draw.shuffle(prompts)
    return prompts


def shared_document(draw: random.Random, scale: int) -> list[Tokens]:
    """Ten documents that many ask about."""
    documents = [random_ids(draw, 1500) for _ in range(10)]
    return [draw.choice(documents) + random_ids(draw, 30) for _ in range(30 * scale)]


WORKLOADS: dict[str, Callable[[random.Random, int], list[Tokens]]] = {
    "few_shot": few_shot,
    "multi_turn": multi_turn,
    "agent_tree": agent_tree,
    "shared_document": shared_document,
}


def reuse_rows(model: StepModel, scale: int, note: str) -> Iterator[Row]:
    for name, make in WORKLOADS.items():
        prompts = make(random.Random(7), scale)
        best = optimal_hits(prompts)
        for policy in ("lpm", "fcfs"):
            share = hits(model, prompts, policy) / best
            target = ">= 0.96" if policy == "lpm" else None
            how = f"{len(prompts)} prompts, {best} hit tokens at best; {note}"
            yield Row(f"w3_{name}_hits_vs_optimal_{policy}", share, "ratio", target, note=how)
    yield lookup_cost_row(model, 20 * scale, note)


def hits(model: StepModel, prompts: list[Tokens], policy: str) -> int:
    """Hit tokens; the prompts come one after the other, faster than they are served."""
    config = EngineConfig(
        num_blocks=POOL_BLOCKS,
        max_model_len=4096,
        max_num_seqs=16,
        pipeline_depth=1,
        scheduling_policy=policy,
    )
    engine = VirtualEngine(config, model)
    serve(engine, [Arrival(0.01 * i, prompt, 8) for i, prompt in enumerate(prompts)])
    return int(engine.core.scheduler.hits.as_dict()["hit_tokens"])


def optimal_hits(prompts: Iterable[Tokens]) -> int:
    """With room for everything: the longest beginning that an earlier prompt has, one token left to compute."""
    root: dict[int, dict] = {}  # type: ignore[type-arg]
    total = 0
    for prompt in prompts:
        node, depth, is_known = root, 0, True
        for token in prompt:
            child = node.get(token)
            if child is None:
                child, is_known = node.setdefault(token, {}), False
            depth += is_known
            node = child
        total += min(depth, len(prompt) - 1)
    return total


def lookup_cost_row(model: StepModel, num_prompts: int, note: str) -> Row:
    """Strangers' prompts: what hashing their blocks, matching and indexing them costs, as a share of their steps."""
    draw = random.Random(9)
    seconds = {}
    for is_cached in (True, False):
        prompts = [random_ids(draw, 1000) for _ in range(num_prompts)]
        config = EngineConfig(
            num_blocks=POOL_BLOCKS, max_model_len=2048, enable_prefix_caching=is_cached, pipeline_depth=1
        )
        engine = VirtualEngine(config, model)
        start_s = time.process_time()
        served = serve(engine, [Arrival(0.0, prompt, 1) for prompt in prompts])
        seconds[is_cached] = time.process_time() - start_s
    share = max(0.0, seconds[True] - seconds[False]) / served.end_s
    how = f"CPU seconds with the prefix cache less those without, over the steps' {served.end_s:.1f} s; {note}"
    return Row("w3_no_reuse_lookup_cost", share, "ratio", "<= 0.01", runs=num_prompts, note=how)
