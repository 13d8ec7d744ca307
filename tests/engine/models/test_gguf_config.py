"""GGUF metadata gives the same ModelConfig as the model's config.json, and refuses the rest by name."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagetier.engine.models.config import ModelConfig, RopeConfig
from pagetier.engine.models.gguf_config import config_from_gguf, llama3_factors
from pagetier.engine.models.hf_config import load_hf_config
from pagetier.engine.weights.gguf_header import GGUFHeader, GGUFTensor
from pagetier.engine.weights.loader import load_config
from pagetier.kvstore.errors import ConfigError
from tests.engine.checkpoints import hf_model, write_gguf

BASE: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.vocab_size": 100,
    "tokenizer.ggml.eos_token_id": 2,
}


def read(changes: dict[str, Any] | None = None, factors: list[float] | None = None, *names: str) -> ModelConfig:
    metadata = {key: value for key, value in {**BASE, **(changes or {})}.items() if value is not None}
    tensors = {name: GGUFTensor(name, "Q4_1", (64, 64), 0, 0) for name in names}
    return config_from_gguf(GGUFHeader(Path("m.gguf"), 3, metadata, tensors), factors)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
        ("Qwen3ForCausalLM", {}),
        ("MistralForCausalLM", {"sliding_window": None}),
    ],
)
def test_both_formats_of_one_model_agree(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = hf_model(architecture, **changes)
    model.save_pretrained(tmp_path)
    write_gguf(tmp_path / "m.gguf", model)
    expected = load_hf_config(tmp_path)
    if architecture.startswith("Mistral"):
        expected = replace(expected, architecture="llama")  # that is how llama.cpp ships it
    assert load_config(tmp_path / "m.gguf") == expected


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({}, "rms_norm_eps", 1e-5),
        ({}, "rope", RopeConfig(10000.0)),
        ({"llama.rope.freq_base": 1e6}, "rope", RopeConfig(1e6)),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            "rope",
            RopeConfig(10000.0, "linear", 2.0),
        ),
        ({"llama.rope.scale_linear": 4.0}, "rope", RopeConfig(10000.0, "linear", 4.0)),
        ({"llama.attention.head_count_kv": [2, 2]}, "num_kv_heads", 2),
        ({"llama.attention.head_count_kv": None}, "num_kv_heads", 4),
        ({"llama.attention.key_length": 32, "llama.attention.value_length": 32}, "head_dim", 32),
        ({"llama.attention.sliding_window": 32}, "sliding_window", 32),
        ({"llama.vocab_size": None, "tokenizer.ggml.tokens": ["a", "b"]}, "vocab_size", 2),
        ({"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}, "eos_token_ids", (2, 5)),
        ({}, "tie_word_embeddings", True),
        ({}, "torch_dtype", "bfloat16"),
    ],
)
def test_each_field(changes: dict[str, Any], field: str, value: object) -> None:
    assert getattr(read(changes), field) == value


def test_tensors_tell_tying_and_biases() -> None:
    config = read({}, None, "output.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias")
    assert (config.tie_word_embeddings, config.qkv_bias, config.o_bias, config.mlp_bias) == (False, True, True, False)


def test_llama3_scaling_is_read_off_its_factors() -> None:
    """The factors come from transformers' own function, in float32 as llama.cpp writes them."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theirs = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, rope_parameters=parameters, max_position_embeddings=131072
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    plain = 1.0 / 5e5 ** (torch.arange(0, 64, 2).float() / 64)
    factors = (plain / scaled).tolist()
    assert any(1.0 < factor < 32.0 for factor in factors)  # some lie in the smooth part
    changes = {"llama.rope.freq_base": 5e5, "llama.embedding_length": 256}
    assert read(changes, factors).rope == RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192)
    with pytest.raises(ConfigError, match="rope_freqs.weight does not hold Llama 3 RoPE scaling"):
        read(changes, [*factors[:-1], 31.0])
    with pytest.raises(ConfigError, match="rope_freqs.weight does not hold Llama 3 RoPE scaling"):
        read(changes, factors[:-1])


def test_factors_are_one_where_nothing_is_scaled() -> None:
    assert all(math.isclose(f, 1.0) for f in llama3_factors(RopeConfig(1e4, "llama3", 1.0, 1.0, 4.0, 8192), 64))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"general.architecture": "gemma3"}, "architecture 'gemma3' is not supported; supported: llama, qwen2, qwen3"),
        ({"general.architecture": None}, "architecture '' is not supported"),
        ({"llama.expert_count": 8}, "llama.expert_count: mixture-of-experts"),
        ({"llama.embedding_length": None}, "metadata key llama.embedding_length is missing"),
        ({"llama.embedding_length": "big"}, "llama.embedding_length: got 'big'; allowed: a positive number"),
        ({"llama.block_count": 0}, "llama.block_count: got 0"),
        ({"llama.feed_forward_length": [64, 128]}, "llama.feed_forward_length differs from layer to layer"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count = 8 differs from the head size 16"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length = 8 differs from the head size 16"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}, "RoPE scaling 'yarn' is not supported"),
        ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base: got nan"),
        ({"llama.attention.sliding_window_pattern": [True, False]}, "sliding_window_pattern"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        read(changes)
    assert str(caught.value).startswith("m.gguf: ") and "\n" not in str(caught.value)
