"""The row on batch invariance: logits of the same tokens, bit by bit, in other batches, chunks, blocks and threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagetier.benchmarks.report import Row
from pagetier.benchmarks.rig import Rig, Setup, Weights, open_rig
from pagetier.benchmarks.static_rows import Row as Sequence_
from pagetier.benchmarks.static_rows import StaticRows
from pagetier.benchmarks.workload import FIRST_ORDINARY_ID

NUM_BLOCKS = 2048
PREFIX_TOKENS = 32  # of a row that starts on another row's blocks


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How the same prompts are computed. chunk: the most new tokens of a row in a step; rows: the most rows."""

    threads: int = 1
    block_size: int = 16
    rows: int = 1
    chunk: int = 512
    hit: bool = False


ALONE = Arrangement()
QUICK = (
    Arrangement(threads=2, rows=64, chunk=512),
    Arrangement(threads=4, block_size=32, rows=7, chunk=5),
    Arrangement(threads=3, rows=16, chunk=64, hit=True),
)
FULL = (
    *QUICK,
    Arrangement(threads=1, block_size=8, rows=2, chunk=1),
    Arrangement(threads=2, block_size=64, rows=3, chunk=17),
    Arrangement(threads=3, block_size=16, rows=33, chunk=31, hit=True),
    Arrangement(threads=4, block_size=8, rows=64, chunk=100, hit=True),
    Arrangement(threads=1, block_size=16, rows=64, chunk=16),
)


def prompts(num_rows: int, vocab_size: int) -> list[list[int]]:
    """Of 33 to some 200 tokens; all different."""
    draw = np.random.default_rng(0)
    return [draw.integers(FIRST_ORDINARY_ID, vocab_size, 33 + (index * 37) % 170).tolist() for index in range(num_rows)]


def invariance_row(weights: Weights, num_rows: int, arrangements: Sequence[Arrangement], note: str) -> Row:
    """How many rows of logits differ in any bit from those of their prompt alone on one thread."""
    token_ids = prompts(num_rows, weights.config.vocab_size)
    alone = last_logits(weights, token_ids, ALONE)
    differing = sum(
        not torch.equal(ours, theirs)
        for arrangement in arrangements
        for ours, theirs in zip(last_logits(weights, token_ids, arrangement), alone, strict=True)
    )
    how = f"of {num_rows * len(arrangements)}, under {len(arrangements)} arrangements"
    name = f"batch_invariance_{weights.dtype}"
    return Row(name, float(differing), "rows", "== 0", runs=1, note=f"{how}; {note}" if note else how)


def last_logits(weights: Weights, token_ids: Sequence[list[int]], arrangement: Arrangement) -> list[Tensor]:
    """Of every prompt (vocab_size,): the logits after its last token."""
    setup = Setup(threads=arrangement.threads, num_blocks=NUM_BLOCKS, block_size=arrangement.block_size)
    logits: dict[int, Tensor] = {}
    with open_rig(weights, setup) as rig:
        static = StaticRows(NUM_BLOCKS, arrangement.block_size, np.random.default_rng(arrangement.threads))
        rows = [static.add(ids) for ids in token_ids]
        if arrangement.hit:
            _lend_prefixes(rig, static, rows)
        for work in steps(rows, arrangement):
            batch = static.batch(work)
            found = rig.model.forward(torch.from_numpy(batch.token_ids), batch, rig.pool.tensor)  # (num_samples, vocab)
            ended = [row for row, _ in work if row.num_computed == len(row.token_ids)]
            for row, values in zip(ended, found, strict=True):
                logits[id(row)] = values.clone()
    return [logits[id(row)] for row in rows]


def steps(rows: Sequence[Sequence_], arrangement: Arrangement) -> Iterator[list[tuple[Sequence_, int]]]:
    """What each step computes: up to `rows` rows that are not done, the latest first, within the token budget."""
    while left := [row for row in reversed(rows) if row.num_computed < len(row.token_ids)]:
        budget, work = 512, []
        for row in left[: arrangement.rows]:
            num_new = min(arrangement.chunk, len(row.token_ids) - row.num_computed, budget)
            if num_new:
                work.append((row, num_new))
                budget -= num_new
        yield work


def _lend_prefixes(rig: Rig, static: StaticRows, rows: Sequence[Sequence_]) -> None:
    """Give every row blocks of a prefix that another request has computed, as a hit in the prefix cache does."""
    lenders = [static.add(row.token_ids[:PREFIX_TOKENS]) for row in rows]
    for first in range(0, len(lenders), 8):
        batch = static.batch([(row, PREFIX_TOKENS) for row in lenders[first : first + 8]])
        rig.model.forward(torch.from_numpy(batch.token_ids), batch, rig.pool.tensor)
    for row, lender in zip(rows, lenders, strict=True):
        row.blocks, row.num_computed = list(lender.blocks), PREFIX_TOKENS
