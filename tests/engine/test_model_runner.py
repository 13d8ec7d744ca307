"""The runner: order, token sources across batches, copies, errors, threads."""

from __future__ import annotations

import dataclasses
import functools
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from pagetier.benchmarks.static_rows import Row, StaticRows
from pagetier.engine.batch import Batch, SampleRow, StepResult
from pagetier.engine.device_pool import DevicePool, PoolShape
from pagetier.engine.models.compiled import CompiledModel
from pagetier.engine.runner.model_runner import Model, ModelRunner
from pagetier.engine.sampling_params import SamplingParams
from tests.engine.model_cases import CASES, BuiltCase, build
from tests.kernels.cpu.tiny_models import library

NUM_BLOCKS, BLOCK_SIZE, NUM_NEW = 40, 4, 12
case = functools.lru_cache(maxsize=None)(lambda: build(CASES[0]))


every_kind = pytest.mark.parametrize("kind", ["torch", "compiled"])


def model_of(built: BuiltCase, kind: str, pool: DevicePool) -> Model:
    if kind == "torch":
        return built.model()
    return CompiledModel(built.config, built.tensors, pool, library(), max_tokens=64, num_threads=2)


@contextmanager
def runner_of(
    built: BuiltCase, *, threaded: bool, paranoid: bool = False, kind: str = "torch"
) -> Iterator[ModelRunner]:
    pool = DevicePool(PoolShape.of(built.config, NUM_BLOCKS, BLOCK_SIZE), torch.float32)
    runner = ModelRunner(model_of(built, kind, pool), pool, threaded=threaded, paranoid=paranoid)
    try:
        yield runner
    finally:
        runner.close()


def run(runner: ModelRunner, batch: Batch) -> StepResult:
    runner.launch(batch)
    return runner.collect()


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 131, n).tolist() for n in (7, 13, 1)]


