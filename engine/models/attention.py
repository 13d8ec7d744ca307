"""Paged attention in torch: one plan per batch holds every index the layers share; each layer writes, gathers, attends.

The pool is read as rows of (block_size * head_dim) elements, one per (block, layer, plane, kv head); an index made for
layer 0 serves layer l by moving the view's start, so that no index arithmetic is left in the layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from pagetier.engine.batch import Batch

I64 = npt.NDArray[np.int64]

QUERY_TILE = 128  # queries per SDPA call; half of a tile's causal square is wasted: 256 costs 5-60% more on 512 tokens
GATHER_BYTES = 64 << 20  # of K and V of one layer gathered for decode rows at a time; one row may exceed it
PADDING_SHARE = 0.25  # of a decode group's blocks that may be padding, unless it is short anyway
SHORT_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool with what a plan needs to know of the model.

    tensor: (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim), contiguous.
    """

    tensor: Tensor
    num_heads: int
    window: int | None

    @property
    def num_kv_heads(self) -> int:
        return self.tensor.shape[3]

    @property
    def block_size(self) -> int:
        return self.tensor.shape[4]

    @property
    def head_dim(self) -> int:
        return self.tensor.shape[5]

    def layer_rows(self, layer: int, row_width: int) -> Tensor:
        """The pool as (rows, row_width), starting at `layer` of block 0."""
        rows_per_layer = 2 * self.num_kv_heads * self.block_size * self.head_dim // row_width
        return self.tensor.view(-1, row_width)[layer * rows_per_layer :]

    def block_rows(self, blocks: I64) -> I64:
        """Row numbers, at layer 0 and width block_size * head_dim, of k and v of `blocks` (num_rows, num_blocks):
        (2, num_rows, num_kv_heads, num_blocks)."""
        num_layers, num_kv_heads = self.tensor.shape[1], self.num_kv_heads
        plane = np.arange(2)[:, None, None, None] * num_kv_heads  # (2, 1, 1, 1)
        head = np.arange(num_kv_heads)[:, None]  # (num_kv_heads, 1)
        return blocks[:, None, :] * (num_layers * 2 * num_kv_heads) + head + plane


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one query each, padded to the same number of blocks.

    tokens: (rows,) query indices; None: all the batch's tokens in order. gather: (2 * rows * num_kv_heads * blocks,)
    pool rows. unseen: rows of the gathered (2 * rows * num_kv_heads * keys, head_dim) that hold no key the query may
    see: they are zeroed, since 0 * NaN is NaN. mask: (rows * num_kv_heads, 1, keys) float32, 0 or -inf.
    """

    tokens: Tensor | None
    gather: Tensor
    unseen: Tensor
    mask: Tensor
    num_rows: int
    num_keys: int


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A row of several queries: tokens [start, end) over the first num_keys keys of the gathered blocks.

    gather: (2 * num_kv_heads * blocks,) pool rows; blocks that are out of every query's window are left out.
    """

    start: int
    end: int
    gather: Tensor
    num_keys: int


