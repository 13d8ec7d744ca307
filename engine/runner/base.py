"""The runner seam: a batch goes in, sampled tokens come out. Torch, the ledger of the tests, and later cores keep
it.
"""

from __future__ import annotations

from typing import Protocol

from pagetier.engine.batch import Batch, StepResult


class Runner(Protocol):
    """Runs batches strictly in launch order and owns the device pool.

    The pool of KV group g holds `num_blocks` blocks of `block_nbytes(g)` bytes, each contiguous. At most two
    batches are outstanding (launched, not collected). When `collect` returns, every KV byte of that batch is in the
    pool.
    """

    def prefill_s(self, num_new: int, context: int) -> float | None:
        """Seconds that the prefill of `num_new` tokens after `context` known ones takes here; None: not known."""

    def launch(self, batch: Batch) -> None:
        """Start a batch. Does not wait for it where the runner has a thread or stream of its own."""

    def collect(self) -> StepResult:
        """Wait for the oldest launched batch. Raises what the batch raised."""

    def close(self) -> None:
        """End threads, free the pool. Idempotent."""
