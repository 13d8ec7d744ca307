"""How fast is the runner by itself, without scheduler and server? Prefill, and decode at 1 and 16 rows, against
transformers with the same weights, dtype and threads.

Our side is what serving uses: the threaded runner two batches deep, prefill in steps of 512 tokens. transformers runs
its forward directly, without `generate`'s own cost, and prefills in one pass: both are in its favour.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from pagetier.benchmarks.pairing import Pairs, measure_pairs, wait_until_idle
from pagetier.benchmarks.report import Row
from pagetier.benchmarks.static_rows import StaticRows
from pagetier.engine.device_pool import DevicePool, PoolShape, torch_dtype
from pagetier.engine.models.llama import Llama
from pagetier.engine.pull import resolve_model
from pagetier.engine.runner.model_runner import ModelRunner
from pagetier.engine.weights.export_hf import export_hf
from pagetier.engine.weights.loader import load_checkpoint

MODEL = "smollm2"
BLOCK_SIZE = 16
STEP_TOKENS = 512  # EngineConfig.max_num_batched_tokens
VOCAB_SIZE = 49_152


@dataclass(frozen=True, slots=True)
class Load:
    """`num_rows` prompts of `prompt_tokens` random ids, then `num_new` greedy tokens each; 0: prefill alone."""

    name: str
    num_rows: int
    prompt_tokens: int
    num_new: int

    @property
    def num_counted(self) -> int:
        """Tokens that the speed is of: generated ones, or prompt tokens where none are."""
        return self.num_rows * (self.num_new or self.prompt_tokens)

    def prompts(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.num_rows)
        return torch.randint(100, VOCAB_SIZE, (self.num_rows, self.prompt_tokens), generator=generator)


LOADS = (Load("prefill_1024", 1, 1024, 0), Load("decode_1", 1, 64, 32), Load("decode_16", 16, 64, 32))


def run(full: bool, say: Callable[[str], None]) -> list[Row]:
    """Quick: two pairs in each dtype. Full: five."""
    note = wait_until_idle(300.0 if full else 0.0)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="pagetier-bench-") as folder:
        export_hf(resolve_model(MODEL), Path(folder) / "model", "float32")
        for dtype in ("float32", "bfloat16"):
            with both_sides(Path(folder) / "model", dtype) as (ours, theirs):
                for load in LOADS:
                    say(f"{dtype}, {load.name}")
                    pairs = measure_pairs(speed_of(ours, load), speed_of(theirs, load), 5 if full else 2)
                    rows += rows_of(f"{load.name}_{dtype}", pairs, note)
    return rows


def rows_of(name: str, pairs: Pairs, note: str) -> list[Row]:
    runs = len(pairs.ours)
    return [
        Row(f"{name}_vs_transformers", pairs.ratio, "ratio", ">= 1.00", runs=runs, note=note),
        Row(f"{name}_pagetier", statistics.median(pairs.ours), "tok/s", runs=runs, note=note),
        Row(f"{name}_transformers", statistics.median(pairs.theirs), "tok/s", runs=runs, note=note),
    ]


def speed_of(side: Callable[[Load], None], load: Load) -> Callable[[], float]:
    """A run's counted tokens per second, prefill included."""
    side(Load("warm", load.num_rows, load.prompt_tokens, min(load.num_new, 2)))

    def measure() -> float:
        start_s = time.perf_counter()
        side(load)
        return load.num_counted / (time.perf_counter() - start_s)

    return measure


@contextmanager
def both_sides(folder: Path, dtype: str) -> Iterator[tuple[Callable[[Load], None], Callable[[Load], None]]]:
    checkpoint = load_checkpoint(resolve_model(MODEL), dtype)
    num_blocks = max(load.num_rows * -(-(load.prompt_tokens + load.num_new) // BLOCK_SIZE) for load in LOADS)
    pool = DevicePool(PoolShape.of(checkpoint.config, num_blocks, BLOCK_SIZE), torch_dtype(dtype))
    runner = ModelRunner(Llama(checkpoint.config, checkpoint.tensors), pool, threaded=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype(dtype))
    try:
        yield lambda load: run_ours(runner, num_blocks, load), lambda load: run_theirs(reference, load)
    finally:
        runner.close()


def run_ours(runner: ModelRunner, num_blocks: int, load: Load) -> None:
    static = StaticRows(num_blocks, BLOCK_SIZE)
    rows = [static.add(prompt) for prompt in load.prompts().tolist()]
    chunks = [min(STEP_TOKENS, load.prompt_tokens - at) for at in range(0, load.prompt_tokens, STEP_TOKENS)]
    pending = [(row, chunk) for row in rows for chunk in chunks]
    while pending:
        step = [pending.pop(0)]
        while pending and sum(num_new for _, num_new in step) + pending[0][1] <= STEP_TOKENS:
            step.append(pending.pop(0))
        runner.launch(static.batch(step))
        runner.collect()
    # The rows of several prefill steps have their first tokens in different results; any id serves to measure.
    for row in rows:
        row.token_ids.append(100)
    for index in range(load.num_new):
        runner.launch(static.batch([(row, 1) for row in rows]))
        for source, row in enumerate(rows):
            row.source = source
        if index:
            runner.collect()
    if load.num_new:
        runner.collect()


@torch.inference_mode()
def run_theirs(reference: Any, load: Load) -> None:
    inputs, cache = load.prompts(), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions rename past_key_values, older know no other
        for _ in range(load.num_new + 1):
            out = reference(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            inputs = out.logits[:, -1].argmax(-1, keepdim=True)  # (num_rows, 1)
