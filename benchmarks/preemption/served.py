"""The default model in bf16, with a pool of so many blocks and a tier below, for rows on the machine itself."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pagetier.engine.build import Engine, ServeConfig, Wrap, build_engine
from pagetier.engine.messages import EngineRequest
from pagetier.engine.sampling_params import SamplingParams
from pagetier.kvstore.config import StoreConfig

BLOCK_SIZE = 16
HOST_BYTES = 2 << 30
KV_BYTES = 23_040  # of a token of the default model in bf16


@contextmanager
def open_engine(
    num_blocks: int, tier: str | None = "nvme", wrap: Wrap | None = None, **options: Any
) -> Iterator[Engine]:
    """An engine over an empty tier, `nvme` or `host`, or none. It ends, and the tier's folder goes, with the block."""
    folder = Path(tempfile.mkdtemp(prefix="pgt-"))
    store = StoreConfig(tiers=("nvme",) if tier == "nvme" else (), nvme_path=folder)
    if tier == "host":
        store = StoreConfig(host_size=HOST_BYTES)
    memory = num_blocks * BLOCK_SIZE * KV_BYTES
    served = build_engine(ServeConfig(dtype="bfloat16", kv_cache_memory=memory, store=store, **options), wrap=wrap)
    try:
        yield served
    finally:
        served.core.close()
        shutil.rmtree(folder, ignore_errors=True)


def add(served: Engine, name: str, prompt_ids: Sequence[int], num_new: int, priority: int = 0) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    served.core.add_request(EngineRequest(name, tuple(prompt_ids), params, seed=0, priority=priority))
    return name


def step(served: Engine) -> int:
    """One step; how many tokens came."""
    outputs = served.core.step()
    if not outputs and served.core.waits_for_store:
        time.sleep(0.0005)
    return sum(len(output.token_ids) for output in outputs)


def drain(served: Engine) -> None:
    """Step until nothing is left."""
    while served.core.has_work():
        step(served)
