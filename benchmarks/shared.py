"""Do many requests that share a prefix gain by the tiers, and never pay for them? `pagetier bench shared`.

The default model in bf16 on a CPU, engines within this process, all requests queued at once. (a) cold: the device cache
is on on both sides, and the tier (NVMe, empty) must not cost anything. (b) after a restart the tiers know the prefix.
(c) the prefixes do not fit the device pool together. Two replicas over one Valkey get the same cold prompt many times:
each computes it once. Decodes go on beside a load (beside.py). What is unfair: both replicas take turns in one thread,
and the file system may cache what NVMe holds.
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pagetier.benchmarks import beside
from pagetier.benchmarks.pairing import percentile, wait_until_idle
from pagetier.benchmarks.report import Row
from pagetier.benchmarks.workload import FIRST_ORDINARY_ID, VOCAB_SIZE
from pagetier.engine.build import Engine, ServeConfig, build_engine
from pagetier.engine.messages import EngineRequest
from pagetier.engine.sampling_params import SamplingParams
from pagetier.kvstore.config import EMBEDDED, GIB, StoreConfig
from pagetier.kvstore.errors import TierUnavailable
from pagetier.kvstore.redis.embedded import join_embedded, stop_embedded

BYTES_PER_TOKEN = 23_040  # of the default model in bf16
TAIL_TOKENS = 24
NUM_NEW = 16
NUM_SEQS = 64
PARTS = ("cold", "restart", "small_pool", "replicas", "beside")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one run. prefixes: in the small pool, each of prefix_tokens // 4; the pool holds a third of them."""

    prefix_tokens: int
    num_requests: int
    num_runs: int
    num_prefixes: int
    num_identical: int


QUICK = Sizes(prefix_tokens=4096, num_requests=50, num_runs=1, num_prefixes=6, num_identical=64)
FULL = Sizes(prefix_tokens=4096, num_requests=50, num_runs=5, num_prefixes=12, num_identical=64)


@dataclass(slots=True)
class Answers:
    """What a batch of requests got. first_s: to its first token, by request. cached: prompt tokens not computed."""

    took_s: float = 0.0
    num_prompt: int = 0
    first_s: dict[str, float] = field(default_factory=dict)
    cached: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def num_prefilled(self) -> int:
        return self.num_prompt - sum(sum(tiers.values()) for tiers in self.cached.values())

    def first_token_s(self, share: float) -> float:
        return percentile(list(self.first_s.values()), share)


def run(full: bool, say: Say) -> list[Row]:
    """Quick: one run a side. Full: five."""
    rows: list[Row] = []
    for part in PARTS:
        rows += run_part(part, full, say)
    return rows


def run_part(part: str, full: bool, say: Say) -> list[Row]:
    """One of `PARTS`."""
    note, sizes = wait_until_idle(600.0 if full else 0.0), FULL if full else QUICK
    if part == "beside":
        with scratch() as folder:
            return beside.rows(full, folder, note, say)
    rows_of = {"cold": cold_rows, "restart": restart_rows, "small_pool": small_pool_rows, "replicas": replica_rows}
    return rows_of[part](sizes, note, say)


# ---- the rows


def cold_rows(sizes: Sizes, note: str, say: Say) -> list[Row]:
    """(a): throughput and TTFT with empty tiers over those without, in turn."""
    speeds, firsts = [], []
    for seed in range(sizes.num_runs):
        requests = sharing(seed, sizes.prefix_tokens, sizes.num_requests)
        found = {}
        for has_tiers in (True, False) if seed % 2 else (False, True):
            say(f"cold, {'with' if has_tiers else 'without'} tiers ({seed + 1} of {sizes.num_runs})")
            with scratch() as folder, engine(folder if has_tiers else None, pool_tokens(sizes)) as served:
                warm_up(served)
                found[has_tiers] = answer([served], requests)
        speeds.append(found[False].took_s / found[True].took_s)
        firsts.append(found[True].first_token_s(0.99) / found[False].first_token_s(0.99))
    text = f"{sizes.num_requests} requests, {sizes.prefix_tokens} shared tokens; {note}"
    runs = sizes.num_runs
    return [
        Row("shared_cold_throughput", statistics.median(speeds), "ratio", ">= 0.95", runs=runs, note=text),
        Row("shared_cold_ttft_p99", statistics.median(firsts), "ratio", "<= 1.05", runs=runs, note=text),
    ]


def restart_rows(sizes: Sizes, note: str, say: Say) -> list[Row]:
    """(b): a new process over the tiers of the last one, against one without tiers, which computes."""
    gains, shares = [], []
    for seed in range(sizes.num_runs):
        requests = sharing(seed, sizes.prefix_tokens, sizes.num_requests)
        with scratch() as folder:
            say(f"before the restart ({seed + 1} of {sizes.num_runs})")
            with engine(folder, pool_tokens(sizes)) as served:
                answer([served], sharing(seed, sizes.prefix_tokens, 1))
                served.core.flush(30.0)
            say("after it")
            with engine(folder, pool_tokens(sizes)) as served:
                warm_up(served)
                ours = answer([served], requests)
        say("without tiers")
        with engine(None, pool_tokens(sizes)) as served:
            warm_up(served)
            theirs = answer([served], requests)
        gains.append(theirs.first_token_s(0.5) / ours.first_token_s(0.5))
        shares.append(ours.num_prefilled / ours.num_prompt)
    text, runs = f"{sizes.num_requests} requests, {sizes.prefix_tokens} shared tokens; {note}", sizes.num_runs
    return [
        Row("shared_restart_ttft_p50_gain", statistics.median(gains), "ratio", ">= 5", runs=runs, note=text),
        Row("shared_restart_prefilled", statistics.median(shares), "of prompt", "<= 0.05", runs=runs, note=text),
    ]


