"""A Hugging Face `config.json` -> ModelConfig, in the old and the new transformers layout.

What the engine does not implement is refused by name rather than ignored.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pagetier.engine.models.config import ModelConfig, RopeConfig
from pagetier.kvstore.errors import ConfigError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# defaults of the four transformers config classes where they matter and differ
_WINDOW_DEFAULT = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096}
_KV_HEADS_DEFAULT = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_TIE_DEFAULT = False
_DTYPES = ("float32", "bfloat16", "float16")


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ConfigError naming the file and the fault."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror or exc}") from None
    except ValueError as exc:
        raise ConfigError(f"{path}: not JSON: {exc}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return data


def load_hf_config(folder: Path) -> ModelConfig:
    """Read `config.json` (and `generation_config.json` for its end tokens) of a model folder."""
    path = folder / "config.json"
    generation = folder / "generation_config.json"
    return config_from_hf(load_json(path), load_json(generation) if generation.is_file() else {}, path)


def config_from_hf(config: dict[str, Any], generation: dict[str, Any], path: Path) -> ModelConfig:
    """ModelConfig of parsed files; `path` is for messages. Raises ConfigError naming the field."""
    return _Reader(config, path).config_with(generation)


def id_tuple(value: object) -> tuple[int, ...]:
    """`eos_token_id` is an id, a list of ids or null."""
    if isinstance(value, list):
        return tuple(int(item) for item in value)
    return (value,) if isinstance(value, int) else ()


class _Reader:
    def __init__(self, config: dict[str, Any], path: Path) -> None:
        self.config, self.path = config, path

    def fail(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.path}: {reason}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if value is None:
            raise self.fail(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(f"{key}: got {value!r}; allowed: a positive integer")
        return value

    def number(self, source: dict[str, Any], key: str, default: float | None = None) -> float:
        value = source.get(key)
        value = default if value is None else value
        if value is None:
            raise self.fail(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not (value > 0 and math.isfinite(value)):
            raise self.fail(f"{key}: got {value!r}; allowed: a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fail(f"{key}: got {value!r}; allowed: true or false")
        return value

    def architecture(self) -> str:
        named = self.config.get("architectures") or []
        if len(named) != 1 or named[0] not in ARCHITECTURES:
            shown = ", ".join(map(str, named)) or f"none named (model_type {self.config.get('model_type')!r})"
            raise self.fail(f"architecture {shown} is not supported; supported: {', '.join(ARCHITECTURES)}")
        return ARCHITECTURES[named[0]]

    def refuse_unsupported(self) -> None:
        config = self.config
        if quantization := config.get("quantization_config"):
            method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else quantization
            raise self.fail(
                f"quantization_config ({method}) is not supported; use the unquantised checkpoint or a GGUF"
            )
        for key in ("num_local_experts", "num_experts", "n_routed_experts"):
            if config.get(key):
                raise self.fail(f"{key}: mixture-of-experts models are not supported")
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise self.fail(f"hidden_act {activation!r} is not supported; supported: silu")
        for key, plain in (("partial_rotary_factor", 1.0), ("attention_multiplier", 1.0), ("logits_scaling", 1.0)):
            if config.get(key, plain) not in (plain, None):
                raise self.fail(f"{key} = {config[key]!r} is not supported")

    def config_with(self, generation: dict[str, Any]) -> ModelConfig:
        arch = self.architecture()
        self.refuse_unsupported()
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        head_dim = self.integer("head_dim", 128 if arch == "qwen3" else hidden // heads or 1)
        num_layers = self.integer("num_hidden_layers")
        bias = self.flag("attention_bias") if arch in ("llama", "qwen3") else False
        kv_heads = self._kv_heads(arch, heads)
        if heads % kv_heads:
            raise self.fail(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}")
        if head_dim % 2:
            raise self.fail(f"head_dim = {head_dim} is odd; RoPE needs an even one")
        eos = id_tuple(generation.get("eos_token_id")) + id_tuple(self.config.get("eos_token_id"))
        bos = id_tuple(self.config.get("bos_token_id"))
        return ModelConfig(
            architecture=arch,
            vocab_size=self.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self.number(self.config, "rms_norm_eps", 1e-6),
            rope=self._rope(),
            max_model_len=self.integer("max_position_embeddings"),
            tie_word_embeddings=self.flag("tie_word_embeddings", _TIE_DEFAULT),
            qkv_bias=bias or arch == "qwen2",
            o_bias=bias,
            mlp_bias=self.flag("mlp_bias") if arch == "llama" else False,
            qk_norm=arch == "qwen3",
            sliding_window=self._window(arch, num_layers),
            torch_dtype=self._dtype(),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(eos)),
        )

    def _kv_heads(self, arch: str, heads: int) -> int:
        if "num_key_value_heads" in self.config:
            return self.integer("num_key_value_heads", heads)
        return _KV_HEADS_DEFAULT.get(arch, heads)

    def _dtype(self) -> str:
        value = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        name = str(value).removeprefix("torch.")
        if name not in _DTYPES:
            raise self.fail(f"dtype {value!r} is not supported; supported: {', '.join(_DTYPES)}")
        return name

    def _window(self, arch: str, num_layers: int) -> int | None:
        if arch == "llama":
            if self.config.get("sliding_window"):
                raise self.fail("sliding_window is not part of LlamaForCausalLM and is not supported there")
            return None
        window = self.config.get("sliding_window", _WINDOW_DEFAULT[arch])
        if arch != "mistral" and not self.flag("use_sliding_window"):
            window = None
        if window is None:
            return None
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise self.fail(f"sliding_window: got {window!r}; allowed: a positive integer or null")
        if arch == "mistral":
            return window
        first = self.config.get("max_window_layers", 28)
        kinds = self.config.get("layer_types") or [
            "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
        ]
        if len(set(kinds)) > 1:
            raise self.fail("layer_types mixes full and sliding-window layers, which is not supported")
        return window if kinds[0] == "sliding_attention" else None

    def _rope(self) -> RopeConfig:
        """Theta and scaling: together in `rope_parameters` (new), or `rope_theta` beside `rope_scaling` (old)."""
        scaling = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        if not isinstance(scaling, dict):
            raise self.fail(f"rope_scaling: got {scaling!r}; allowed: an object or null")
        if any(isinstance(value, dict) for value in scaling.values()):
            raise self.fail("rope_parameters per layer type are not supported")
        theta = self.number(scaling, "rope_theta", self.number(self.config, "rope_theta", 10000.0))
        if scaling.get("partial_rotary_factor") not in (None, 1.0):
            raise self.fail(f"partial_rotary_factor = {scaling['partial_rotary_factor']!r} is not supported")
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind == "default":
            return RopeConfig(theta)
        if kind == "linear":
            return RopeConfig(theta, "linear", factor=self.number(scaling, "factor"))
        if kind == "llama3":
            original = self.number(
                scaling, "original_max_position_embeddings", self.config.get("original_max_position_embeddings")
            )
            return RopeConfig(
                theta,
                "llama3",
                factor=self.number(scaling, "factor"),
                low_freq_factor=self.number(scaling, "low_freq_factor"),
                high_freq_factor=self.number(scaling, "high_freq_factor"),
                original_max_position=int(original),
            )
        raise self.fail(f"RoPE scaling {kind!r} is not supported; supported: default, linear, llama3")
