"""Runs batches on a model: copies, forward, sampling, in launch order, on a thread of its own if asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagetier.engine.batch import I32, I64, Batch, SampleRow, StepResult, TokenLogprobs
from pagetier.engine.device_pool import DevicePool
from pagetier.engine.models.config import ModelConfig
from pagetier.engine.sampler import sample

MAX_OUTSTANDING = 2
# Of a block computed in another batch by a model whose rounding depends on the batch: what a wrong block differs by is
# about 1, the noise of another batch some 1e-6, 1e-3 and 1e-2 (random tiny models).
SHADOW_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
Sampler = Callable[[Tensor, Sequence[SampleRow], I64 | None], tuple[I64, tuple[TokenLogprobs | None, ...]]]


class Model(Protocol):
    """What turns a batch into logits: torch modules or the compiled core. Called from one thread."""

    config: ModelConfig
    device: torch.device

    @property
    def numerics(self) -> dict[str, str]:
        """What decides the rounding of K and V besides weights and dtype."""

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a token's K and V are the same to the bit whatever is computed beside it, and in which pieces."""

    @property
    def core_sampler(self) -> Sampler | None:
        """The compiled core's `engine.sampler.sample`. Such a model's `forward` also checks the batch and makes its
        copies. None: torch, for which the runner does all three."""

    def prepare(self, batch: Batch) -> None:
        """Make ready what of a batch does not wait for the one before, which may be running. Called before `forward`,
        in its order, from another thread if the runner has one. Raises nothing."""

    def forward(self, token_ids: Tensor, batch: Batch, pool: Tensor) -> Tensor:
        """Runs the batch's tokens, writes their K and V, returns float32 logits (num_samples, vocab_size).

        token_ids: (num_tokens,) int64, or int32 for the compiled core, token sources resolved. pool: the device pool's
        tensor.
        """

    def prefill_s(self, num_new: int, context: int) -> float | None:
        """Seconds that the prefill of `num_new` tokens after `context` known ones takes; None: not known. Called from
        any thread."""

    def close(self) -> None:
        """Let go of threads. Idempotent."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A batch whose token ids are known but for those at `sourced`, which sample rows `sources` of the batch before
    yield."""

    batch: Batch
    token_ids: I32 | I64  # (num_tokens,) its own; int32 for the compiled core
    tensor: Tensor  # over the same memory
    sourced: I64
    sources: I32


