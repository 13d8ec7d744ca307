"""The ledger runner: a model whose KV slots are a ledger, so that any mix-up of blocks, order, position or
staleness shows.

A slot holds (chained hash of all tokens up to it, token, position). Each step the runner reads back every slot that
attention would read and asserts that it is the one of this very sequence. The next token is a function of the chained
hash, so the right output of a request is known beforehand (`expected_tokens`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from pagetier.engine.batch import Batch, StepResult

SLOT = np.dtype([("hash", "<u8"), ("token", "<u4"), ("position", "<u4")])
SEED = 0x9E3779B97F4A7C15
MULTIPLIER = 0xD6E8FEB86659FD93
MASK = (1 << 64) - 1


def chain(previous: int, token: int) -> int:
    """The hash after `token`."""
    x = ((previous ^ (token + 1)) * MULTIPLIER) & MASK
    return x ^ (x >> 32)


def next_token(hash_: int, vocab_size: int) -> int:
    return (hash_ >> 16) % vocab_size


def expected_tokens(prompt: Sequence[int], num_output: int, vocab_size: int) -> list[int]:
    """Prompt and the `num_output` tokens that the ledger model continues it with."""
    tokens, hash_ = list(prompt), SEED
    for token in prompt:
        hash_ = chain(hash_, token)
    for _ in range(num_output):
        tokens.append(next_token(hash_, vocab_size))
        hash_ = chain(hash_, tokens[-1])
    return tokens


class LedgerBlocks:
    """The pool's bytes as the connector sees them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.slots = np.zeros((num_blocks, block_size), SLOT)
        self.poison(range(num_blocks))
        self._bytes = memoryview(self.slots.view(np.uint8).reshape(-1).data)

    @property
    def block_nbytes(self) -> int:
        return int(self.slots.shape[1]) * SLOT.itemsize

    def poison(self, blocks: Sequence[int] | range) -> None:
        self.slots.view(np.uint8).reshape(len(self.slots), -1)[list(blocks)] = 0xFF

    def readable(self, block_id: int) -> memoryview:
        start = block_id * self.block_nbytes
        return self._bytes[start : start + self.block_nbytes]

    def writable(self, block_id: int) -> memoryview:
        return self.readable(block_id)


class LedgerRunner:
    """Implements `Runner`. lazy: a batch runs only when it is collected, the latest moment the engine allows.

    expected: request id -> its token sequence or the beginning of it, to compare every slot with. seed: stands for the
    weights; every slot must have been computed with the present ones.
    """

    def __init__(self, blocks: LedgerBlocks, vocab_size: int, expected: dict[str, list[int]], *, lazy: bool) -> None:
        self.num_slots_checked = 0
        self.seed = SEED
        self._blocks = blocks
        self._vocab_size = vocab_size
        self._expected = {name: np.asarray(tokens, np.uint32) for name, tokens in expected.items()}
        self._lazy = lazy
        self._launched: deque[Batch | StepResult] = deque()
        self._last_sampled = np.zeros(0, np.int64)

    def prefill_s(self, num_new: int, context: int) -> float | None:
        return None

    def launch(self, batch: Batch) -> None:
        assert len(self._launched) < 2, "at most two batches are outstanding"
        self._launched.append(batch if self._lazy else self._run(batch))

    def collect(self) -> StepResult:
        launched = self._launched.popleft()
        return self._run(launched) if isinstance(launched, Batch) else launched

    def close(self) -> None:
        self._launched.clear()

    def _run(self, batch: Batch) -> StepResult:
        slots = self._blocks.slots
        self._blocks.poison(batch.fresh_blocks.tolist())
        for source, destination, num_tokens in batch.copies.tolist():
            slots[destination, :num_tokens] = slots[source, :num_tokens]
        sampled = np.zeros(len(batch.logits_indices), np.int64)
        sample_of = {int(index): i for i, index in enumerate(batch.logits_indices)}
        for row in range(batch.num_rows):
            hash_ = self._run_row(batch, row)
            last = int(batch.query_start_loc[row + 1]) - 1
            if last in sample_of:
                sampled[sample_of[last]] = next_token(hash_, self._vocab_size)
        self._last_sampled = sampled
        differing = tuple(a for a, b in batch.compares.tolist() if not np.array_equal(slots[a], slots[b]))
        return StepResult(batch.step, sampled, (None,) * len(sampled), differing)

    def _run_row(self, batch: Batch, row: int) -> int:
        first, end = int(batch.query_start_loc[row]), int(batch.query_start_loc[row + 1])
        seq_len, name = int(batch.seq_lens[row]), batch.request_ids[row]
        slots, block_size = self._blocks.slots, self._blocks.slots.shape[1]
        table = batch.block_tables[0][row]
        start = seq_len - (end - first)
        hash_ = self.seed if start == 0 else int(self._slot(table, start - 1)["hash"])
        for i in range(first, end):
            source = int(batch.token_sources[i])
            token = int(batch.token_ids[i]) if source < 0 else int(self._last_sampled[source])
            position = start + i - first
            assert batch.positions[i] == position, f"{name}: position {batch.positions[i]}, not {position}"
            block, offset = divmod(int(batch.slot_mapping[0][i]), block_size)
            assert (block, offset) == (table[position // block_size], position % block_size), (
                f"{name}: slot of {position}"
            )
            hash_ = chain(hash_, token)
            slots[block, offset] = (hash_, token, position)
        if block not in batch.compares[:, 0]:  # a shadow row reads what is yet to be trusted
            self._check_row(name, table, seq_len)
        return hash_

    def _slot(self, table: np.ndarray, position: int) -> np.void:
        slots = self._blocks.slots
        slot: np.void = slots[table[position // slots.shape[1]], position % slots.shape[1]]
        return slot

    def _check_row(self, name: str, table: np.ndarray, seq_len: int) -> None:
        """Every slot attention reads is this sequence's: right position, right token, unbroken chain."""
        num_blocks = -(-seq_len // self._blocks.slots.shape[1])
        assert len(set(table[:num_blocks].tolist())) == num_blocks, f"{name}: a block twice in its table"
        read = self._blocks.slots[table[:num_blocks]].reshape(-1)[:seq_len]
        wrong = np.flatnonzero(read["position"] != np.arange(seq_len, dtype=np.uint32))
        assert not len(wrong), f"{name}: slot {wrong[0]} holds position {read['position'][wrong[0]]}"
        expected = self._expected[name][:seq_len]
        wrong = np.flatnonzero(read["token"][: len(expected)] != expected)
        assert not len(wrong), (
            f"{name}: slot {wrong[0]} holds token {read['token'][wrong[0]]}, not {expected[wrong[0]]}"
        )
        previous = np.concatenate([np.asarray([self.seed], np.uint64), read["hash"][:-1]])
        x = (previous ^ (read["token"].astype(np.uint64) + np.uint64(1))) * np.uint64(MULTIPLIER)
        wrong = np.flatnonzero(read["hash"] != x ^ (x >> np.uint64(32)))
        assert not len(wrong), f"{name}: the chain breaks at slot {wrong[0]}"
        self.num_slots_checked += seq_len