def expected_greedy(prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(NUM_NEW):
        ids.append(int(case().logits(ids)[-1].argmax()))
    return ids[len(prompt) :]


def decode_ahead(runner: ModelRunner, rows: list[Row], static: StaticRows, rng: np.random.Generator) -> list[list[int]]:
    """Each row's new tokens with two batches always outstanding: a step is built before its input tokens are known,
    its rows in another order than the step before."""
    order = list(range(len(rows)))
    runner.launch(static.batch([(rows[i], len(rows[i].token_ids)) for i in order]))
    launched, outputs = [order], [[] for _ in rows]  # type: ignore[var-annotated]
    for _ in range(NUM_NEW - 1):
        order = rng.permutation(len(rows)).tolist()
        for i in order:
            rows[i].source = launched[-1].index(i)
        runner.launch(static.batch([(rows[i], 1) for i in order]))
        launched.append(order)
        for i, token in zip(launched[-2], runner.collect().token_ids.tolist(), strict=True):
            outputs[i].append(token)
    for i, token in zip(launched[-1], runner.collect().token_ids.tolist(), strict=True):
        outputs[i].append(token)
    return outputs


@every_kind
@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("paranoid", [False, True])
def test_two_batches_deep_gives_the_greedy_tokens(threaded: bool, paranoid: bool, kind: str) -> None:
    rng = np.random.default_rng(0)
    with runner_of(case(), threaded=threaded, paranoid=paranoid, kind=kind) as runner:
        static = StaticRows(NUM_BLOCKS, BLOCK_SIZE, rng)
        rows = [static.add(prompt) for prompt in prompts()]
        assert decode_ahead(runner, rows, static, rng) == [expected_greedy(prompt) for prompt in prompts()]


@every_kind
def test_sampled_tokens_do_not_depend_on_company(kind: str) -> None:
    """Random rows alone and together: the same tokens, to the last one."""
    params = SamplingParams(temperature=1.0, top_p=0.95)

    def generate(chosen: list[int]) -> list[list[int]]:
        rng = np.random.default_rng(1)
        with runner_of(case(), threaded=True, kind=kind) as runner:
            static = StaticRows(NUM_BLOCKS, BLOCK_SIZE, rng)
            return decode_ahead(runner, [static.add(prompts()[i], params) for i in chosen], static, rng)

    together = generate([0, 1, 2])
    assert [generate([i])[0] for i in range(3)] == together
    assert generate([2, 0]) == [together[2], together[0]]


@every_kind
@pytest.mark.parametrize("threaded", [False, True])
def test_copies_run_before_the_step(threaded: bool, kind: str) -> None:
    """A second row takes the first 6 tokens of the first: block 0 shared, 2 slots of block 1 copied into a poisoned
    block, in the very step that reads them."""
    first = prompts()[1]
    second = first[:6] + [5, 99, 17]
    with runner_of(case(), threaded=threaded, paranoid=True, kind=kind) as runner:
        static = StaticRows(NUM_BLOCKS, BLOCK_SIZE, np.random.default_rng(2))
        row = static.add(first)
        run(runner, static.batch([(row, len(first))]))
        fork = static.add(second)
        fork.blocks, fork.num_computed = [row.blocks[0], static.take_block()], 6
        batch = static.batch([(fork, 3)])
        fresh = np.append(batch.fresh_blocks, np.int32(fork.blocks[1]))
        copies = np.array([[row.blocks[1], fork.blocks[1], 2]], np.int32)
        result = run(runner, dataclasses.replace(batch, copies=copies, fresh_blocks=fresh))
        assert result.token_ids.tolist() == [int(case().logits(second)[-1].argmax())]
        row.token_ids.append(3)  # the source is as it was
        again = run(runner, static.batch([(row, 1)]))
        assert again.token_ids.tolist() == [int(case().logits([*first, 3])[-1].argmax())]


@every_kind
@pytest.mark.parametrize("threaded", [False, True])
def test_a_failed_batch_is_raised_by_its_collect_and_ends_what_builds_on_it(threaded: bool, kind: str) -> None:
    with runner_of(case(), threaded=threaded, kind=kind) as runner:
        static = StaticRows(NUM_BLOCKS, BLOCK_SIZE)
        row, other, third = static.add([1, 2, 3]), static.add([4, 5]), static.add([6])
        run(runner, static.batch([(third, 1)]))  # leaves a token that must not pass for the failed batch's
        runner.launch(dataclasses.replace(static.batch([(row, 3)]), logits_indices=np.array([3], np.int32)))
        row.source = 0
        runner.launch(static.batch([(row, 1)]))
        with pytest.raises(ValueError, match="step 2: (logits_indices|a logits index)"):
            runner.collect()
        with pytest.raises(RuntimeError, match="step 3 continues"):
            runner.collect()
        assert run(runner, static.batch([(other, 2)])).token_ids.tolist() == [int(case().logits([4, 5])[-1].argmax())]


def int32(*values: int) -> np.typing.NDArray[np.int32]:
    return np.array(values, np.int32)


@every_kind
@pytest.mark.parametrize(
    "change",
    [
        {"slot_mapping": (np.array([0, 1, NUM_BLOCKS * BLOCK_SIZE]),)},
        {"slot_mapping": (np.array([0, -1, 2]),)},
        {"slot_mapping": (np.array([0, 1]),)},
        {"block_tables": (int32(NUM_BLOCKS)[None],)},
        {"block_tables": (int32(-1)[None],)},
        {"seq_lens": int32(BLOCK_SIZE + 1)},
        {"seq_lens": int32(0)},
        {"query_start_loc": int32(0, 2)},
        {"positions": int32(0, 1, BLOCK_SIZE)},
        {"logits_indices": int32(-1)},
        {"samples": ()},
        {"copies": int32(0, NUM_BLOCKS, 1)[None]},
        {"copies": int32(0, 1, BLOCK_SIZE + 1)[None]},
        {"fresh_blocks": int32(NUM_BLOCKS)},
        {"compares": int32(0, NUM_BLOCKS)[None]},
        {"token_ids": int32(1, 2, 131)},
        {"token_ids": int32(1, -2, 3)},
    ],
    ids=lambda change: str(change)[:40],
)
def test_ids_outside_the_pool_are_refused(change: dict[str, object], kind: str) -> None:
    with runner_of(case(), threaded=False, kind=kind) as runner:
        batch = StaticRowsOfOne().batch
        with pytest.raises(ValueError, match="step 1"):
            run(runner, dataclasses.replace(batch, **change))  # type: ignore[arg-type]
        assert not runner.pool.tensor.any()
        assert len(run(runner, batch).token_ids) == 1


class StaticRowsOfOne:
    """A valid batch of three tokens in block 0."""

    def __init__(self) -> None:
        static = StaticRows(NUM_BLOCKS, BLOCK_SIZE)
        self.batch = static.batch([(static.add([1, 2, 3]), 3)])


@every_kind
def test_logprobs_and_pending_penalties_cross_batches(kind: str) -> None:
    """A penalty sees the token of the batch before, which was not known when the step was built."""
    penalty = SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0, logprobs=2)
    with runner_of(case(), threaded=True, kind=kind) as runner:
        static = StaticRows(NUM_BLOCKS, BLOCK_SIZE)
        row = static.add([1, 2, 3])
        runner.launch(static.batch([(row, 3)]))
        row.source = 0
        sample_row = SampleRow(penalty, 0, 0, 4, 1, (), (1, 2, 3), (), pending=0)
        runner.launch(dataclasses.replace(static.batch([(row, 1)]), samples=(sample_row,)))
        token = int(runner.collect().token_ids[0])
        result = runner.collect()
        logits = case().logits([1, 2, 3, token])[-1]  # (vocab_size,)
        [logprobs] = result.logprobs
        assert logprobs is not None
        assert logprobs.top[0][0] == int(logits.argmax())
        logits[token] -= 4.0
        assert result.token_ids.tolist() == [int(logits.argmax())]


