"""One op of the compiled core on given arrays: what the tests of single kernels call."""

from __future__ import annotations

import ctypes as c
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagetier.kernels.cpu.library import BatchArrays, Buffer, Dtype, Isa, Library, Model, Op, OpKind
from tests.kernels.cpu.tiny_models import library_of

DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16}


@dataclass(slots=True)
class Case:
    """Whose fields are the model's and the batch's. pool: of the compute dtype, (num_blocks, num_layers, 2,
    num_kv_heads, block_size, head_dim). rows: (first position, number of tokens) each; tables: their blocks.
    """

    isa: Isa
    dtype: torch.dtype
    pool: Tensor
    tables: list[list[int]]
    rows: list[tuple[int, int]]
    num_heads: int = 1
    token_ids: list[int] | None = None
    samples: list[int] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    vocab_size: int = 100
    window: int = 0
    softmax_scale: float = 1.0
    softcap: float = 0.0
    eps: float = 1e-5
    num_threads: int = 1
    frequencies: Tensor | None = None
    core: Library | None = None  # None: the one that runs the level here

    @property
    def library(self) -> Library:
        return self.core or library_of(self.isa)

    @property
    def num_tokens(self) -> int:
        return sum(num_new for _, num_new in self.rows)


def simple_case(isa: Isa, dtype: torch.dtype, num_tokens: int, **more: Any) -> Case:
    """One row in one block of one small head: for ops that know no attention."""
    block_size = -(-num_tokens // 8) * 8
    return Case(isa, dtype, torch.zeros(1, 1, 2, 1, block_size, 2, dtype=dtype), [[0]], [(0, num_tokens)], **more)


def bits(tensor: Tensor) -> np.ndarray:
    tensor = tensor.contiguous()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def packed(case: Case, weight: Tensor) -> np.ndarray:
    return case.library.pack(case.isa, bits(weight), DTYPES[weight.dtype])


def packed_gated(case: Case, gate: Tensor, up: Tensor) -> np.ndarray | None:
    return case.library.pack_gated(case.isa, bits(gate), bits(up), DTYPES[gate.dtype])


def run_op(case: Case, kind: OpKind, in_: Tensor | None, out: Tensor, **fields: Any) -> Tensor:
    """Runs one op of the case from `in_` (rows, width) into a copy of `out` (rows, width), which it returns. fields:
    of Op; weight and bias as arrays. Raises ValueError with the core's own words."""
    arrays = {name: fields.pop(name) for name in ("weight", "bias") if name in fields}
    pointers = {name: array.ctypes.data for name, array in arrays.items()}
    data = [in_.clone() if in_ is not None else out[:0], out.clone()]
    rows = max(case.num_tokens, *(len(one) for one in data))
    buffers = (Buffer * 2)(*(Buffer(t.data_ptr(), t.shape[-1], rows, int(DTYPES[t.dtype]), 0) for t in data))
    in_index = -1 if in_ is None else 0
    op = Op(kind=int(kind), in_=in_index, out=1, **{"n": out.shape[-1], **fields}, **pointers)
    ops = (Op * 1)(op)
    _step(case, ops, buffers)
    return data[1]


def _step(case: Case, ops: Any, buffers: Any) -> None:
    num_blocks, num_layers, _, num_kv_heads, block_size, head_dim = case.pool.shape
    frequencies = (case.frequencies if case.frequencies is not None else torch.zeros(head_dim // 2)).numpy()
    model = Model(
        dtype=int(DTYPES[case.dtype]),
        num_layers=num_layers,
        num_heads=case.num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=case.vocab_size,
        block_size=block_size,
        window=case.window,
        num_blocks=num_blocks,
        rms_norm_eps=case.eps,
        softmax_scale=case.softmax_scale,
        softcap=case.softcap,
        num_ops=len(ops),
        num_buffers=len(buffers),
        ops=ops,
        buffers=buffers,
        inv_freq=frequencies.ctypes.data,
        pool=case.pool.data_ptr(),
    )
    positions = np.concatenate([np.arange(first, first + n) for first, n in case.rows]).astype(np.int32)
    tables = np.zeros((len(case.rows), max(map(len, case.tables))), np.int32)
    slots = []
    for index, ((first, n), table) in enumerate(zip(case.rows, case.tables, strict=True)):
        tables[index, : len(table)] = table
        at = np.arange(first, first + n)
        slots.append(np.array(table)[at // block_size] * block_size + at % block_size)
    slot_mapping = np.concatenate(slots).astype(np.int64)
    starts = np.cumsum([0] + [n for _, n in case.rows], dtype=np.int32)
    seq_lens = np.array([first + n for first, n in case.rows], np.int32)
    token_ids = np.array(case.token_ids or [0] * case.num_tokens, np.int32)
    samples, copies = np.array(case.samples, np.int32), np.array(case.copies, np.int32)
    batch = BatchArrays(
        num_tokens=case.num_tokens,
        num_rows=len(case.rows),
        num_samples=len(samples),
        num_copies=len(copies),
        table_stride=tables.shape[1],
        token_ids=token_ids.ctypes.data,
        positions=positions.ctypes.data,
        query_start_loc=starts.ctypes.data,
        seq_lens=seq_lens.ctypes.data,
        block_table=tables.ctypes.data,
        logits_indices=samples.ctypes.data,
        slot_mapping=slot_mapping.ctypes.data,
        copies=copies.ctypes.data,
    )
    threads = case.library.create_threads(case.num_threads)
    try:
        scratch = torch.empty(case.library.scratch_bytes(model, threads), dtype=torch.uint8)  # 64-aligned, no byte more
        error = case.library.step(int(case.isa), c.byref(model), c.byref(batch), threads, scratch.data_ptr(), None)
    finally:
        case.library.destroy_threads(threads)
    if error:
        raise ValueError(case.library.error_text(error))