class AttentionPlan:
    """What one batch's attention needs, built once on the host and used by every layer in turn."""

    def __init__(self, batch: Batch, pool: PoolView, scratch: Scratch) -> None:
        self._pool = pool
        self._scratch = scratch
        self._device = pool.tensor.device
        self._scale = 1.0 / math.sqrt(pool.head_dim)
        self._slots = self._to_device(self._write_rows(batch.slot_mapping[0]))
        query_lens = np.diff(batch.query_start_loc)
        self._decodes = self._group_decodes(batch, np.flatnonzero(query_lens == 1))
        self._prefills = [self._prefill_row(batch, int(row)) for row in np.flatnonzero(query_lens > 1)]
        self._mask = self._causal_mask(int(query_lens.max(initial=0)))

    def _to_device(self, array: I64) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)

    def _write_rows(self, slots: I64) -> I64:
        """(num_tokens, 2 * num_kv_heads) rows of width head_dim at layer 0: where each token's k and v heads go."""
        pool = self._pool
        blocks, offsets = np.divmod(slots, pool.block_size)  # (num_tokens,) each
        heads = np.arange(2 * pool.num_kv_heads)  # (2 * num_kv_heads,) k heads, then v heads
        layers = pool.tensor.shape[1]
        rows = blocks[:, None] * (layers * 2 * pool.num_kv_heads) + heads
        return rows * pool.block_size + offsets[:, None]

    def _group_decodes(self, batch: Batch, rows: I64) -> list[DecodeGroup]:
        """Rows of like length together, so that padding stays below PADDING_SHARE and a gather below GATHER_BYTES."""
        if not len(rows):
            return []
        pool = self._pool
        seq_lens = batch.seq_lens[rows].astype(np.int64)
        first_keys = np.maximum(seq_lens - pool.window, 0) if pool.window else np.zeros_like(seq_lens)
        first_blocks = first_keys // pool.block_size
        num_blocks = (seq_lens - 1) // pool.block_size + 1 - first_blocks
        block_bytes = 2 * pool.num_kv_heads * pool.block_size * pool.head_dim * pool.tensor.element_size()
        order = np.argsort(-num_blocks, kind="stable")
        groups: list[I64] = []
        start, used = 0, 0
        for i, blocks in enumerate(num_blocks[order].tolist()):
            widest = int(num_blocks[order[start]])
            padded = widest * (i + 1 - start)
            wasteful = padded - used - blocks > PADDING_SHARE * padded and widest > SHORT_BLOCKS
            if i > start and (wasteful or padded * block_bytes > GATHER_BYTES):
                groups.append(np.sort(order[start:i]))
                start, used = i, 0
            used += blocks
        groups.append(np.sort(order[start:]))
        return [self._decode_group(batch, rows[g], first_keys[g], first_blocks[g], num_blocks[g]) for g in groups]

    def _decode_group(
        self, batch: Batch, rows: I64, first_keys: I64, first_blocks: I64, num_blocks: I64
    ) -> DecodeGroup:
        pool = self._pool
        width, heads = int(num_blocks.max()), pool.num_kv_heads
        columns = first_blocks[:, None] + np.arange(width)  # (rows, width)
        inside = np.arange(width) < num_blocks[:, None]  # (rows, width)
        blocks = np.take_along_axis(batch.block_tables[0][rows], np.where(inside, columns, 0), axis=1).astype(np.int64)
        keys = first_blocks[:, None] * pool.block_size + np.arange(width * pool.block_size)  # (rows, keys) positions
        unseen = (keys >= batch.seq_lens[rows][:, None]) | (keys < first_keys[:, None])  # (rows, keys)
        row, key = np.nonzero(unseen)
        planes = np.arange(2)[:, None, None] * len(rows) + row  # (2, 1, unseen): plane and row
        gathered = (planes * heads + np.arange(heads)[:, None]) * keys.shape[1] + key  # (2, heads, unseen)
        mask = np.repeat(np.where(unseen, np.float32(-np.inf), np.float32(0)), heads, axis=0)  # (rows * heads, keys)
        tokens = batch.query_start_loc[rows].astype(np.int64)
        whole = len(rows) == batch.num_tokens
        return DecodeGroup(
            tokens=None if whole else self._to_device(tokens),
            gather=self._to_device(pool.block_rows(blocks).ravel()),
            unseen=self._to_device(gathered.ravel()),
            mask=torch.from_numpy(mask[:, None, :]).to(self._device),
            num_rows=len(rows),
            num_keys=keys.shape[1],
        )

    def _prefill_row(self, batch: Batch, row: int) -> PrefillRow:
        pool = self._pool
        start, end = batch.query_start_loc[row : row + 2].tolist()
        seq_len = int(batch.seq_lens[row])
        first_key = max(0, seq_len - (end - start) - pool.window + 1) if pool.window else 0
        first_block = first_key // pool.block_size
        table = batch.block_tables[0][row, first_block : (seq_len - 1) // pool.block_size + 1].astype(np.int64)
        num_keys = seq_len - first_block * pool.block_size
        return PrefillRow(start, end, self._to_device(pool.block_rows(table[None]).ravel()), num_keys)

    def _causal_mask(self, num_queries: int) -> Tensor:
        """(tile, num_keys) 0 or -inf, for queries at the last `tile` of num_keys positions. Causality and window depend
        on distances alone, so its last columns and rows serve every shorter context and tile."""
        tile = min(QUERY_TILE, num_queries)
        num_keys = max((row.num_keys for row in self._prefills), default=0)
        if self._pool.window:
            num_keys = min(num_keys, self._pool.window + tile - 1)
        query = torch.arange(num_keys - tile, num_keys, device=self._device)[:, None]  # (tile, 1)
        key = torch.arange(num_keys, device=self._device)  # (num_keys,)
        hidden = key > query  # (tile, num_keys)
        if self._pool.window:
            hidden |= key <= query - self._pool.window
        mask = torch.zeros(hidden.shape, dtype=self._pool.tensor.dtype, device=self._device)
        return mask.masked_fill_(hidden, -torch.inf)

    def write(self, layer: int, kv: Tensor) -> None:
        """Put k and v of every token in its slot. kv: (num_tokens, 2 * num_kv_heads, head_dim), k heads first."""
        self._pool.layer_rows(layer, self._pool.head_dim)[self._slots] = kv

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Attention over the pool. query: (num_tokens, num_heads, head_dim), any strides; the result is contiguous."""
        if len(self._decodes) == 1 and self._decodes[0].tokens is None:
            return self._decode(layer, query, self._decodes[0])
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in self._decodes:
            assert group.tokens is not None
            out[group.tokens] = self._decode(layer, query[group.tokens], group)
        for row in self._prefills:
            self._prefill(layer, query, row, out)
        return out

    def _gather(self, layer: int, index: Tensor) -> Tensor:
        """The pool rows of `index`, in the scratch: (len(index), block_size * head_dim)."""
        width = self._pool.block_size * self._pool.head_dim
        out = self._scratch.take(len(index) * width).view(len(index), width)
        return torch.index_select(self._pool.layer_rows(layer, width), 0, index, out=out)

    def _decode(self, layer: int, query: Tensor, group: DecodeGroup) -> Tensor:
        """query: (rows, num_heads, head_dim); returns the same shape. Query heads of one kv head are a matrix, so
        that K and V are read once and never repeated."""
        heads, dim = self._pool.num_kv_heads, self._pool.head_dim
        batch = group.num_rows * heads
        gathered = self._gather(layer, group.gather).view(-1, dim)  # (2 * batch * keys, dim)
        gathered.index_fill_(0, group.unseen, 0.0)
        keys, values = gathered.view(2, batch, group.num_keys, dim)
        queries = query.reshape(batch, self._pool.num_heads // heads, dim)
        scores = _masked_scores(queries, keys.transpose(1, 2), group.mask, self._scale)
        weights = scores.softmax(dim=-1).to(query.dtype)  # (batch, num_heads / heads, keys)
        return torch.bmm(weights, values).view(query.shape)

    def _prefill(self, layer: int, query: Tensor, row: PrefillRow, out: Tensor) -> None:
        """SDPA in tiles of queries, each over the keys up to its last query. The kv heads are SDPA's batch, so that
        the query heads that share one read it through a stride of 0."""
        pool = self._pool
        heads, dim, group = pool.num_kv_heads, pool.head_dim, pool.num_heads // pool.num_kv_heads
        gathered = self._gather(layer, row.gather).view(2, heads, 1, -1, dim)  # (2, kv heads, 1, keys, dim)
        keys, values = gathered.expand(-1, -1, group, -1, -1)
        for start in range(row.start, row.end, QUERY_TILE):
            end = min(start + QUERY_TILE, row.end)
            last_key = row.num_keys - (row.end - end)
            first_key = max(0, last_key - (end - start) - pool.window + 1) if pool.window else 0
            mask = self._mask[len(self._mask) - (end - start) :, self._mask.shape[1] - (last_key - first_key) :]
            attended = F.scaled_dot_product_attention(
                query[start:end].view(-1, heads, group, dim).permute(1, 2, 0, 3),  # (kv heads, group, queries, dim)
                keys[:, :, first_key:last_key],
                values[:, :, first_key:last_key],
                attn_mask=mask,
                scale=self._scale,
            )
            out[start:end].view(-1, heads, group, dim).copy_(attended.permute(2, 0, 1, 3))


class Scratch:
    """One growing buffer that every layer's gather reuses. Fresh memory per layer would be paid in page faults."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=dtype, device=device)

    def take(self, numel: int) -> Tensor:
        """(numel,) with any content; valid until the next call."""
        if self._buffer.numel() < numel:
            self._buffer = torch.empty(numel, dtype=self._buffer.dtype, device=self._buffer.device)
        return self._buffer[:numel]


def _masked_scores(queries: Tensor, keys: Tensor, mask: Tensor, scale: float) -> Tensor:
    """mask + scale * queries @ keys in float32: (batch, n, keys).

    queries: (batch, n, dim); keys: (batch, dim, keys); mask: (batch, 1, keys) float32.
    A 16-bit bmm accumulates in float32 but rounds its result: in bf16 a score of 30 is off by up to 0.06. A second bmm
    that subtracts the rounded result before it rounds again gives the rest, exact to 2e-4 (measured), and costs less
    than SDPA, whose CPU kernel is slow for a handful of queries (1,024 keys, 16 rows: 860 against 1,416 us).
    """
    if queries.dtype == torch.float32:
        return torch.baddbmm(mask, queries, keys, alpha=scale)
    rounded = torch.bmm(queries, keys)  # (batch, n, keys)
    rest = torch.baddbmm(rounded, queries, keys, beta=-1)  # (batch, n, keys)
    return torch.add(mask, rounded.float().add_(rest), alpha=scale)
