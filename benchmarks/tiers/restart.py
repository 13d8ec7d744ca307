"""`pagetier bench restart`: time to the first token of a long prompt after a restart, from NVMe and from Redis.

Set against what the bytes alone take: after each restart the tier's bandwidth is measured through a store alone, over a
tier of the same kind and on as many bytes, since disks swing within seconds; one step of 16 tokens is added. The
prefill that is saved is measured, too, and gives the blocks their content; beyond 8k tokens (`--full`, or `--only
nvme_32k`) it takes minutes. The engine is in this process and is built anew for each restart, so its loading is not in
the time; both media are of the run's own and nobody else's.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagetier.benchmarks.pairing import percentile, wait_until_idle
from pagetier.benchmarks.report import Row
from pagetier.benchmarks.tiers.blocks import PAYLOADS, Blocks
from pagetier.benchmarks.tiers.media import Medium, NvmeMedium, RedisMedium
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
PARTS = {f"{tier}_{thousands}k": (tier, 1_000 * thousands) for thousands in (8, 32, 100) for tier in ("nvme", "redis")}
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Restarts:
    """Seconds: of the whole prompt computed, of each restart's first token, and of a step of 16 tokens.
    bytes_per_s: the tier's, after each restart. cached_tokens: of the last one, from the tier.
    """

    cold_s: float
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
    for part in PARTS if full else ("nvme_8k", "redis_8k"):
        yield from run_part(part, full, say)


def run_part(part: str, full: bool, say: Callable[[str], None]) -> Iterator[Row]:
    """One of `PARTS`: one cold prefill and three restarts, whatever `full` says but that it waits for idle cores."""
    note = wait_until_idle(300.0 if full else 0.0)
    tier, num_tokens = PARTS[part]
    say(f"{num_tokens} tokens from {tier}: one cold prefill, {RESTARTS} restarts")
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="restart-") as folder:
        found = restarts(tier, Path(folder), prompt(num_tokens), RESTARTS)
    yield from restart_rows(f"{tier}_{num_tokens}", num_tokens, found, note)


def prompt(num_tokens: int) -> list[int]:
    draw = random.Random(num_tokens)
    return [draw.randrange(100, 49_152) for _ in range(num_tokens)]


def restarts(tier: str, folder: Path, ids: Sequence[int], runs: int) -> Restarts:
    """Compute a prompt, then start over `runs` times. Raises RuntimeError when the answer changes or nothing is
    found."""
    blocks = Blocks.random(PAYLOAD_BYTES, min(len(ids) // BLOCK_SIZE * PAYLOAD_BYTES, MEDIUM_BYTES))
    if tier == "nvme":
        with NvmeMedium.open(blocks) as disk:
            return _restarts({"kv_tier": ("nvme",), "nvme_path": folder}, ids, runs, disk)
    with (
        tempfile.TemporaryDirectory(prefix="pgt-", dir="/tmp") as short,  # socket paths have a limit
        join_embedded(Path(short), REDIS_BYTES, linger_s=0.0) as server,
        RedisMedium.open(blocks) as other,
    ):
        return _restarts({"kv_tier": ("redis",), "redis_url": server.url}, ids, runs, other)


def _restarts(options: dict[str, Any], ids: Sequence[int], runs: int, medium: Medium) -> Restarts:
    warm_s: list[float] = []
    rates: list[float] = []
    cached = 0
    with _engine(len(ids), options) as llm:
        start_s = time.perf_counter()
        first = llm.generate([list(ids)], ONE_TOKEN)[0].outputs[0].token_ids
        cold_s = time.perf_counter() - start_s
        step_s = statistics.median(_step_s(llm, list(ids[:-BLOCK_SIZE]), seed) for seed in range(3))
    medium.put()
    for _ in range(runs):
        with _engine(len(ids), options) as llm:
            llm.generate([[100] * 4], ONE_TOKEN)  # the first step of a process is another thing
            start_s = time.perf_counter()
            answer = llm.generate([list(ids)], ONE_TOKEN)[0]
            warm_s.append(time.perf_counter() - start_s)
            rates.append(medium.load())
            cached = sum(answer.cached_tokens.values())
        if answer.outputs[0].token_ids != first or cached < len(ids) // 2:
            raise RuntimeError(f"after a restart {cached} of {len(ids)} tokens were found, or the answer is another")
    return Restarts(cold_s, tuple(warm_s), tuple(rates), step_s, cached)


def _engine(num_tokens: int, options: dict[str, Any]) -> LLM:
    return LLM(
        MODEL,
        dtype=DTYPE,
        max_model_len=num_tokens + 64,
        allow_long_context=True,
        kv_cache_memory=POOL_BYTES,
        **options,
    )


def _step_s(llm: LLM, prefix: list[int], seed: int) -> float:
    """A prompt whose prefix is on the device, so that a step of 16 tokens is computed."""
    tail = random.Random(seed).sample(range(100, 49_152), BLOCK_SIZE)
    start_s = time.perf_counter()
    llm.generate([prefix + tail], ONE_TOKEN)
    return time.perf_counter() - start_s


def restart_rows(name: str, num_tokens: int, found: Restarts, note: str) -> list[Row]:
    """The time to the first token over the bytes' own time and a step; beside it the prefill's time and rate."""
    warm_s, runs, ratios = statistics.median(found.warm_s), len(found.warm_s), found.ratios
    rate = statistics.median(found.bytes_per_s) / 1e9
    how = f"{found.nbytes / 1e6:.0f} MB at {rate:.2f} GB/s, a step of 16 tokens takes {1e3 * found.step_s:.0f} ms"
    flops = 2 * PARAMETERS * num_tokens / found.cold_s / 1e12
    noted, spread = "; ".join(word for word in (how, note) if word), (percentile(ratios, 0.5), percentile(ratios, 0.99))
    return [
        Row(f"restart_{name}_vs_bytes", statistics.median(ratios), "ratio", "<= 1.3", *spread, runs, noted),
        Row(f"restart_{name}_first_token", warm_s, "s", runs=runs, note=note),
        Row(f"restart_{name}_recompute", found.cold_s, "s", note=f"prefill at {flops:.2f} TFLOP/s without attention"),
        Row(f"restart_{name}_faster_than_recompute", found.cold_s / warm_s, "ratio", runs=runs, note=note),
    ]
