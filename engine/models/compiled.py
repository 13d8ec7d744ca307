"""A model of the Llama family as data for the compiled CPU core: packed weights, buffers, and the list of ops."""

from __future__ import annotations

import ctypes as c
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pagetier.engine.batch import Batch
from pagetier.engine.compiled_sampler import CompiledSampler, LogitPeaks
from pagetier.engine.device_pool import DevicePool
from pagetier.engine.models.config import ModelConfig
from pagetier.engine.models.llama import rope_frequencies
from pagetier.engine.prefill_model import PrefillModel
from pagetier.kernels.cpu.library import (
    NUM_COUNTERS,
    BatchArrays,
    Buffer,
    Dtype,
    Isa,
    Library,
    Model,
    Op,
    OpKind,
    aligned_bytes,
)

KERNEL_REVISION = "pagetier-cpu-5"  # raise it whenever the core's arithmetic changes
SPARE_FROM = 4  # threads from which on one is left free while tiers are busy: of two it would be half the speed
DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16}


class UnsupportedError(Exception):
    """This model or machine is not one that the core runs; one line that says why."""


class CompiledModel:
    """Stands in for `models.llama.Llama`: the same `forward`, in one call of the library, which also checks the batch
    and makes its copies; and the sampler of the same library.

    limit: the highest instruction-set level to use. max_tokens: of one batch. Buffers and scratch are made once;
    nothing is allocated during a step but the logits.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        pool: DevicePool,
        library: Library,
        *,
        max_tokens: int,
        num_threads: int,
        limit: Isa = Isa.AMX,
        cpus: Sequence[int] = (),
    ) -> None:
        self.config = config
        self.device = torch.device("cpu")
        self.dtype = tensors["model.embed_tokens.weight"].dtype
        self.isa = library.best_isa(limit)
        _check_supported(config, self.dtype, self.isa)
        self.counters = np.zeros(NUM_COUNTERS, np.int64)  # nanoseconds by OpKind
        self.prefill_model = PrefillModel()
        self._library = library
        self._kept: list[np.ndarray] = []  # what the ops point into
        self._ops: list[Op] = []
        self._buffers: list[Buffer] = []
        self._max_tokens = max_tokens
        self._gate_up = -1  # the buffer of products that are yet to be gated, where there is one
        self._describe(tensors)
        self._pool = pool
        self._frequencies = self._keep(rope_frequencies(config.rope, config.head_dim).numpy())
        self._model = self._make_model(pool)
        self._threads = library.create_threads(num_threads, cpus)
        self._num_threads = self._num_active = num_threads
        self._scratch = aligned_bytes(library.scratch_bytes(self._model, self._threads))
        self.core_sampler = CompiledSampler(library, self.isa, self._threads, config.vocab_size, self._peaks)

    @property
    def numerics(self) -> dict[str, str]:
        """What decides the rounding of K and V besides weights and dtype."""
        return {"kernel_revision": KERNEL_REVISION, "isa": self.isa.name.lower()}

    @property
    def is_batch_invariant(self) -> bool:
        """Yes, by construction (tests/kernels/cpu/test_invariance.py)."""
        return True

    # ---- description

    def _keep(self, array: np.ndarray) -> np.ndarray:
        kept = np.ascontiguousarray(array)
        self._kept.append(kept)
        return kept

    def _buffer(self, width: int, dtype: Dtype) -> int:
        """A row buffer; its index. Rows are multiples of 64 bytes long."""
        step = 32 if dtype == Dtype.BF16 else 16
        width = -(-width // step) * step
        data = aligned_bytes(self._max_tokens * width * (2 if dtype == Dtype.BF16 else 4))
        self._kept.append(data)
        self._buffers.append(Buffer(data.ctypes.data, width, self._max_tokens, int(dtype), 0))
        return len(self._buffers) - 1

    def _op(self, kind: OpKind, in_: int, out: int, n: int, **fields: int) -> None:
        self._ops.append(Op(kind=int(kind), in_=in_, out=out, n=n, **fields))

    def _gemm(self, in_: int, out: int, weights: list[Tensor], biases: list[Tensor], **fields: int) -> None:
        stacked = torch.cat(weights) if len(weights) > 1 else weights[0]  # (n, k)
        packed = self._library.pack(self.isa, _bits(stacked), DTYPES[self.dtype])
        self._kept.append(packed)
        bias = self._keep(torch.cat(biases).float().numpy()).ctypes.data if biases else 0
        n, k = stacked.shape
        self._op(OpKind.GEMM, in_, out, n, k=k, weight=packed.ctypes.data, bias=bias, **fields)

    def _gated(self, in_: int, out: int, weights: list[Tensor], biases: list[Tensor], **fields: int) -> None:
        """out = silu(in W^T) * (in V^T) of two weights (n, k): one op where the level can, else two to the same bits,
        over a buffer of both products."""
        gate, up = weights
        n, k = gate.shape
        packed = self._library.pack_gated(self.isa, _bits(gate), _bits(up), DTYPES[self.dtype])
        if packed is None:
            if self._gate_up < 0:
                self._gate_up = self._buffer(2 * n, Dtype.F32)
            self._gemm(in_, self._gate_up, weights, biases, **fields)
            self._op(OpKind.SILU_MUL, self._gate_up, out, n, **fields)
            return
        self._kept.append(packed)
        bias = self._keep(torch.cat(biases).float().numpy()).ctypes.data if biases else 0
        self._op(OpKind.GEMM, in_, out, n, k=k, weight=packed.ctypes.data, bias=bias, gated=1, **fields)

    def _norm(self, in_: int, out: int, weight: Tensor, **fields: int) -> None:
        kept = self._keep(weight.float().numpy())
        self._op(OpKind.NORM, in_, out, len(kept), weight=kept.ctypes.data, **fields)

    def _describe(self, tensors: Mapping[str, Tensor]) -> None:
        config, compute = self.config, DTYPES[self.dtype]
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        residual = self._buffer(config.hidden_size, Dtype.F32)  # the first buffer's rows bound a batch's tokens
        normed = self._buffer(config.hidden_size, compute)
        qkv = self._buffer(q_width + 2 * kv_width, Dtype.F32)
        attended = self._buffer(q_width, compute)
        inner = self._buffer(config.intermediate_size, compute)
        embedding = self._keep(_bits(tensors["model.embed_tokens.weight"]))
        self._op(OpKind.EMBED, -1, residual, config.hidden_size, weight=embedding.ctypes.data)
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}"

            def named(*names: str, kind: str = "weight", prefix: str = prefix) -> list[Tensor]:
                return [tensors[f"{prefix}.{name}.{kind}"] for name in names]

            attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
            self._norm(residual, normed, tensors[f"{prefix}.input_layernorm.weight"])
            self._gemm(normed, qkv, named(*attention), named(*attention, kind="bias") if config.qkv_bias else [])
            if config.qk_norm:
                norms = [self._keep(t.float().numpy()) for t in named("self_attn.q_norm", "self_attn.k_norm")]
                pointers = {"weight": norms[0].ctypes.data, "bias": norms[1].ctypes.data}
                self._op(OpKind.HEAD_NORM, qkv, qkv, q_width, **pointers)
            self._op(OpKind.ROPE_KV, qkv, qkv, q_width, layer=layer)
            self._op(OpKind.ATTENTION, qkv, attended, q_width, layer=layer)
            fields = {}
            if layer == config.num_layers - 1:  # past its K and V, only what logits are wanted of matters
                wanted, residual_wanted = self._buffer(q_width, compute), self._buffer(config.hidden_size, Dtype.F32)
                self._op(OpKind.GATHER, attended, wanted, q_width, per_sample=1)
                self._op(OpKind.GATHER, residual, residual_wanted, config.hidden_size, per_sample=1)
                attended, residual, fields = wanted, residual_wanted, {"per_sample": 1}
            bias = named("self_attn.o_proj", kind="bias") if config.o_bias else []
            self._gemm(attended, residual, named("self_attn.o_proj"), bias, accumulate=1, **fields)
            self._norm(residual, normed, tensors[f"{prefix}.post_attention_layernorm.weight"], **fields)
            mlp = ("mlp.gate_proj", "mlp.up_proj")
            self._gated(normed, inner, named(*mlp), named(*mlp, kind="bias") if config.mlp_bias else [], **fields)
            bias = named("mlp.down_proj", kind="bias") if config.mlp_bias else []
            self._gemm(inner, residual, named("mlp.down_proj"), bias, accumulate=1, **fields)
        self._norm(residual, normed, tensors["model.norm.weight"], per_sample=1)
        tied = config.tie_word_embeddings
        head = tensors["model.embed_tokens.weight"] if tied else tensors["lm_head.weight"]
        self._buffers.append(Buffer(0, config.vocab_size, self._max_tokens, int(Dtype.F32), 0))
        self._peaks = LogitPeaks(self._max_tokens, config.vocab_size)
        self._gemm(normed, len(self._buffers) - 1, [head], [], per_sample=1, peaks=self._peaks.address)

    def _make_model(self, pool: DevicePool) -> Model:
        config, shape = self.config, pool.shape
        self._op_array = (Op * len(self._ops))(*self._ops)
        self._buffer_array = (Buffer * len(self._buffers))(*self._buffers)
        return Model(
            dtype=int(DTYPES[self.dtype]),
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            block_size=shape.block_size,
            window=config.sliding_window or 0,
            num_blocks=shape.num_blocks,
            rms_norm_eps=config.rms_norm_eps,
            softmax_scale=config.head_dim**-0.5,
            softcap=0.0,
            num_ops=len(self._ops),
            num_buffers=len(self._buffers),
            ops=self._op_array,
            buffers=self._buffer_array,
            inv_freq=self._frequencies.ctypes.data,
            pool=pool.tensor.data_ptr(),
        )

    # ---- running

    def forward(self, token_ids: Tensor, batch: Batch, pool: Tensor) -> Tensor:
        """Makes the batch's copies, runs its tokens, writes their K and V; float32 logits (num_samples, vocab_size).

        Raises ValueError, before anything is copied or computed, when an id or length does not fit.
        """
        logits: np.ndarray = np.empty((len(batch.logits_indices), self.config.vocab_size), np.float32)
        self._buffer_array[len(self._buffers) - 1].data = logits.ctypes.data
        self._buffer_array[len(self._buffers) - 1].max_rows = len(logits)
        ids = token_ids.numpy()
        if ids.dtype != np.int32:  # what does not fit 32 bits stays outside the vocabulary
            ids = np.clip(ids, -1, np.iinfo(np.int32).max).astype(np.int32)
        ids = np.ascontiguousarray(ids)
        table = np.ascontiguousarray(batch.block_tables[0])
        self._leave_free(1 if batch.tiers_busy and self._num_threads >= SPARE_FROM else 0)
        before = self.counters.tolist()
        try:
            error = self._library.step(
                int(self.isa),
                c.byref(self._model),
                c.byref(_batch_arrays(batch, ids, table)),
                self._threads,
                self._scratch.ctypes.data,
                self.counters.ctypes.data,
            )
            if error:
                raise ValueError(self._library.error_text(error))
        except ValueError as reason:
            raise ValueError(f"step {batch.step}: {reason}") from reason
        after = self.counters.tolist()
        attention_s = (after[OpKind.ATTENTION] - before[OpKind.ATTENTION]) / 1e9
        self._observe(batch, attention_s, (sum(after) - sum(before)) / 1e9 - attention_s)
        answer = torch.from_numpy(logits)
        self._peaks.are_of(answer)
        return answer

    def prefill_s(self, num_new: int, context: int) -> float | None:
        """Seconds that the prefill of `num_new` tokens after `context` known ones takes; None: not known."""
        return self.prefill_model.seconds(num_new, context)

    def _leave_free(self, num_cores: int) -> None:
        """Compute on all threads but so many."""
        num_active = self._num_threads - num_cores
        if num_active != self._num_active:
            self._num_active = num_active
            self._library.use_threads(self._threads, num_active)

    def _observe(self, batch: Batch, attention_s: float, other_s: float) -> None:
        num_tokens, num_rows = batch.num_tokens, batch.num_rows
        if num_tokens == num_rows:
            self.prefill_model.observe_decode(num_tokens, other_s)
            return
        first_blocks = batch.block_tables[0][:, 0]
        if (first_blocks[1:] == first_blocks[:-1]).any():
            return  # what rows share is computed once: its time says nothing of a prompt that shares nothing
        num_new = np.diff(batch.query_start_loc).astype(np.float64)  # (num_rows,)
        pairs = float((num_new * (batch.seq_lens - num_new / 2)).sum())
        self.prefill_model.observe_prefill(num_tokens, pairs, attention_s, other_s)

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._threads:
            self._library.destroy_threads(self._threads)
            self._threads = 0


def _batch_arrays(batch: Batch, ids: np.ndarray, table: np.ndarray) -> BatchArrays:
    """Where the batch's values lie. Raises ValueError for an array of another size or type than the library reads."""
    num_tokens, num_rows, num_samples = len(ids), batch.num_rows, len(batch.logits_indices)
    return BatchArrays(
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_samples=num_samples,
        num_copies=len(batch.copies),
        table_stride=table.shape[1],
        token_ids=ids.ctypes.data,
        positions=_address("positions", batch.positions, num_tokens),
        query_start_loc=_address("query_start_loc", batch.query_start_loc, num_rows + 1),
        seq_lens=_address("seq_lens", batch.seq_lens, num_rows),
        block_table=_address("block_tables", table, num_rows * table.shape[1]),
        logits_indices=_address("logits_indices", batch.logits_indices, num_samples),
        slot_mapping=_address("slot_mapping", batch.slot_mapping[0], num_tokens, np.int64),
        copies=_address("copies", batch.copies, 3 * len(batch.copies)),
    )


def _check_supported(config: ModelConfig, dtype: torch.dtype, isa: Isa) -> None:
    if isa == Isa.NONE:
        raise UnsupportedError("this CPU has no AVX2")
    if dtype not in DTYPES:
        raise UnsupportedError(f"it computes in float32 and bfloat16, not {str(dtype).removeprefix('torch.')}")
    for name, value in (("head_dim", config.head_dim), ("hidden_size", config.hidden_size)):
        if value % 2:
            raise UnsupportedError(f"{name} {value} is odd")
    if not 2 <= config.head_dim <= 256:
        raise UnsupportedError(f"head_dim {config.head_dim} is above 256")


def _address(name: str, array: np.ndarray, size: int, dtype: type[np.integer] = np.int32) -> int:
    """Where the array's values lie. Raises ValueError when the library would read something else there."""
    if array.size != size or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{name}: {array.size} values of {array.dtype}, not {size} of {np.dtype(dtype)} in a row")
    return array.ctypes.data


def _bits(tensor: Tensor) -> np.ndarray:
    """A float32 or bfloat16 tensor as numpy: float32, or the bits of bf16 as uint16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.uint16).numpy()
    return tensor.contiguous().numpy()
