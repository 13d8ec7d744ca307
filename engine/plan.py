"""A step as the scheduler plans it (counts and ids), and its translation into the arrays of a `Batch`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pagetier.engine.batch import I32, I64, Batch, SampleRow
from pagetier.engine.request import Request


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """Compute tokens [start, end) of `request`; `sample` is its sample row in the batch, -1 if no token is chosen.

    epoch: the request's at planning; a different one at commit means that its KV was given up in between.
    pending_row: the previous step's sample row whose token is this row's last input, -1 if all inputs are known.
    """

    request: Request
    start: int
    end: int
    sample: int
    epoch: int
    pending_row: int


@dataclass(slots=True)
class StepPlan:
    """One step. `release_after`: blocks to release once the step is collected: copy sources, and what requests that
    ended or were preempted meanwhile held."""

    step: int
    rows: list[PlannedRow] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    fresh_blocks: list[int] = field(default_factory=list)
    release_after: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.end - row.start for row in self.rows)


def build_batch(plan: StepPlan, block_size: int, num_groups: int) -> Batch:
    """The arrays of `plan`. All KV groups share the block ids of a sequence."""
    num_rows, num_tokens = len(plan.rows), plan.num_tokens
    query_start_loc: I32 = np.zeros(num_rows + 1, np.int32)
    token_ids: I32 = np.zeros(num_tokens, np.int32)
    token_sources: I32 = np.full(num_tokens, -1, np.int32)
    positions: I32 = np.empty(num_tokens, np.int32)
    slots: I64 = np.empty(num_tokens, np.int64)
    num_blocks = [-(-row.end // block_size) for row in plan.rows]
    table: I32 = np.zeros((num_rows, max(num_blocks)), np.int32)
    logits_indices: list[int] = []
    samples: list[SampleRow] = []
    at = 0
    for i, row in enumerate(plan.rows):
        to = at + row.end - row.start
        known = row.request.token_ids(row.start, row.end)
        token_ids[at : at + len(known)] = known
        if row.pending_row >= 0:
            token_sources[to - 1] = row.pending_row
        positions[at:to] = np.arange(row.start, row.end, dtype=np.int32)
        table[i, : num_blocks[i]] = row.request.block_ids[: num_blocks[i]]
        slots[at:to] = table[i, positions[at:to] // block_size] * np.int64(block_size) + positions[at:to] % block_size
        if row.sample >= 0:
            logits_indices.append(to - 1)
            samples.append(_sample_row(row))
        query_start_loc[i + 1] = at = to
    return Batch(
        step=plan.step,
        token_ids=token_ids,
        token_sources=token_sources,
        positions=positions,
        query_start_loc=query_start_loc,
        seq_lens=np.asarray([row.end for row in plan.rows], np.int32),
        slot_mapping=(slots,) * num_groups,
        block_tables=(table,) * num_groups,
        logits_indices=np.asarray(logits_indices, np.int32),
        samples=tuple(samples),
        copies=np.asarray(plan.copies, np.int32).reshape(-1, 3),
        fresh_blocks=np.asarray(plan.fresh_blocks, np.int32),
        request_ids=tuple(row.request.request_id for row in plan.rows),
    )


def _sample_row(row: PlannedRow) -> SampleRow:
    spec, request = row.request.spec, row.request
    penalties = spec.params.has_penalties
    num_prompt = request.num_prompt_tokens
    return SampleRow(
        params=spec.params,
        seed=spec.seed,
        choice=spec.choice,
        position=row.end,
        num_output=row.end - num_prompt,
        eos_token_ids=spec.eos_token_ids,
        prompt_ids=spec.prompt_ids if penalties else (),
        output_ids=tuple(request.token_ids(num_prompt, request.num_known_tokens).tolist()) if penalties else (),
        pending=row.pending_row,
    )
