"""`pagetier bench restart`: time to the first token of a long prompt after a restart, from NVMe and from Redis.

Set against what the bytes alone take: after each restart the tier's bandwidth is measured through a store alone, over a
tier of the same kind and on as many bytes, since disks swing within seconds; one step of 16 tokens is added. The
prefill that is saved is measured, too, once for both tiers, and gives the blocks their content; beyond 8k tokens
(`--full`, or `--only 32k`) it takes minutes. The engine is in this process and is built anew for each restart, so its
loading is not in the time; both media are of the run's own and nobody else's.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagetier.benchmarks.pairing import percentile, wait_until_idle
from pagetier.benchmarks.report import Row
from pagetier.benchmarks.tiers.blocks import PAYLOADS, Blocks
from pagetier.benchmarks.tiers.media import NvmeMedium, RedisMedium
from pagetier.benchmarks.tiers.restart_picture import draw
from pagetier.engine.llm import LLM
from pagetier.engine.sampling_params import SamplingParams
from pagetier.kvstore.places import cache_dir
from pagetier.kvstore.redis.embedded import join_embedded

__all__ = ("draw", "run")  # what `pagetier bench` asks a benchmark for
MODEL, DTYPE, BLOCK_SIZE = "smollm2", "bfloat16", 16
PAYLOAD_BYTES = PAYLOADS["360KiB"]  # a block of this model
MEDIUM_BYTES = 1 << 30  # most that the bandwidth is measured on
PARAMETERS = 134_515_008  # of this model; a token costs two operations each
POOL_BYTES = 3 << 30
REDIS_BYTES = 4 << 30
RESTARTS = 3
PARTS = {f"{thousands}k": 1_000 * thousands for thousands in (8, 32, 100)}
TIERS = ("nvme", "redis")
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Cold:
    """The whole prompt computed: how long it took, a step of 16 tokens behind it, and its answer."""

    took_s: float
    step_s: float
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Restarts:
    """From one tier. Seconds: of each restart's first token, and of a step of 16 tokens. bytes_per_s: the tier's, after
    each restart. cached_tokens: of the last one, from the tier.
    """

    warm_s: tuple[float, ...]
    bytes_per_s: tuple[float, ...]
    step_s: float
    cached_tokens: int

    @property
    def nbytes(self) -> int:
        """Of the blocks that a restart loads."""
        return self.cached_tokens // BLOCK_SIZE * PAYLOAD_BYTES

    @property
    def ratios(self) -> list[float]:
        """Each restart's time over that of its bytes and a step."""
        pairs = zip(self.warm_s, self.bytes_per_s, strict=True)
        return [warm_s / (self.nbytes / bytes_per_s + self.step_s) for warm_s, bytes_per_s in pairs]


def run(full: bool, say: Callable[[str], None]) -> Iterator[Row]:
    """Quick: 8k tokens. Full: 8k, 32k and 100k tokens. Each part's rows as soon as they are measured."""
    for part in PARTS if full else ("8k",):
        yield from run_part(part, full, say)


def run_part(part: str, full: bool, say: Callable[[str], None]) -> Iterator[Row]:
    """One of `PARTS`: one cold prefill and three restarts from each tier, whatever `full` says but that it waits for
    idle cores. Raises RuntimeError when the answer changes or nothing is found."""
    note = wait_until_idle(300.0 if full else 0.0)
    num_tokens = PARTS[part]
    ids = prompt(num_tokens)
    say(f"{num_tokens} tokens: one cold prefill, {RESTARTS} restarts from each of {' and '.join(TIERS)}")
    with (
        tempfile.TemporaryDirectory(dir=cache_dir(), prefix="restart-") as folder,
        tempfile.TemporaryDirectory(prefix="pgt-", dir="/tmp") as short,  # socket paths have a limit
        join_embedded(Path(short), REDIS_BYTES, linger_s=0.0) as server,
    ):
        places = {"nvme_path": Path(folder), "redis_url": server.url}
        cold = compute(ids, places)
        for tier in TIERS:
            yield from restart_rows(tier, num_tokens, cold, restarts(tier, places, ids, cold, RESTARTS), note)


