"""Do decodes keep their pace while another request loads a long prompt? The part `beside` of `pagetier bench shared`.

Some requests decode, and the time between two of their steps is taken alone and while a prompt of 32,000 tokens comes
from a tier, in turn. The prompt's blocks were put there under their names with plain numbers for KV, so that nobody
computes them: what a load moves is the same. It is aborted as soon as it is loaded; its own tokens are no part of this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagetier.benchmarks.pairing import percentile
from pagetier.benchmarks.report import Row
from pagetier.benchmarks.tiers.blocks import PAYLOADS, put_rate
from pagetier.benchmarks.tiers.blocks import Blocks as Chain
from pagetier.engine.build import Engine, ServeConfig, build_engine
from pagetier.engine.messages import EngineRequest
from pagetier.engine.sampling_params import SamplingParams
from pagetier.kvstore.block import Part
from pagetier.kvstore.config import GIB, StoreConfig
from pagetier.kvstore.keys import chain_names
from pagetier.kvstore.redis.embedded import join_embedded
from pagetier.kvstore.store import open_store

NUM_DECODING, CONTEXT_TOKENS = 8, 128
BLOCK_SIZE, PAYLOAD_BYTES = 16, PAYLOADS["360KiB"]  # a block of the default model in bf16
STEPS_ALONE = 40  # before each load
SMALL_NUMBER = 0x3C00  # a hundredth, in bf16


@dataclass(frozen=True, slots=True)
class Loads:
    """What is loaded beside the decodes, and how often."""

    num_tokens: int
    num_runs: int


QUICK, FULL = Loads(32_000, 3), Loads(32_000, 8)


def rows(full: bool, folder: Path, note: str, say: Callable[[str], None]) -> list[Row]:
    """One for each tier. folder: empty, for both."""
    loads = FULL if full else QUICK
    found = []
    for tier in ("nvme", "redis"):
        say(f"{NUM_DECODING} decodes beside {loads.num_runs} loads of {loads.num_tokens} tokens from {tier}")
        with stored(tier, folder / tier, loads) as (config, prompts), served(config, loads) as engine:
            alone_s, beside_s = paces(engine, prompts)
        p99_s = percentile(alone_s, 0.99), percentile(beside_s, 0.99)
        text = f"{len(alone_s)} steps alone, p50 {percentile(alone_s, 0.5) * 1e3:.1f} and p99 {p99_s[0] * 1e3:.1f} ms; "
        text += f"{len(beside_s)} beside, p50 {percentile(beside_s, 0.5) * 1e3:.1f} and p99 {p99_s[1] * 1e3:.1f} ms"
        name = f"shared_step_p99_beside_{tier}"
        found.append(Row(name, p99_s[1] / p99_s[0], "ratio", "<= 1.3", runs=loads.num_runs, note=f"{text}; {note}"))
    return found


@contextmanager
def stored(tier: str, folder: Path, loads: Loads) -> Iterator[tuple[StoreConfig, list[tuple[int, ...]]]]:
    """A tier that holds the prompts; how to open it, and the prompts."""
    folder.mkdir()
    with ExitStack() as stack:
        nbytes = loads.num_tokens // BLOCK_SIZE * PAYLOAD_BYTES * (loads.num_runs + 1)
        config = StoreConfig(tiers=(tier,), nvme_path=folder, nvme_size=2 * nbytes, nvme_allow_unsafe=True)
        if tier == "redis":
            url = stack.enter_context(join_embedded(folder, nbytes + GIB, 0.0)).url
            config = StoreConfig(tiers=(tier,), redis_url=url)
        with served(config, loads) as engine:
            identity, root, layers = engine.identity, engine.root_of(""), engine.model_config
        part = Part(0, 0, layers.num_layers, 0, layers.num_kv_heads)
        blocks = Chain.random(PAYLOAD_BYTES, loads.num_tokens // BLOCK_SIZE * PAYLOAD_BYTES)
        blocks.source.view(np.uint16)[:] = SMALL_NUMBER
        draw, prompts = np.random.default_rng(0), []
        with open_store(config, identity, part, PAYLOAD_BYTES) as store:
            for _ in range(loads.num_runs):
                ids = draw.integers(100, 49_152, loads.num_tokens)
                put_rate(store, Chain(chain_names(root, ids, BLOCK_SIZE), blocks.source, blocks.destination))
                prompts.append((*ids.tolist(), 100))
        yield config, prompts


@contextmanager
def served(config: StoreConfig, loads: Loads) -> Iterator[Engine]:
    """The default model with room for the decodes and one long prompt."""
    length = loads.num_tokens + 256
    engine = build_engine(
        ServeConfig(
            dtype="bfloat16",
            max_model_len=length,
            allow_long_context=True,
            kv_cache_memory=(length + NUM_DECODING * 4096) // BLOCK_SIZE * PAYLOAD_BYTES,
            store=config,
        )
    )
    try:
        yield engine
    finally:
        engine.close()


def paces(engine: Engine, prompts: list[tuple[int, ...]]) -> tuple[list[float], list[float]]:
    """Seconds between steps of the decodes, alone and beside loads. Raises RuntimeError when nothing is loaded."""
    core, alone_s, beside_s = engine.core, list[float](), list[float]()
    params = SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True)
    for i in range(NUM_DECODING):
        ids = tuple(range(100 + i, 100 + i + CONTEXT_TOKENS))
        core.add_request(EngineRequest(f"decode-{i}", ids, params, seed=0))
    while core.stats()["requests"]["running"] < NUM_DECODING:
        core.step()
    for _ in range(10):
        _step_s(engine)
    for i, prompt in enumerate(prompts):
        alone_s += [_step_s(engine) for _ in range(STEPS_ALONE)]
        core.add_request(EngineRequest(f"long-{i}", prompt, params, seed=0))
        while core.stats()["requests"]["waiting"]:
            core.step()
        if not core.stats()["requests"]["loading"]:
            raise RuntimeError("nothing was loaded beside the decodes")
        while core.stats()["requests"]["loading"]:
            beside_s.append(_step_s(engine))
        core.abort([f"long-{i}"])
        for _ in range(4):
            core.step()
    return alone_s, beside_s


def _step_s(engine: Engine) -> float:
    """Seconds to the next tokens of the decodes."""
    start_s = time.perf_counter()
    while not engine.core.step():
        pass
    return time.perf_counter() - start_s
