"""One trace of requests on the real model under different configurations: identical tokens, whatever the cache did.

The reference is each request alone on an engine without any cache.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.smollm2 import (  # noqa: F401
    PATIENT,
    Answer,
    Traced,
    assert_same,
    cold_answers,
    engine_of,
    make_trace,
    run,
    smollm2,
    text_ids,
    with_aborts,
)
from tests.kvstore.valkey import Valkey, valkey, valkey_server  # noqa: F401

NUM_QUICK = 14


@dataclass(frozen=True)
class Case:
    """An engine's options, its tiers, whether requests are aborted, and what happens before the trace comes again to a
    second engine (restart: "" for no second one, "keep" the NVMe folder, or "lose" it)."""

    options: Mapping[str, Any] = field(default_factory=dict)
    tiers: tuple[str, ...] = ()
    aborts: bool = False
    restart: str = ""
    preempts: bool = False  # certain only without tiers: saves hold blocks, and waiting for them is not preemption


CASES = {
    "defaults, paranoid": Case({"paranoid": True}),
    "small blocks, tiny chunks, tight pool, depth 1": Case(
        {"block_size": 4, "num_tokens": 176, "max_num_batched_tokens": 23, "pipeline_depth": 1}, preempts=True
    ),
    "nvme, tight pool, aborts, restart": Case(
        {"num_tokens": 176, "max_num_batched_tokens": 64, "paranoid": True}, ("nvme",), aborts=True, restart="keep"
    ),
    "redis, large blocks, depth 1, restart": Case(
        {"block_size": 32, "num_tokens": 640, "pipeline_depth": 1}, ("redis",), restart="keep"
    ),
    "nvme and redis, tight pool, the folder lost at the restart": Case(
        {"block_size": 8, "num_tokens": 192, "max_num_batched_tokens": 100}, ("nvme", "redis"), restart="lose"
    ),
    "no chunked prefill, no prefix cache, three at a time, aborts": Case(
        {"enable_chunked_prefill": False, "enable_prefix_caching": False, "max_num_seqs": 3, "max_model_len": 400},
        aborts=True,
    ),
}


@pytest.fixture(scope="module")
def traces(text_ids: list[int]) -> dict[int, list[Traced]]:  # noqa: F811
    whole = make_trace(text_ids, 40, seed=15)
    return {40: whole, NUM_QUICK: [t for t in whole if int(t.request.request_id[1:]) < NUM_QUICK]}


@pytest.fixture(scope="module")
def references(smollm2: Path, traces: dict[int, list[Traced]]) -> dict[str, Answer]:  # noqa: F811
    return cold_answers(smollm2, [t.request for t in traces[NUM_QUICK]])


@pytest.fixture(scope="module")
def all_references(smollm2: Path, traces: dict[int, list[Traced]]) -> dict[str, Answer]:  # noqa: F811
    return cold_answers(smollm2, [t.request for t in traces[40]])


def run_case(
    case: Case, model: Path, trace: list[Traced], references: dict[str, Answer], folder: Path, url: str
) -> None:
    options = {**PATIENT, **case.options, "nvme_path": folder, "redis_url": url}
    for life in range(2 if case.restart else 1):
        fed = with_aborts(trace, seed=life) if case.aborts else trace
        with engine_of(model, case.tiers, **options) as engine:
            assert_same(run(engine, fed), references, case.aborts)
            stats = engine.core.stats()
        if case.preempts:
            assert stats["preemptions"]["recompute"] > 0, "the pool is not tight enough"
        if case.restart and life == 1:
            served = {tier for tier in case.tiers if stats["tiers"][tier]["hit_blocks"] > 0}
            assert served >= ({"redis"} if case.restart == "lose" else set(case.tiers)), stats["tiers"]
            assert all(stats["tiers"][tier]["corrupt"] == 0 for tier in case.tiers)
        if case.restart == "lose":
            shutil.rmtree(folder)


@pytest.mark.parametrize("name", CASES)
def test_identical_tokens(
    name: str,
    smollm2: Path,  # noqa: F811
    traces: dict[int, list[Traced]],
    references: dict[str, Answer],
    tmp_path: Path,
    valkey: Valkey,  # noqa: F811
) -> None:
    run_case(CASES[name], smollm2, traces[NUM_QUICK], references, tmp_path / "nvme", valkey.url)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_identical_tokens_of_forty_requests(
    name: str,
    smollm2: Path,  # noqa: F811
    traces: dict[int, list[Traced]],
    all_references: dict[str, Answer],
    tmp_path: Path,
    valkey: Valkey,  # noqa: F811
) -> None:
    run_case(CASES[name], smollm2, traces[40], all_references, tmp_path / "nvme", valkey.url)
