"""One sequence as the scheduler sees it: its tokens, how far its KV is, and the blocks it holds."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import numpy as np

from pagetier.engine.batch import I32, TokenLogprobs
from pagetier.engine.messages import EngineRequest, TokenOutput
from pagetier.engine.prefix_index import Node
from pagetier.kvstore.block import KEY_BYTES, TOKEN_BYTES, BlockName
from pagetier.kvstore.keys import Hash, block_key, chain_names, pack_tokens


class RequestState(StrEnum):
    WAITING = "waiting"
    LOADING = "loading"  # holds blocks that a lower tier is filling, or that are checked after that
    RUNNING = "running"
    FINISHED = "finished"


class Following(NamedTuple):
    """Wait until `leader`, in its present `epoch`, has computed its first `num_tokens` tokens."""

    leader: Request
    epoch: int
    num_tokens: int


class Request:
    """Mutable; owner: core thread.

    `num_tokens` counts the known tokens plus placeholders: tokens that launched steps will sample.
    `num_computed_tokens` runs ahead to what launched steps will have computed; `num_committed_tokens` is what
    collected steps did compute and whose tokens are accepted: only these slots may be keyed, indexed or saved.
    `epoch` rises at each preemption, so that results of steps launched before it no longer count as KV.
    """

    __slots__ = (
        "_buffer",
        "_packed_prompt",
        "_table",
        "block_ids",
        "cached_tokens",
        "counted",
        "epoch",
        "finish_reason",
        "following",
        "is_plain",
        "job",
        "lookup_first",
        "lookup_tiers",
        "lookup_tries",
        "max_tokens",
        "names",
        "num_committed_tokens",
        "num_computed_tokens",
        "num_in_flight",
        "num_indexed_blocks",
        "num_known_tokens",
        "num_lost_tokens",
        "num_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tabled_blocks",
        "order",
        "passed_since_s",
        "preempted_by",
        "root",
        "sampled_row",
        "sampled_step",
        "skips_tiers",
        "spec",
        "state",
        "ticket",
        "tip",
    )

    def __init__(self, spec: EngineRequest, order: int, root: bytes, block_size: int, hash_: Hash) -> None:
        self.spec = spec
        self.order = order
        self.root = root
        self.state = RequestState.WAITING
        self.finish_reason: str | None = None
        self.num_prompt_tokens = self.num_known_tokens = len(spec.prompt_ids)
        self.is_plain = spec.params.is_plain
        self.max_tokens = self.num_prompt_tokens + (spec.params.max_tokens or 1 << 60)  # of prompt and output together
        self._buffer: I32 = np.empty(self.num_known_tokens + 64, np.int32)
        self._buffer[: self.num_known_tokens] = spec.prompt_ids
        self._packed_prompt = pack_tokens(self._buffer[: self.num_known_tokens])
        self.names = _prompt_names(spec, self._packed_prompt, root, block_size, hash_)
        self.num_placeholders = 0
        self.num_computed_tokens = 0
        self.num_committed_tokens = 0
        self.num_in_flight = 0
        self.epoch = 0
        self.sampled_step = -1  # the launched step, and its sample row, that yields the pending placeholder
        self.sampled_row = -1
        self.block_ids: list[int] = []
        self._table: I32 = np.empty(8, np.int32)
        self.num_tabled_blocks = 0  # leading block_ids that `_table` has; lower it to where block_ids change
        self.num_indexed_blocks = 0
        self.tip: Node | None = None
        self.ticket: int | None = None  # of the lookup in progress or answered
        self.lookup_first = 0  # first block the lookup asked about
        self.lookup_tiers: tuple[str, ...] | None = None
        self.lookup_tries = 0
        self.following: Following | None = None  # whom a waiting request waits for
        self.job: int | None = None  # of the load in progress
        self.passed_since_s: float | None = None  # when it first left its turn, for blocks that a tier keeps
        self.cached_tokens: dict[str, int] = {}
        self.counted = False  # its lookup tokens are in the statistics
        self.num_preemptions = 0
        self.num_lost_tokens = 0  # whose KV a preemption took
        self.skips_tiers = False  # it is to be computed again, not loaded
        self.preempted_by = ""  # swap or recompute, until it runs again

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def num_tokens(self) -> int:
        return self.num_known_tokens + self.num_placeholders

    @property
    def num_output_tokens(self) -> int:
        return self.num_known_tokens - self.num_prompt_tokens

    def token_ids(self, start: int, end: int) -> I32:
        """Known tokens [start, end): a view."""
        return self._buffer[start : min(end, self.num_known_tokens)]

    def block_array(self, num_blocks: int) -> I32:
        """The first `num_blocks` block ids: a view, made anew only where they changed."""
        if num_blocks > self.num_tabled_blocks:
            if num_blocks > len(self._table):
                self._table = np.concatenate([self._table, np.empty(num_blocks, np.int32)])
            self._table[self.num_tabled_blocks : num_blocks] = self.block_ids[self.num_tabled_blocks : num_blocks]
            self.num_tabled_blocks = num_blocks
        return self._table[:num_blocks]

    def packed_tokens(self) -> bytes:
        """All known tokens, u32 LE."""
        if self.num_known_tokens == self.num_prompt_tokens:
            return self._packed_prompt
        return self._packed_prompt + pack_tokens(self._buffer[self.num_prompt_tokens : self.num_known_tokens])

    def append(self, token_id: int) -> None:
        """Accept a sampled token."""
        buffer, num_known = self._buffer, self.num_known_tokens
        if num_known == len(buffer):
            self._buffer = buffer = np.concatenate([buffer, np.empty(num_known, np.int32)])
        buffer[num_known] = token_id
        self.num_known_tokens = num_known + 1

    def output(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs | None, ...],
        stop_token_id: int | None = None,
    ) -> TokenOutput:
        """What a step gave it, and whether and how it has ended."""
        return TokenOutput(
            self.spec.request_id, token_ids, logprobs, self.finish_reason, stop_token_id, self.cached_tokens
        )

    def rename(self, root: bytes, block_size: int, hash_: Hash) -> None:
        """Name the prompt's blocks below another root; those of the output are named anew as they are committed."""
        self.root = root
        self.names = _prompt_names(self.spec, self._packed_prompt, root, block_size, hash_)

    def name_blocks(self, num_blocks: int, block_size: int, hash_: Hash) -> None:
        """Key the blocks up to `num_blocks`, all of whose tokens are accepted."""
        while len(self.names) < num_blocks:
            first = len(self.names) * block_size
            assert first + block_size <= self.num_known_tokens, "a block is keyed when its last token is accepted"
            tokens = pack_tokens(self._buffer[first : first + block_size])
            parent = self.names[-1].key if self.names else self.root
            self.names.append(BlockName(block_key(parent, tokens, hash_=hash_), parent, self.root, first, tokens))


def _prompt_names(spec: EngineRequest, packed: bytes, root: bytes, block_size: int, hash_: Hash) -> list[BlockName]:
    """Names of the prompt's full blocks, from the keys that the API side hashed below this very root, if it did."""
    num_blocks = len(spec.prompt_ids) // block_size
    if spec.root != root or len(spec.keys) != num_blocks * KEY_BYTES:
        return chain_names(root, np.asarray(spec.prompt_ids, np.uint32), block_size, hash_=hash_)
    step = block_size * TOKEN_BYTES
    keys = [spec.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in range(num_blocks)]
    parents = [root, *keys][:num_blocks]
    return [
        BlockName(key, parent, root, i * block_size, packed[i * step : (i + 1) * step])
        for i, (key, parent) in enumerate(zip(keys, parents, strict=True))
    ]
