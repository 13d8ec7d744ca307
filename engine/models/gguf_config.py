"""GGUF metadata -> ModelConfig, for the architectures llama (Mistral ships as llama too), qwen2 and qwen3.

What the engine does not implement is refused by name. Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
from typing import Any

from pagetier.engine.models.config import ModelConfig, RopeConfig
from pagetier.engine.weights.gguf_header import GGUFHeader
from pagetier.kvstore.errors import ConfigError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# rope_freqs.weight is written for llama3 scaling only; its parameters are these in every Llama 3.x (factor is read off)
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def config_from_gguf(header: GGUFHeader, rope_factors: list[float] | None = None) -> ModelConfig:
    """The model's shape. `rope_factors`: the values of `rope_freqs.weight` when the file has that tensor.

    Raises ConfigError naming the key that is missing, malformed or not supported.
    """
    return _Reader(header).config(rope_factors)


class _Reader:
    def __init__(self, header: GGUFHeader) -> None:
        self.header, self.metadata, self.arch = header, header.metadata, header.architecture

    def fail(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.header.path}: {reason}")

    def number(self, key: str, default: Any = None) -> Any:
        """A positive number under `<arch>.<key>`; one value per layer is fine when all are equal."""
        name = f"{self.arch}.{key}"
        value = self.metadata.get(name, default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        if value is None:
            raise self.fail(f"metadata key {name} is missing")
        if isinstance(value, list):
            raise self.fail(f"{name} differs from layer to layer, which is not supported")
        if isinstance(value, bool | str) or not value > 0 or not math.isfinite(value):
            raise self.fail(f"{name}: got {value!r}; allowed: a positive number")
        return value

    def config(self, rope_factors: list[float] | None) -> ModelConfig:
        if self.arch not in ARCHITECTURES:
            raise self.fail(f"architecture {self.arch!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
        if self.metadata.get(f"{self.arch}.expert_count", 0):
            raise self.fail(f"{self.arch}.expert_count: mixture-of-experts models are not supported")
        hidden, heads = int(self.number("embedding_length")), int(self.number("attention.head_count"))
        head_dim = int(self.number("attention.key_length", hidden // heads or 1))
        for key in ("attention.value_length", "rope.dimension_count"):
            if (other := int(self.number(key, head_dim))) != head_dim:
                raise self.fail(f"{self.arch}.{key} = {other} differs from the head size {head_dim}: not supported")
        tensors = self.header.tensors
        return ModelConfig(
            architecture=self.arch,
            vocab_size=self._vocab_size(),
            hidden_size=hidden,
            intermediate_size=int(self.number("feed_forward_length")),
            num_layers=int(self.number("block_count")),
            num_heads=heads,
            num_kv_heads=int(self.number("attention.head_count_kv", heads)),
            head_dim=head_dim,
            rms_norm_eps=_short(self.number("attention.layer_norm_rms_epsilon")),
            rope=self._rope(head_dim, rope_factors),
            max_model_len=int(self.number("context_length")),
            tie_word_embeddings="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            o_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_down.bias" in tensors,
            qk_norm=self.arch == "qwen3",
            sliding_window=self._window(),
            torch_dtype=_own_dtype(self.header),
            bos_token_id=self.metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=eos_token_ids(self.metadata),
        )

    def _window(self) -> int | None:
        if f"{self.arch}.attention.sliding_window_pattern" in self.metadata:
            raise self.fail(f"{self.arch}.attention.sliding_window_pattern (mixed window and full) is not supported")
        window = self.metadata.get(f"{self.arch}.attention.sliding_window")
        return int(window) if window else None

    def _vocab_size(self) -> int:
        embedding = self.header.tensors.get("token_embd.weight")
        if embedding is not None:
            return embedding.shape[0]
        return int(self.number("vocab_size", len(self.metadata.get("tokenizer.ggml.tokens", ())) or None))

    def _rope(self, head_dim: int, factors: list[float] | None) -> RopeConfig:
        theta = float(self.number("rope.freq_base", 10000.0))
        kind = self.metadata.get(f"{self.arch}.rope.scaling.type", "none")
        legacy = self.metadata.get(f"{self.arch}.rope.scale_linear")
        if legacy is not None and kind == "none" and legacy != 1.0:
            return RopeConfig(theta, "linear", factor=float(self.number("rope.scale_linear")))
        if factors is not None:
            if kind != "none":
                raise self.fail(f"rope_freqs.weight together with {kind} RoPE scaling is not supported")
            return self._llama3(theta, head_dim, factors)
        if kind == "none":
            return RopeConfig(theta)
        if kind == "linear":
            return RopeConfig(theta, "linear", factor=float(self.number("rope.scaling.factor")))
        raise self.fail(f"RoPE scaling {kind!r} is not supported; supported: none, linear, llama3")

    def _llama3(self, theta: float, head_dim: int, factors: list[float]) -> RopeConfig:
        """Recognise Llama 3 scaling by recomputing the file's per-frequency factors."""
        rope = RopeConfig(theta, "llama3", max(factors), LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL)
        expected = llama3_factors(rope, head_dim)
        near = len(expected) == len(factors) and all(
            math.isclose(a, b, rel_tol=1e-3) for a, b in zip(expected, factors, strict=True)
        )
        if not near:
            raise self.fail("rope_freqs.weight does not hold Llama 3 RoPE scaling, the only kind supported there")
        return rope


def llama3_factors(rope: RopeConfig, head_dim: int) -> list[float]:
    """(head_dim / 2,) by which each rotary frequency is divided. Source: transformers, `_compute_llama3_parameters`."""
    out = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope.theta ** (index / head_dim)
        if wavelength < rope.original_max_position / rope.high_freq_factor:
            out.append(1.0)
        elif wavelength > rope.original_max_position / rope.low_freq_factor:
            out.append(rope.factor)
        else:
            smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
                rope.high_freq_factor - rope.low_freq_factor
            )
            out.append(1 / ((1 - smooth) / rope.factor + smooth))
    return out


def eos_token_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end a generation: end of sequence, of turn and of message, as the metadata names them."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    return tuple(dict.fromkeys(int(value) for value in found if value is not None))


def _short(value: float) -> float:
    """The decimal that was meant: GGUF stores 1e-05 as float32, which reads 9.99999975e-06."""
    return float(f"{value:.6g}")


def _own_dtype(header: GGUFHeader) -> str:
    """What `auto` means: the embedding's float type, and bfloat16 for quantised files (F32 there is norms only)."""
    embedding = header.tensors.get("token_embd.weight")
    projection = header.tensors.get("blk.0.attn_q.weight")
    kinds = {tensor.ggml_type for tensor in (embedding, projection) if tensor is not None}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds == {"F16"} else "bfloat16"
