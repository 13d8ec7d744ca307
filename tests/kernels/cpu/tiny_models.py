"""Tiny random models for the compiled core and its oracle, and ways to run a batch's worth of sequences on either."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagetier.benchmarks.static_rows import Row, StaticRows
from pagetier.engine.batch import Batch
from pagetier.engine.device_pool import DevicePool, PoolShape
from pagetier.engine.models.compiled import CompiledModel
from pagetier.engine.models.config import ModelConfig, RopeConfig
from pagetier.engine.models.llama import Llama
from pagetier.kernels.cpu.build import COMPILERS, compile_library, library_path, source_digest
from pagetier.kernels.cpu.library import Isa, Library
from pagetier.kvstore.places import kernels_dir

EMULATE_TILES = "-DPT_EMULATE_TILES"
HAS_COMPILER = any(map(shutil.which, COMPILERS))

# Changes to `tiny_config`, and a block size.
SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "head_32_block_8": ({"head_dim": 32}, 8),
    "head_80_block_16": ({"head_dim": 80, "num_heads": 4, "num_kv_heads": 2}, 16),
    "head_96_block_32": ({"head_dim": 96, "num_heads": 4, "num_kv_heads": 1}, 32),
    "head_128_mha": ({"head_dim": 128, "num_heads": 3, "num_kv_heads": 3}, 16),
    "head_256_mqa_block_64": ({"head_dim": 256, "num_heads": 4, "num_kv_heads": 1}, 64),
    "head_12_not_a_vector": ({"head_dim": 12, "num_heads": 4, "num_kv_heads": 2}, 16),
    "head_50_odd_block": ({"head_dim": 50, "num_heads": 2, "num_kv_heads": 1}, 13),
    "group_of_7": ({"num_heads": 14, "num_kv_heads": 2}, 16),
    "group_of_56": ({"num_heads": 56, "num_kv_heads": 1, "head_dim": 16}, 16),
    "window_1": ({"sliding_window": 1}, 8),
    "window_19": ({"sliding_window": 19}, 8),
    "window_64": ({"sliding_window": 64}, 16),
    "vocab_3": ({"vocab_size": 3}, 16),
    "odd_widths": ({"vocab_size": 257, "hidden_size": 54, "intermediate_size": 77}, 16),
    "qwen2": ({"qkv_bias": True, "tie_word_embeddings": True}, 16),
    "qwen3": ({"qk_norm": True, "head_dim": 128, "num_heads": 4}, 16),
    "all_biases": ({"qkv_bias": True, "o_bias": True, "mlp_bias": True}, 16),
    "one_layer": ({"num_layers": 1, "tie_word_embeddings": True}, 16),
}


@functools.cache
def library() -> Library:
    return Library(library_path(kernels_dir()))


@functools.cache
def emulated_library() -> Library:
    """With a program in place of the tile instructions: its amx level runs on any machine that has avx512_bf16."""
    path = kernels_dir() / f"emulated-{source_digest()}.so"
    return Library(path if path.is_file() else compile_library(path, (EMULATE_TILES,)))


def library_of(isa: Isa) -> Library:
    """The library that runs the level here."""
    return library() if library().best_isa(isa) == isa else emulated_library()


def levels() -> list[Isa]:
    """Every dispatch level: those of this machine, and amx, by emulation if need be, where there is a compiler."""
    own: list[Isa] = [level for level in Isa if level != Isa.NONE and library().best_isa(level) == level]
    if own[-1:] != [Isa.AVX512_BF16] or not HAS_COMPILER:
        return own
    return [*own, emulated_library().best_isa()]


def level_name(isa: Isa) -> str:
    emulated = library().best_isa(isa) != isa
    return f"{isa.name.lower()}{'_emulated' if emulated else ''}"


every_level = pytest.mark.parametrize("isa", levels(), ids=level_name)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def tiny_config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "architecture": "llama",
        "vocab_size": 131,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(10_000.0),
        "max_model_len": 8192,
        "tie_word_embeddings": False,
    }
    return ModelConfig(**{**fields, **changes})


def random_tensors(config: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """By Hugging Face name. Wide enough that logits span units and attention is far from uniform, at every width."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.4) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))

    def vector(size: int, mean: float) -> Tensor:
        return mean + 0.2 * torch.randn(size, generator=generator)

    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    widths = {
        "q_proj": config.num_heads * dim,
        "k_proj": config.num_kv_heads * dim,
        "v_proj": config.num_kv_heads * dim,
    }
    tensors = {
        "model.embed_tokens.weight": matrix(config.vocab_size, hidden, math.sqrt(hidden)),
        "model.norm.weight": vector(hidden, 1.0),
        "lm_head.weight": matrix(config.vocab_size, hidden, 2.0),
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = vector(hidden, 1.0)
        for name, width in widths.items():
            tensors[f"{prefix}.self_attn.{name}.weight"] = matrix(width, hidden)
            tensors[f"{prefix}.self_attn.{name}.bias"] = vector(width, 0.0)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = matrix(hidden, config.num_heads * dim)
        tensors[f"{prefix}.self_attn.o_proj.bias"] = vector(hidden, 0.0)
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = vector(dim, 1.0)
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            tensors[f"{prefix}.mlp.{name}_proj.weight"] = matrix(rows, columns)
            tensors[f"{prefix}.mlp.{name}_proj.bias"] = vector(rows, 0.0)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


@dataclass(slots=True)
class Rig:
    """A model, its pool full of NaN, and the sequences that lie in it. Holds logits of every token computed."""

    model: CompiledModel | Llama
    pool: DevicePool
    static: StaticRows
    rows: list[Row] = field(default_factory=list)
    parts: list[list[Tensor]] = field(default_factory=list)
    num_calls: int = 0

    def add(self, token_ids: Sequence[int]) -> Row:
        self.rows.append(self.static.add(token_ids))
        self.parts.append([])
        return self.rows[-1]

    def forward(self, batch: Batch) -> Tensor:
        """(num_samples, vocab_size) float32. Every other call leaves a core to busy tiers."""
        self.num_calls += 1
        batch = replace(batch, tiers_busy=self.num_calls % 2 == 0)
        with torch.inference_mode():
            logits: Tensor = self.model.forward(self.token_ids(batch), batch, self.pool.tensor)
        return logits

    @staticmethod
    def token_ids(batch: Batch) -> Tensor:
        return torch.from_numpy(batch.token_ids).to(torch.int64)  # (num_tokens,)

    def step(self, work: Sequence[tuple[Row, int]]) -> None:
        """Compute so many further tokens of each row and keep all their logits."""
        logits = self.forward(self.static.batch(work, all_logits=True))  # (num_tokens, vocab_size)
        for (row, _), part in zip(work, torch.split(logits, [num_new for _, num_new in work]), strict=True):
            self.parts[next(i for i, own in enumerate(self.rows) if own is row)].append(part)

    def unfinished(self) -> list[Row]:
        return [row for row in self.rows if row.num_computed < len(row.token_ids)]

    def run_randomly(self, rng: np.random.Generator, sizes: Sequence[int] = (1, 1, 2, 7, 30, 1 << 30)) -> None:
        """Mixed batches of random rows in random order, each with a random chunk, until all are computed."""
        while left := self.unfinished():
            chosen = rng.permutation(len(left))[: rng.integers(1, len(left) + 1)]
            chunks = rng.choice(sizes, len(chosen)).tolist()
            rest = [len(left[i].token_ids) - left[i].num_computed for i in chosen]
            self.step([(left[i], min(n, m)) for i, n, m in zip(chosen, chunks, rest, strict=True)])

    def logits(self) -> list[Tensor]:
        """Per row (num_tokens, vocab_size)."""
        return [torch.cat(parts) for parts in self.parts]


@dataclass(frozen=True, slots=True)
class Setting:
    """isa: NONE for the torch model. rng: shuffles the blocks; None: in order."""

    isa: Isa = Isa.NONE
    block_size: int = 16
    num_blocks: int = 64
    num_threads: int = 1
    max_tokens: int = 1024
    rng: np.random.Generator | None = None
    core: Library | None = None  # None: the one that runs the level here


@contextmanager
def rig(config: ModelConfig, tensors: dict[str, Tensor], setting: Setting) -> Iterator[Rig]:
    dtype = tensors["model.embed_tokens.weight"].dtype
    pool = DevicePool(PoolShape.of(config, setting.num_blocks, setting.block_size), dtype)
    pool.poison(range(setting.num_blocks))
    model: CompiledModel | Llama = (
        Llama(config, tensors)
        if setting.isa == Isa.NONE
        else CompiledModel(
            config,
            tensors,
            pool,
            setting.core or library_of(setting.isa),
            max_tokens=setting.max_tokens,
            num_threads=setting.num_threads,
            limit=setting.isa,
        )
    )
    try:
        yield Rig(model, pool, StaticRows(setting.num_blocks, setting.block_size, setting.rng))
    finally:
        model.close()
        pool.close()


def prompts(rng: np.random.Generator, lengths: Sequence[int], vocab_size: int = 131) -> list[list[int]]:
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]