def prompt(num_tokens: int) -> list[int]:
    draw = random.Random(num_tokens)
    return [draw.randrange(100, 49_152) for _ in range(num_tokens)]


def compute(ids: Sequence[int], places: Mapping[str, Any]) -> Cold:
    """Compute a prompt, with all tiers, which are given its blocks."""
    with _engine(len(ids), TIERS, places) as llm:
        start_s = time.perf_counter()
        token_ids = llm.generate([list(ids)], ONE_TOKEN)[0].outputs[0].token_ids
        took_s = time.perf_counter() - start_s
        step_s = statistics.median(_step_s(llm, list(ids[:-BLOCK_SIZE]), seed) for seed in range(3))
    return Cold(took_s, step_s, token_ids)


def restarts(tier: str, places: Mapping[str, Any], ids: Sequence[int], cold: Cold, runs: int) -> Restarts:
    """Start over `runs` times with that tier alone. Raises RuntimeError when the answer changes or nothing is found."""
    blocks = Blocks.random(PAYLOAD_BYTES, min(len(ids) // BLOCK_SIZE * PAYLOAD_BYTES, MEDIUM_BYTES))
    warm_s: list[float] = []
    rates: list[float] = []
    cached = 0
    with NvmeMedium.open(blocks) if tier == "nvme" else RedisMedium.open(blocks) as medium:
        medium.put()
        for _ in range(runs):
            with _engine(len(ids), (tier,), places) as llm:
                llm.generate([[100] * 4], ONE_TOKEN)  # the first step of a process is another thing
                start_s = time.perf_counter()
                answer = llm.generate([list(ids)], ONE_TOKEN)[0]
                warm_s.append(time.perf_counter() - start_s)
                rates.append(medium.load())
                cached = sum(answer.cached_tokens.values())
            if answer.outputs[0].token_ids != cold.token_ids or cached < len(ids) // 2:
                raise RuntimeError(f"from {tier} {cached} of {len(ids)} tokens were found, or the answer is another")
    return Restarts(tuple(warm_s), tuple(rates), cold.step_s, cached)


def _engine(num_tokens: int, tiers: Sequence[str], places: Mapping[str, Any]) -> LLM:
    return LLM(
        MODEL,
        kv_tier=tiers,
        dtype=DTYPE,
        max_model_len=num_tokens + 64,
        allow_long_context=True,
        kv_cache_memory=POOL_BYTES,
        **places,
    )


def _step_s(llm: LLM, prefix: list[int], seed: int) -> float:
    """A prompt whose prefix is on the device, so that a step of 16 tokens is computed."""
    tail = random.Random(seed).sample(range(100, 49_152), BLOCK_SIZE)
    start_s = time.perf_counter()
    llm.generate([prefix + tail], ONE_TOKEN)
    return time.perf_counter() - start_s


def restart_rows(tier: str, num_tokens: int, cold: Cold, found: Restarts, note: str) -> list[Row]:
    """The time to the first token over the bytes' own time and a step; beside it the prefill's time and rate."""
    warm_s, runs, ratios = statistics.median(found.warm_s), len(found.warm_s), found.ratios
    rate = statistics.median(found.bytes_per_s) / 1e9
    how = f"{found.nbytes / 1e6:.0f} MB at {rate:.2f} GB/s, a step of 16 tokens takes {1e3 * found.step_s:.0f} ms"
    flops = 2 * PARAMETERS * num_tokens / cold.took_s / 1e12
    noted, spread = "; ".join(word for word in (how, note) if word), (percentile(ratios, 0.5), percentile(ratios, 0.99))
    name = f"restart_{tier}_{num_tokens}"
    return [
        Row(f"{name}_vs_bytes", statistics.median(ratios), "ratio", "<= 1.3", *spread, runs, noted),
        Row(f"{name}_first_token", warm_s, "s", runs=runs, note=note),
        Row(f"{name}_recompute", cold.took_s, "s", note=f"prefill at {flops:.2f} TFLOP/s without attention"),
        Row(f"{name}_faster_than_recompute", cold.took_s / warm_s, "ratio", runs=runs, note=note),
    ]