def small_pool_rows(sizes: Sizes, note: str, say: Say) -> list[Row]:
    """(c): requests over several prefixes, in turn, that the pool cannot hold together; each was asked once before."""
    length = sizes.prefix_tokens // 4
    tokens = length * sizes.num_prefixes // 3 + 4 * (TAIL_TOKENS + NUM_NEW + 32)
    ratios = []
    for seed in range(sizes.num_runs):
        chosen = [sharing(f"{seed}-{i}", length, sizes.num_requests) for i in range(sizes.num_prefixes)]
        first = [prompts[-1] for prompts in chosen]
        requests = [chosen[i % sizes.num_prefixes][i] for i in range(sizes.num_requests - 1)]
        found = {}
        for has_tiers in (True, False) if seed % 2 else (False, True):
            say(f"small pool, {'with' if has_tiers else 'without'} tiers ({seed + 1} of {sizes.num_runs})")
            with scratch() as folder, engine(folder if has_tiers else None, tokens, num_seqs=4) as served:
                answer([served], first)
                served.core.flush(30.0)
                found[has_tiers] = answer([served], requests)
        ratios.append(found[False].took_s / found[True].took_s)
    text = f"{sizes.num_requests - 1} requests over {sizes.num_prefixes} prefixes of {length} tokens, pool of {tokens}"
    row = Row("shared_small_pool_throughput", statistics.median(ratios), "ratio", ">= 1.2", note=f"{text}; {note}")
    return [row]


def replica_rows(sizes: Sizes, note: str, say: Say) -> list[Row]:
    """One cold prompt, many times, over two replicas with a Valkey in common: how often it was computed."""
    say(f"{sizes.num_identical} identical prompts over two replicas")
    prompt = sharing("replicas", sizes.prefix_tokens, 1)[0]
    with scratch() as folder, joined(folder) as url:
        with (
            engine(folder / "a", pool_tokens(sizes), redis_url=url) as one,
            engine(folder / "b", pool_tokens(sizes), redis_url=url) as two,
        ):
            found = answer([one, two], [prompt] * sizes.num_identical)
    text = f"{sizes.num_identical} prompts of {len(prompt)} tokens; {note}"
    return [Row("shared_replicas_prefilled", found.num_prefilled / len(prompt), "prompts", "<= 2.2", note=text)]


# ---- engines and requests


def pool_tokens(sizes: Sizes) -> int:
    """Room for the prefix and every request's own tokens."""
    return 2 * sizes.prefix_tokens + NUM_SEQS * (TAIL_TOKENS + NUM_NEW + 32)


def sharing(seed: int | str, num_shared: int, num_prompts: int) -> list[list[int]]:
    """Prompts of random ids with a common beginning and tails of their own."""
    ids = random.Random(f"shared-{seed}")
    prefix = [ids.randrange(FIRST_ORDINARY_ID, VOCAB_SIZE) for _ in range(num_shared)]
    return [
        prefix + [ids.randrange(FIRST_ORDINARY_ID, VOCAB_SIZE) for _ in range(TAIL_TOKENS)] for _ in range(num_prompts)
    ]


def answer(engines: Sequence[Engine], prompts: Sequence[Sequence[int]]) -> Answers:
    """Queue all prompts at once, over the engines in turn, and step these until all are answered. Raises RuntimeError
    when one fails."""
    answers = Answers(num_prompt=sum(len(prompt) for prompt in prompts))
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    start_s = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engines[i % len(engines)].core.add_request(EngineRequest(str(i), tuple(prompt), params, seed=0))
    while any(served.core.has_work() for served in engines):
        for served in engines:
            for output in served.core.step():
                if output.finish_reason == "error":
                    raise RuntimeError(output.error)
                answers.first_s.setdefault(output.request_id, time.perf_counter() - start_s)
                answers.cached[output.request_id] = dict(output.cached_tokens)
        if all(served.core.waits_for_store for served in engines):
            time.sleep(0.0005)
    answers.took_s = time.perf_counter() - start_s
    return answers


def warm_up(served: Engine) -> None:
    """A prompt of its own, so that nothing is run for the first time."""
    answer([served], sharing("warm-up", 256, 2))


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder, short enough for a socket below it."""
    folder = Path(tempfile.mkdtemp(prefix="pgt-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def joined(folder: Path) -> Iterator[str]:
    """A Valkey of our own; its URL."""
    with join_embedded(folder / "redis", 2 * GIB, 1.0) as embedded:
        yield embedded.url
    with suppress(TierUnavailable):
        stop_embedded(folder / "redis")


@contextmanager
def engine(folder: Path | None, num_tokens: int, *, redis_url: str = "", num_seqs: int = NUM_SEQS) -> Iterator[Engine]:
    """The default model with a pool of that many tokens, over NVMe below `folder`, and Valkey where a URL is given."""
    tiers = () if folder is None else ("nvme", "redis") if redis_url else ("nvme",)
    store = StoreConfig()
    if folder is not None:
        store = StoreConfig(
            tiers=tiers,
            nvme_path=folder / "nvme",
            nvme_size=4 * GIB,
            nvme_allow_unsafe=True,
            redis_url=redis_url or EMBEDDED,
        )
    served = build_engine(
        ServeConfig(dtype="bfloat16", kv_cache_memory=num_tokens * BYTES_PER_TOKEN, max_num_seqs=num_seqs, store=store)
    )
    try:
        yield served
    finally:
        served.close()
