"""A step as the scheduler plans it (counts and ids), and its translation into the arrays of a `Batch`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pagetier.engine.batch import I32, I64, Batch, SampleRow
from pagetier.engine.request import Request


class PlannedRow(NamedTuple):
    """Compute tokens [start, end) of `request`; `sample` is its sample row in the batch, -1 if no token is chosen.

    epoch: the request's at planning; a different one at commit means that its KV was given up in between.
    pending_row: the previous step's sample row whose token is this row's last input, -1 if all inputs are known.
    scratch: of a row that computes one whole block for a shadow check, where that goes instead of the request's own
    block; -1 for all others.
    """

    request: Request
    start: int
    end: int
    sample: int
    epoch: int
    pending_row: int
    scratch: int = -1


@dataclass(slots=True)
class StepPlan:
    """One step. `release_after`: blocks to release once the step is collected: copy sources, and what requests that
    ended or were preempted meanwhile held. num_tokens, num_samples: of the rows so far. shadow_rows: indices of those
    with a scratch block."""

    step: int
    rows: list[PlannedRow] = field(default_factory=list)
    num_tokens: int = 0
    num_samples: int = 0
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    fresh_blocks: list[int] = field(default_factory=list)
    release_after: list[int] = field(default_factory=list)
    tiers_busy: bool = False
    shadow_rows: list[int] = field(default_factory=list)

    def add(self, row: PlannedRow) -> None:
        self.rows.append(row)
        self.num_tokens += row.end - row.start
        self.num_samples += row.sample >= 0


def build_batch(plan: StepPlan, block_size: int, num_groups: int) -> Batch:
    """The arrays of `plan`. All KV groups share the block ids of a sequence."""
    rows = plan.rows
    starts = np.array([row.start for row in rows], np.int32)
    ends = np.array([row.end for row in rows], np.int32)
    lengths = ends - starts
    query_start_loc: I32 = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lengths, out=query_start_loc[1:])
    last = query_start_loc[1:] - 1  # (num_rows,) each row's last token
    row_of = np.repeat(np.arange(len(rows)), lengths)  # (num_tokens,)
    positions: I32 = np.arange(plan.num_tokens, dtype=np.int32) + (starts - query_start_loc[:-1])[row_of]
    token_sources: I32 = np.full(plan.num_tokens, -1, np.int32)
    token_sources[last] = [row.pending_row for row in rows]
    table = _block_table(rows, -(-ends // block_size))
    compares = _redirect(plan, table, block_size)
    slots: I64 = table[row_of, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return Batch(
        step=plan.step,
        token_ids=_token_ids(rows, query_start_loc),
        token_sources=token_sources,
        positions=positions,
        query_start_loc=query_start_loc,
        seq_lens=ends,
        slot_mapping=(slots,) * num_groups,
        block_tables=(table,) * num_groups,
        logits_indices=last[[row.sample >= 0 for row in rows]],
        samples=tuple(_sample_row(row) for row in rows if row.sample >= 0),
        copies=np.asarray(plan.copies, np.int32).reshape(-1, 3),
        fresh_blocks=np.asarray(plan.fresh_blocks, np.int32),
        request_ids=tuple(row.request.request_id for row in rows),
        tiers_busy=plan.tiers_busy,
        compares=compares,
    )


def _redirect(plan: StepPlan, table: I32, block_size: int) -> I32:
    """Let shadow rows write to their scratch blocks. (num_compares, 2) each such block and the request's own."""
    pairs: I32 = np.empty((len(plan.shadow_rows), 2), np.int32)
    for pair, i in zip(pairs, plan.shadow_rows, strict=True):
        row = plan.rows[i]
        block = row.start // block_size
        pair[:] = row.scratch, row.request.block_ids[block]
        table[i, block] = row.scratch
    return pairs


def _block_table(rows: list[PlannedRow], num_blocks: I32) -> I32:
    """(num_rows, most blocks of a row); unused entries are 0."""
    table: I32 = np.zeros((len(rows), int(num_blocks.max())), np.int32)
    for i, (row, count) in enumerate(zip(rows, num_blocks.tolist(), strict=True)):
        table[i, :count] = row.request.block_array(count)
    return table


def _token_ids(rows: list[PlannedRow], query_start_loc: I32) -> I32:
    """(num_tokens,) the known ids; 0 where a token is still on its way."""
    token_ids: I32 = np.zeros(int(query_start_loc[-1]), np.int32)
    for row, at in zip(rows, query_start_loc.tolist(), strict=False):
        known = row.request.token_ids(row.start, row.end)
        token_ids[at : at + len(known)] = known
    return token_ids


def _sample_row(row: PlannedRow) -> SampleRow:
    spec, request = row.request.spec, row.request
    penalties = spec.params.has_penalties
    num_prompt = request.num_prompt_tokens
    return SampleRow(
        spec.params,
        spec.seed,
        spec.choice,
        row.end,
        row.end - num_prompt,
        spec.eos_token_ids,
        spec.prompt_ids if penalties else (),
        tuple(request.token_ids(num_prompt, request.num_known_tokens).tolist()) if penalties else (),
        row.pending_row,
        request.is_plain,
    )
