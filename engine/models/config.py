"""The shape of a model, in one vocabulary for all supported architectures and file formats."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. kind: default, linear, llama3. The llama3 fields follow Hugging Face's `rope_scaling`."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family.

    architecture: llama, mistral, qwen2 or qwen3. qkv_bias, o_bias, mlp_bias: which projections have biases. qk_norm:
    RMSNorm per head on q and k (Qwen3). sliding_window: tokens, None for full attention. eos_token_ids: all ids that
    end a generation.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_model_len: int
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    torch_dtype: str = "bfloat16"  # the checkpoint's own; what `auto` resolves to
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default=())
