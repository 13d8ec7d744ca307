"""What the runner is given for one step and what it gives back. Arrays and ids only; an argument, never a global."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagetier.engine.sampling_params import SamplingParams

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


class SampleRow(NamedTuple):
    """How to choose the next token after one logits row.

    position: of the token to be chosen (0-based in the sequence); with `seed` and `choice` it names the random number.
    prompt_ids and output_ids are set only when `params.has_penalties`; `pending` says that the row of the previous
    step whose token also belongs to the output but was not known at planning (-1: none). is_plain: known to be the best
    token of the logits as they are, and nothing else is asked for; False when nobody has looked.
    """

    params: SamplingParams
    seed: int
    choice: int
    position: int
    num_output: int
    eos_token_ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    pending: int = -1
    is_plain: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work for the runner: rows (requests) of new tokens, prefill and decode alike.

    token_ids: (num_tokens,) ids, meaningless where token_sources >= 0.
    token_sources: (num_tokens,) -1, or r: the token sampled for sample row r of the *previous launched* batch.
    positions: (num_tokens,) absolute.
    query_start_loc: (num_rows + 1,) row i owns tokens [query_start_loc[i], query_start_loc[i+1]).
    seq_lens: (num_rows,) context length *after* this step (cached + new tokens).
    slot_mapping: per KV group (num_tokens,) block_id * block_size + offset where a token's KV is written.
    block_tables: per KV group (num_rows, max_blocks) block ids; unused entries are 0 and never read.
    logits_indices: (num_samples,) indices into tokens whose logits are wanted.
    samples: one SampleRow per logits index.
    copies: (num_copies, 3) (source block, destination block, num_tokens): the first num_tokens slots of every layer
    and
        plane are copied before anything else of the step runs.
    fresh_blocks: block ids allocated since the last step; `--paranoid` runners poison them first, so that a slot read
        before it is written shows. Blocks that a load filled are not among them.
    request_ids: one per row; for diagnostics and the ledger only.
    compares: (num_compares, 2) (block computed by this step, block that must hold the same), compared when all else of
        the step is done.
    tiers_busy: blocks are on their way to or from lower tiers, whose threads need a core.
    """

    step: int
    token_ids: I32
    token_sources: I32
    positions: I32
    query_start_loc: I32
    seq_lens: I32
    slot_mapping: tuple[I64, ...]
    block_tables: tuple[I32, ...]
    logits_indices: I32
    samples: tuple[SampleRow, ...]
    copies: I32
    fresh_blocks: I32
    request_ids: tuple[str, ...]
    compares: I32 = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    tiers_busy: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one sampled token: its own, its rank (1-based), and the top alternatives, best first.

    Taken from the model's raw distribution (before temperature and penalties), as vLLM's default does.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """token_ids: (num_samples,) int64; logprobs: one per sample row, None where not asked for. differing: those blocks
    computed by the step that are not what they were compared with."""

    step: int
    token_ids: I64
    logprobs: tuple[TokenLogprobs | None, ...]
    differing: tuple[int, ...] = ()