def test_close_lets_launched_batches_end_and_joins() -> None:
    threads = threading.active_count()
    pool = DevicePool(PoolShape.of(case().config, NUM_BLOCKS, BLOCK_SIZE), torch.float32)
    runner = ModelRunner(case().model(), pool, threaded=True)
    static = StaticRows(NUM_BLOCKS, BLOCK_SIZE)
    row = static.add([1, 2, 3])
    runner.launch(static.batch([(row, 2)]))
    runner.launch(static.batch([(row, 1)]))
    assert threading.active_count() == threads + 1
    runner.close()
    runner.close()
    assert threading.active_count() == threads
    assert runner.collect().step == 1
    assert runner.collect().token_ids.tolist() == [int(case().logits([1, 2, 3])[-1].argmax())]


class SlowToWrite:
    """A model on a GPU whose last kernel, the one that writes K and V, comes late."""

    def __init__(self) -> None:
        self.config = case().config
        self.device = torch.device("cuda")
        self.numerics: dict[str, str] = {}
        self.is_batch_invariant = False
        self.core_sampler = None

    def prepare(self, batch: Batch) -> None:
        pass

    def forward(self, token_ids: torch.Tensor, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        untyped: Any = torch.cuda
        untyped._sleep(500_000_000)  # cycles: some 0.3 s
        pool[0].fill_(1.0)
        return torch.zeros((len(batch.logits_indices), self.config.vocab_size), device=self.device)

    def prefill_s(self, num_new: int, context: int) -> float | None:
        return None

    def close(self) -> None:
        pass


@pytest.mark.gpu
@pytest.mark.parametrize("threaded", [False, True])
def test_what_is_collected_is_in_the_pool_even_without_samples(threaded: bool) -> None:
    """A save copies on a stream of its own, as soon as the step is collected."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    pool = DevicePool(PoolShape.of(case().config, NUM_BLOCKS, BLOCK_SIZE), torch.float32, "cuda")
    runner = ModelRunner(SlowToWrite(), pool, threaded=threaded)
    batch = dataclasses.replace(StaticRowsOfOne().batch, logits_indices=int32(), samples=())
    assert len(run(runner, batch).token_ids) == 0
    untyped: Any = torch.cuda
    with torch.cuda.stream(untyped.Stream()):
        saved = pool.tensor[0].to("cpu", non_blocking=True)
        torch.cuda.current_stream().synchronize()
    runner.close()
    assert bool((saved == 1.0).all())


@pytest.mark.parametrize("threaded", [False, True])
def test_a_batch_that_was_not_launched_has_no_result(threaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stops it on the way there: nobody waits for it, and the one before it can be collected."""
    with runner_of(case(), threaded=threaded) as runner:
        static = StaticRows(NUM_BLOCKS, BLOCK_SIZE)
        rows = [static.add([1, 2, 3]), static.add([4, 5])]
        runner.launch(static.batch([(rows[0], 3)]))
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(runner.model, "prepare", Mock(side_effect=MemoryError))
            runner.launch(static.batch([(rows[1], 2)]))
        assert runner.collect().token_ids.tolist() == [int(case().logits([1, 2, 3])[-1].argmax())]
        with pytest.raises(RuntimeError, match="nothing launched"):
            runner.collect()


@every_kind
@pytest.mark.parametrize("threaded", [False, True])
def test_a_failed_batch_leaves_nothing_behind(threaded: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exception keeps no frame that keeps the exception: logits are tens of megabytes, and the collector rests."""
    made: list[weakref.ref[Tensor]] = []

    def forward(*_args: Any) -> Tensor:
        logits = torch.zeros(4)
        made.append(weakref.ref(logits))
        raise ValueError(f"{logits.shape} is told")

    with runner_of(case(), threaded=threaded, kind=kind) as runner:
        static = StaticRows(NUM_BLOCKS, BLOCK_SIZE)
        row = static.add([1, 2, 3])
        monkeypatch.setattr(runner.model, "forward", forward)
        gc.disable()
        try:
            with pytest.raises(ValueError, match="is told"):
                run(runner, static.batch([(row, 3)]))
            assert made[0]() is None
        finally:
            gc.enable()


def test_a_batch_that_was_made_ready_and_never_ran_is_forgotten() -> None:
    """What was made ready counts for that very batch alone."""
    built, static = case(), StaticRows(NUM_BLOCKS, BLOCK_SIZE)
    pool = DevicePool(PoolShape.of(built.config, NUM_BLOCKS, BLOCK_SIZE), torch.float32)
    model = model_of(built, "compiled", pool)
    first = static.batch([(static.add([1, 2, 3]), 3)])
    second = static.batch([(static.add([4, 5]), 2)])
    try:
        for batch in (first, second):
            model.prepare(batch)
        for batch, ids in ((second, [4, 5]), (first, [1, 2, 3]), (second, [4, 5])):
            logits = model.forward(torch.from_numpy(batch.token_ids), batch, pool.tensor)
            torch.testing.assert_close(logits[0], built.logits(ids)[-1], atol=5e-4, rtol=0)
        model.prepare(dataclasses.replace(first, positions=first.positions[:1]))  # what does not fit raises later
    finally:
        model.close()
        pool.close()
