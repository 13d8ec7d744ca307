"""The ledger runner: a model whose KV slots are a ledger, so that any mix-up of blocks, order, position or
staleness shows.

A slot holds (chained hash of all tokens up to it, token, position). Each step the runner reads back every slot that
attention would read and asserts that it is the one of this very sequence. The next token is a function of the chained
hash, so the right output of a request is known beforehand (`expected_tokens`).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence

import numpy as np

from pagetier.engine.batch import Batch, StepResult

SLOT = np.dtype([("hash", "<u8"), ("token", "<u4"), ("position", "<u4")])
PACKED_SLOT = struct.Struct("<QII")  # a `SLOT`; for one at a time, quicker than numpy
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
        self.slots = np.full((num_blocks, block_size), -1, "<i8, <i8").view(SLOT)
        self._rows = self.slots.view(np.uint8).reshape(num_blocks, -1)
        self._bytes = memoryview(self._rows.reshape(-1).data)

    @property
    def block_nbytes(self) -> int:
        return int(self.slots.shape[1]) * SLOT.itemsize

    def poison(self, blocks: Sequence[int] | range) -> None:
        if len(blocks):
            self._rows[list(blocks)] = 0xFF

    def read_slot(self, slot: int) -> tuple[int, int, int]:
        """Hash, token and position in a slot; `slot` counts through all blocks."""
        return PACKED_SLOT.unpack_from(self._bytes, slot * SLOT.itemsize)

    def write_slot(self, slot: int, hash_: int, token: int, position: int) -> None:
        PACKED_SLOT.pack_into(self._bytes, slot * SLOT.itemsize, hash_, token, position)

    def joined(self, block_ids: np.ndarray) -> bytes:
        """The bytes of these blocks, one after the other."""
        return bytes(self._rows[block_ids].data)

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
        self._right: dict[tuple[str, int], bytes] = {}
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
        sample_of = {index: i for i, index in enumerate(batch.logits_indices.tolist())}
        for row, last in enumerate((batch.query_start_loc[1:] - 1).tolist()):
            hash_ = self._run_row(batch, row)
            if last in sample_of:
                sampled[sample_of[last]] = next_token(hash_, self._vocab_size)
        self._last_sampled = sampled
        differing = tuple(a for a, b in batch.compares.tolist() if not np.array_equal(slots[a], slots[b]))
        return StepResult(batch.step, sampled, (None,) * len(sampled), differing)

    def _run_row(self, batch: Batch, row: int) -> int:
        first, end = batch.query_start_loc[row : row + 2].tolist()
        seq_len, name = int(batch.seq_lens[row]), batch.request_ids[row]
        block_size = self._blocks.slots.shape[1]
        table = batch.block_tables[0][row]
        blocks = table.tolist()
        position = seq_len - (end - first)
        hash_ = self.seed
        if position:
            hash_ = self._blocks.read_slot(
                blocks[(position - 1) // block_size] * block_size + (position - 1) % block_size
            )[0]
        tokens, sources = batch.token_ids[first:end].tolist(), batch.token_sources[first:end].tolist()
        positions, slots = batch.positions[first:end].tolist(), batch.slot_mapping[0][first:end].tolist()
        for token, source, told, slot in zip(tokens, sources, positions, slots, strict=True):
            if source >= 0:
                token = int(self._last_sampled[source])
            assert told == position, f"{name}: position {told}, not {position}"
            assert slot == blocks[position // block_size] * block_size + position % block_size, (
                f"{name}: slot of {position}"
            )
            hash_ = chain(hash_, token)
            self._blocks.write_slot(slot, hash_, token, position)
            position += 1
        if not len(batch.compares) or slots[-1] // block_size not in batch.compares[:, 0]:
            self._check_row(name, table, seq_len)  # but a shadow row reads what is yet to be trusted
        return hash_

    def _check_row(self, name: str, table: np.ndarray, seq_len: int) -> None:
        """Every slot attention reads is this sequence's: right position, right token, unbroken chain."""
        table = table[: -(-seq_len // self._blocks.slots.shape[1])]
        assert len(set(table.tolist())) == len(table), f"{name}: a block twice in its table"
        size = seq_len * SLOT.itemsize
        right = self._right_bytes(name)
        if len(right) < size or self._blocks.joined(table)[:size] != right[:size]:
            self._check_slots(name, self._blocks.slots[table].reshape(-1)[:seq_len])
        self.num_slots_checked += seq_len

    def _right_bytes(self, name: str) -> bytes:
        """What the slots of the known tokens hold, computed with the present weights."""
        right = self._right.get((name, self.seed))
        if right is None:
            hash_, slots = self.seed, []
            for position, token in enumerate(self._expected[name].tolist()):
                hash_ = chain(hash_, token)
                slots.append(PACKED_SLOT.pack(hash_, token, position))
            right = self._right[name, self.seed] = b"".join(slots)
        return right

    def _check_slots(self, name: str, read: np.ndarray) -> None:
        """The same slot by slot: names the first wrong one, and does not need to know the tokens."""
        wrong = np.flatnonzero(read["position"] != np.arange(len(read), dtype=np.uint32))
        assert not len(wrong), f"{name}: slot {wrong[0]} holds position {read['position'][wrong[0]]}"
        expected = self._expected[name][: len(read)]
        wrong = np.flatnonzero(read["token"][: len(expected)] != expected)
        assert not len(wrong), (
            f"{name}: slot {wrong[0]} holds token {read['token'][wrong[0]]}, not {expected[wrong[0]]}"
        )
        previous = np.concatenate([np.asarray([self.seed], np.uint64), read["hash"][:-1]])
        x = (previous ^ (read["token"].astype(np.uint64) + np.uint64(1))) * np.uint64(MULTIPLIER)
        wrong = np.flatnonzero(read["hash"] != x ^ (x >> np.uint64(32)))
        assert not len(wrong), f"{name}: the chain breaks at slot {wrong[0]}"
