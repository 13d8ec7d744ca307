"""The shared library's structs and functions, as ctypes sees them. One file, so that the header has one mirror."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

ABI_VERSION = 7
NUM_COUNTERS = 10


class Dtype(IntEnum):
    F32 = 0
    BF16 = 1


class Isa(IntEnum):
    """Instruction-set levels in rising order."""

    NONE = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3
    AMX = 4


class OpKind(IntEnum):
    EMBED = 0
    NORM = 1
    GEMM = 2
    HEAD_NORM = 3
    ROPE_KV = 4
    ATTENTION = 5
    SILU_MUL = 6
    GATHER = 7


class Op(c.Structure):
    _fields_ = [
        ("kind", c.c_int32),
        ("in_", c.c_int32),
        ("out", c.c_int32),
        ("layer", c.c_int32),
        ("n", c.c_int32),
        ("k", c.c_int32),
        ("accumulate", c.c_int32),
        ("per_sample", c.c_int32),
        ("gated", c.c_int32),
        ("reserved", c.c_int32),
        ("weight", c.c_void_p),
        ("bias", c.c_void_p),
        ("peaks", c.c_void_p),
    ]


class Buffer(c.Structure):
    _fields_ = [
        ("data", c.c_void_p),
        ("width", c.c_int64),
        ("max_rows", c.c_int64),
        ("dtype", c.c_int32),
        ("reserved", c.c_int32),
    ]


class Model(c.Structure):
    _fields_ = [
        ("dtype", c.c_int32),
        ("num_layers", c.c_int32),
        ("num_heads", c.c_int32),
        ("num_kv_heads", c.c_int32),
        ("head_dim", c.c_int32),
        ("vocab_size", c.c_int32),
        ("block_size", c.c_int32),
        ("window", c.c_int32),
        ("num_blocks", c.c_int64),
        ("rms_norm_eps", c.c_float),
        ("softmax_scale", c.c_float),
        ("softcap", c.c_float),
        ("num_ops", c.c_int32),
        ("num_buffers", c.c_int32),
        ("ops", c.POINTER(Op)),
        ("buffers", c.POINTER(Buffer)),
        ("inv_freq", c.c_void_p),
        ("pool", c.c_void_p),
    ]


class BatchArrays(c.Structure):
    _fields_ = [
        ("num_tokens", c.c_int32),
        ("num_rows", c.c_int32),
        ("num_samples", c.c_int32),
        ("num_copies", c.c_int32),
        ("table_stride", c.c_int64),
        ("token_ids", c.c_void_p),
        ("positions", c.c_void_p),
        ("query_start_loc", c.c_void_p),
        ("seq_lens", c.c_void_p),
        ("block_table", c.c_void_p),
        ("logits_indices", c.c_void_p),
        ("slot_mapping", c.c_void_p),
        ("copies", c.c_void_p),
    ]


# pt_sample_row, for arrays of them.
SAMPLE_ROW = np.dtype(
    [
        ("logits", np.uintp),
        ("raw", np.uintp),
        ("peaks", np.uintp),
        ("number", np.float64),
        ("temperature", np.float64),
        ("min_p", np.float64),
        ("top_p", np.float64),
        ("top_k", np.int32),
        ("num_top", np.int32),
        ("token", np.int32),
        ("rank", np.int32),
        ("logprob", np.float32),
        ("reserved", np.float32),
        ("top_ids", np.uintp),
        ("top_logprobs", np.uintp),
    ]
)

SAMPLE_BLOCK = 64  # logits whose greatest is told apart

# pt_copied, for arrays of them.
COPIED = np.dtype([("from", np.uintp), ("to", np.uintp), ("nbytes", np.int64)])
MIN_HASHED_BYTES = 241  # xxh3 hashes what is shorter in another way


class Library:
    """The loaded library. Its calls release the GIL. Raises OSError or RuntimeError when the file does not fit."""

    def __init__(self, path: Path) -> None:
        library = c.CDLL(str(path))
        if library.pt_abi_version() != ABI_VERSION:
            raise RuntimeError(f"{path}: ABI {library.pt_abi_version()}, not {ABI_VERSION}")
        self._best = _function(library, "pt_isa_best", c.c_int32, c.c_int32)
        self._name = _function(library, "pt_isa_name", c.c_char_p, c.c_int32)
        self._lacks = _function(library, "pt_isa_lacks", c.c_char_p)
        self._create = _function(library, "pt_threads_create", c.c_void_p, c.c_int32, c.c_void_p)
        self._use = _function(library, "pt_threads_use", None, c.c_void_p, c.c_int32)
        self._destroy = _function(library, "pt_threads_destroy", None, c.c_void_p)
        self._packed_bytes = _function(
            library, "pt_packed_bytes", c.c_size_t, c.c_int32, c.c_int32, c.c_int64, c.c_int64
        )
        self._pack = _function(
            library, "pt_pack", None, c.c_int32, c.c_int32, c.c_void_p, c.c_int64, c.c_int64, c.c_void_p
        )
        self._packed_gated_bytes = _function(
            library, "pt_packed_gated_bytes", c.c_size_t, c.c_int32, c.c_int32, c.c_int64, c.c_int64
        )
        self._pack_gated = _function(
            library,
            "pt_pack_gated",
            None,
            *(c.c_int32, c.c_int32, c.c_void_p, c.c_void_p, c.c_int64, c.c_int64, c.c_void_p),
        )
        self._scratch_bytes = _function(library, "pt_scratch_bytes", c.c_size_t, c.POINTER(Model), c.c_void_p)
        self.step = _function(
            library,
            "pt_step",
            c.c_int32,
            c.c_int32,
            c.POINTER(Model),
            c.POINTER(BatchArrays),
            c.c_void_p,
            c.c_void_p,
            c.c_void_p,
        )
        self._uniforms = _function(
            library, "pt_uniforms", None, c.c_void_p, c.c_void_p, c.c_void_p, c.c_int64, c.c_void_p
        )
        self._sample_scratch_bytes = _function(library, "pt_sample_scratch_bytes", c.c_size_t, c.c_int64, c.c_void_p)
        self._sample = _function(
            library, "pt_sample", c.c_int32, c.c_int32, c.c_void_p, c.c_int32, c.c_int64, c.c_void_p, c.c_void_p
        )
        self._copy = _function(library, "pt_copy", c.c_int32, c.c_int32, c.c_int64, c.c_void_p, c.c_void_p)
        self._error_text = _function(library, "pt_error_text", c.c_char_p, c.c_int32)

    def best_isa(self, limit: Isa = Isa.AMX) -> Isa:
        """The best level of this machine, at most `limit`."""
        return Isa(self._best(int(limit)))

    def lacks(self) -> str | None:
        """A level that this CPU has and this process cannot use, and why; None: it can use them all."""
        lacks = self._lacks()
        return None if lacks is None else str(lacks.decode())

    def create_threads(self, num_threads: int, cpus: Sequence[int] = ()) -> int:
        """`num_threads` workers, the caller of `step` among them, each bound to its CPU of `cpus` if there are any.
        Raises ValueError."""
        if cpus and len(cpus) != num_threads:
            raise ValueError(f"{len(cpus)} CPUs for {num_threads} threads")
        threads = self._create(num_threads, (c.c_int32 * num_threads)(*cpus) if cpus else None)
        if not threads:
            raise ValueError(f"cannot make {num_threads} threads")
        return int(threads)

    def use_threads(self, threads: int, num_active: int) -> None:
        """From the next step on only so many of them compute. Called by the thread that calls `step`."""
        self._use(threads, num_active)

    def destroy_threads(self, threads: int) -> None:
        self._destroy(threads)

    def pack(self, isa: Isa, weight: np.ndarray, dtype: Dtype) -> np.ndarray:
        """`weight` (n, k), float32 or bf16 bits as uint16, in the level's panels; 64-aligned bytes."""
        n, k = weight.shape
        packed = aligned_bytes(int(self._packed_bytes(int(isa), int(dtype), n, k)))
        source = np.ascontiguousarray(weight)
        self._pack(int(isa), int(dtype), source.ctypes.data, n, k, packed.ctypes.data)
        return packed

    def pack_gated(self, isa: Isa, gate: np.ndarray, up: np.ndarray, dtype: Dtype) -> np.ndarray | None:
        """Two weights (n, k) for a gated GEMM, as `pack` one; None: the level has no such GEMM of the dtype."""
        n, k = gate.shape
        num_bytes = int(self._packed_gated_bytes(int(isa), int(dtype), n, k))
        if not num_bytes:
            return None
        packed, first, second = aligned_bytes(num_bytes), np.ascontiguousarray(gate), np.ascontiguousarray(up)
        self._pack_gated(int(isa), int(dtype), first.ctypes.data, second.ctypes.data, n, k, packed.ctypes.data)
        return packed

    def scratch_bytes(self, model: Model, threads: int) -> int:
        return int(self._scratch_bytes(c.byref(model), threads))

    def uniforms(self, names: Sequence[tuple[int, int, int]]) -> np.ndarray:
        """(len(names),) float64 in [0, 1) per (seed modulo 2^64, choice and position below 2^32)."""
        seeds = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF for seed, _, _ in names], np.uint64)
        choices = np.array([choice for _, choice, _ in names], np.uint32)
        positions = np.array([position for _, _, position in names], np.uint32)
        numbers = np.empty(len(names), np.float64)
        self._uniforms(seeds.ctypes.data, choices.ctypes.data, positions.ctypes.data, len(names), numbers.ctypes.data)
        return numbers

    def sample_scratch_bytes(self, vocab_size: int, threads: int) -> int:
        return int(self._sample_scratch_bytes(vocab_size, threads))

    def sample(self, isa: Isa, rows: np.ndarray, vocab_size: int, threads: int, scratch: np.ndarray) -> None:
        """Fill in the answers of `rows` (num_rows,) SAMPLE_ROW. Raises ValueError, before any is, for a row that does
        not fit."""
        assert rows.dtype == SAMPLE_ROW and rows.flags.c_contiguous
        error = self._sample(int(isa), rows.ctypes.data, len(rows), vocab_size, threads, scratch.ctypes.data)
        if error:
            raise ValueError(self.error_text(error))

    def copy(self, isa: Isa, copies: np.ndarray) -> bytes:
        """Carry out `copies` (num_copies,) COPIED on this thread, past the caches where they are large; their xxh3-128
        digests, 16 bytes each. Raises ValueError, before any is, for one of less than MIN_HASHED_BYTES."""
        assert copies.dtype == COPIED and copies.flags.c_contiguous
        digests = c.create_string_buffer(16 * len(copies))
        error = self._copy(int(isa), len(copies), copies.ctypes.data, digests)
        if error:
            raise ValueError(self.error_text(error))
        return digests.raw

    def error_text(self, error: int) -> str:
        return str(self._error_text(error).decode())


def aligned_bytes(nbytes: int, alignment: int = 64) -> np.ndarray:
    """(nbytes,) uint8 zeros that start on a multiple of `alignment`."""
    raw = np.zeros(nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]


def _function(library: c.CDLL, name: str, result: object, *arguments: object) -> Callable[..., Any]:
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    called: Callable[..., Any] = function
    return called