class ModelRunner:
    """Implements `runner.base.Runner` and owns the pool. One KV group.

    threaded: `launch` returns at once and a thread runs the batches one after the other, so that step N+1 is planned
    while step N runs. Without it `launch` does the work. Tokens and KV are the same. paranoid: poison fresh blocks.
    Called from the core thread only.
    """

    def __init__(self, model: Model, pool: DevicePool, *, threaded: bool, paranoid: bool = False) -> None:
        self.model = model
        self.pool = pool
        self._paranoid = paranoid
        self._num_outstanding = 0
        self._previous: I64 | None = None  # tokens of the last batch that ran; owner: whoever runs batches
        self._batches: SimpleQueue[Launched | None] = SimpleQueue()
        self._results: SimpleQueue[StepResult | BaseException] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        if threaded:
            self._thread = threading.Thread(target=self._run_batches, name="pagetier-runner", daemon=True)
            self._thread.start()

    def prefill_s(self, num_new: int, context: int) -> float | None:
        """Seconds that the prefill of `num_new` tokens after `context` known ones takes here; None: not known."""
        return self.model.prefill_s(num_new, context)

    def launch(self, batch: Batch) -> None:
        """Start a batch. Its faults, bad ids included, are raised by its `collect`."""
        assert not self._closed, "launch after close"
        assert self._num_outstanding < MAX_OUTSTANDING, "more than two batches outstanding"
        is_torch = self.model.core_sampler is None
        token_ids: I32 | I64 = batch.token_ids.astype(np.int64) if is_torch else batch.token_ids.copy()
        sourced = np.flatnonzero(batch.token_sources >= 0)
        launched = Launched(batch, token_ids, torch.from_numpy(token_ids), sourced, batch.token_sources[sourced])
        self.model.prepare(batch)
        self._num_outstanding += 1  # from here on there will be a result
        if self._thread is None:
            self._results.put(self._outcome(launched))
        else:
            self._batches.put(launched)

    def collect(self) -> StepResult:
        """Wait for the oldest launched batch. Raises what the batch raised."""
        if not self._num_outstanding:  # no assert: after a failed launch the core collects what there may be
            raise RuntimeError("nothing launched")
        result = self._results.get()
        self._num_outstanding -= 1
        if isinstance(result, BaseException):
            try:
                raise result
            finally:
                del result  # else exception and frame keep each other, and all that the batch had made
        return result

    def close(self) -> None:
        """Let launched batches end, end the thread, free the pool. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._batches.put(None)
            self._thread.join()
        self.model.close()
        self.pool.close()

    def _run_batches(self) -> None:
        while (launched := self._batches.get()) is not None:
            self._results.put(self._outcome(launched))

    def _outcome(self, launched: Launched) -> StepResult | BaseException:
        """The batch's result, or what it raised: an exception must reach `collect`, on whichever thread it was born."""
        try:
            return self._run(launched)
        except Exception as error:
            self._previous = None  # a batch that builds on this one's tokens fails too, instead of using stale ones
            return error

    def _run(self, launched: Launched) -> StepResult:
        batch, core_sampler = launched.batch, self.model.core_sampler
        self._resolve_tokens(launched)
        self._check_unseen(batch)
        if core_sampler is None:
            tokens, logprobs = self._run_torch(launched)
        else:  # such a model checks the batch and makes its copies itself
            self._poison(batch)
            logits = self.model.forward(launched.tensor, batch, self.pool.tensor)  # (num_samples, vocab_size)
            tokens, logprobs = core_sampler(logits, batch.samples, self._previous)
        self._previous = tokens
        return StepResult(batch.step, tokens, logprobs, self._differing(batch))

    @torch.inference_mode()
    def _run_torch(self, launched: Launched) -> tuple[I64, tuple[TokenLogprobs | None, ...]]:
        batch, device = launched.batch, self.model.device
        self._check_seen(batch, launched.token_ids)
        self._poison(batch)
        self.pool.copy_slots(batch.copies)
        logits = self.model.forward(launched.tensor.to(device), batch, self.pool.tensor)  # (num_samples, vocab_size)
        tokens, logprobs = sample(logits, batch.samples, self._previous)
        if device.type == "cuda":  # a batch without samples, a chunk of a prompt, has waited for nothing yet
            torch.cuda.current_stream(device).synchronize()
        return tokens, logprobs

    def _poison(self, batch: Batch) -> None:
        if self._paranoid:
            self.pool.poison(batch.fresh_blocks.tolist())

    def _differing(self, batch: Batch) -> tuple[int, ...]:
        if not len(batch.compares):
            return ()
        tolerance = 0.0 if self.model.is_batch_invariant else SHADOW_TOLERANCE[self.pool.tensor.dtype]
        return tuple(a for a, b in batch.compares.tolist() if self.pool.differ(a, b, tolerance))

    def _resolve_tokens(self, launched: Launched) -> None:
        """Fill in the ids that the previous batch sampled."""
        if len(launched.sourced):
            if self._previous is None:
                raise RuntimeError(f"step {launched.batch.step} continues tokens of a previous batch, which has none")
            launched.token_ids[launched.sourced] = self._previous[launched.sources]

    def _check_unseen(self, batch: Batch) -> None:
        """Refuse what no model looks at."""
        num_blocks = self.pool.shape.num_blocks
        if not (_within(batch.fresh_blocks, num_blocks) and _within(batch.compares, num_blocks)):
            raise ValueError(f"step {batch.step}: fresh_blocks or compares outside {num_blocks} blocks")
        if len(batch.samples) != len(batch.logits_indices):
            raise ValueError(f"step {batch.step}: {len(batch.samples)} samples of {len(batch.logits_indices)} logits")

    def _check_seen(self, batch: Batch, token_ids: I32 | I64) -> None:
        """Refuse what would read or write outside the pool: the kernels behind torch's views do not all check."""
        if not _within(token_ids, self.model.config.vocab_size):
            raise ValueError(f"step {batch.step}: a token id outside the vocabulary of {self.model.config.vocab_size}")
        num_blocks, block_size = self.pool.shape.num_blocks, self.pool.shape.block_size
        num_slots = num_blocks * block_size
        table = batch.block_tables[0]
        for name, ok in (
            (
                "slot_mapping",
                _within(batch.slot_mapping[0], num_slots) and len(batch.slot_mapping[0]) == batch.num_tokens,
            ),
            ("block_tables", _within(table, num_blocks) and len(table) == batch.num_rows),
            ("seq_lens", _within(batch.seq_lens - 1, max(1, table.shape[1] * block_size))),
            ("query_start_loc", int(batch.query_start_loc[-1]) == batch.num_tokens > 0),
            ("positions", _within(batch.positions, max(1, table.shape[1] * block_size))),
            ("logits_indices", _within(batch.logits_indices, batch.num_tokens)),
            ("copies", _within(batch.copies[:, :2], num_blocks) and _within(batch.copies[:, 2], block_size + 1)),
        ):
            if not ok:
                raise ValueError(f"step {batch.step}: {name} does not fit {num_blocks} blocks of {block_size} tokens")


def _within(values: np.typing.NDArray[np.integer], end: int) -> bool:
    """Whether all values are in [0, end)."""
    return not values.size or (int(values.min()) >= 0 and int(values.max()) < end)
