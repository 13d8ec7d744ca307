"""Batches by hand: rows with fixed blocks and chosen chunks, for tests and benchmarks that need no scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pagetier.engine.batch import Batch, SampleRow
from pagetier.engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Row:
    """One sequence. source: sample row of the previous batch that its next token is, where that token is not known."""

    token_ids: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    params: SamplingParams = GREEDY
    source: int = -1


class StaticRows:
    """Gives rows their blocks, in a random order if `rng` is given, and builds batches. Blocks are never freed."""

    def __init__(self, num_blocks: int, block_size: int, rng: np.random.Generator | None = None) -> None:
        self.block_size = block_size
        self.rows: list[Row] = []
        order = np.arange(num_blocks) if rng is None else rng.permutation(num_blocks)
        self._free: list[int] = order.tolist()[::-1]
        self._step = 0

    def add(self, token_ids: Sequence[int], params: SamplingParams = GREEDY) -> Row:
        """A new row with nothing computed."""
        row = Row(list(token_ids), params=params)
        self.rows.append(row)
        return row

    def take_block(self) -> int:
        """A free block, for a row whose table is built by hand."""
        return self._free.pop()

    def batch(self, work: Sequence[tuple[Row, int]], *, all_logits: bool = False) -> Batch:
        """One step that computes `num_new` further tokens of each row, and counts them as computed.

        Samples after a row's last token, or with `all_logits` after every token. A row with a `source` takes its last
        token from there.
        """
        starts = np.cumsum([0] + [num_new for _, num_new in work], dtype=np.int32)
        token_ids, sources, positions, slots = (np.zeros(starts[-1], np.int64) for _ in range(4))
        sources[:] = -1
        logits_indices: list[int] = []
        samples: list[SampleRow] = []
        fresh: list[int] = []
        for (row, num_new), start in zip(work, starts.tolist(), strict=False):
            end, first = start + num_new, row.num_computed
            row.num_computed += num_new
            while len(row.blocks) * self.block_size < row.num_computed:
                fresh.append(self.take_block())
                row.blocks.append(fresh[-1])
            at = np.arange(first, row.num_computed)
            positions[start:end] = at
            slots[start:end] = np.array(row.blocks)[at // self.block_size] * self.block_size + at % self.block_size
            known = row.token_ids[first : row.num_computed]
            token_ids[start : start + len(known)] = known
            if len(known) < num_new:
                sources[end - 1] = row.source
            sampled = range(start, end) if all_logits else range(end - 1, end)
            if all_logits or row.num_computed >= len(row.token_ids):
                logits_indices += sampled
                samples += [SampleRow(row.params, 0, 0, int(positions[i]) + 1, 0) for i in sampled]
        table = np.zeros((len(work), max(len(row.blocks) for row, _ in work)), np.int32)
        for index, (row, _) in enumerate(work):
            table[index, : len(row.blocks)] = row.blocks
        self._step += 1
        return Batch(
            step=self._step,
            token_ids=token_ids.astype(np.int32),
            token_sources=sources.astype(np.int32),
            positions=positions.astype(np.int32),
            query_start_loc=starts,
            seq_lens=np.array([row.num_computed for row, _ in work], np.int32),
            slot_mapping=(slots,),
            block_tables=(table,),
            logits_indices=np.array(logits_indices, np.int32),
            samples=tuple(samples),
            copies=np.zeros((0, 3), np.int32),
            fresh_blocks=np.array(fresh, np.int32),
            request_ids=tuple(str(index) for index in range(len(work))),
        )
