"""What config.json says arrives whole, in old and new layouts, and what is not supported is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagetier.engine.models.config import ModelConfig, RopeConfig
from pagetier.engine.models.hf_config import config_from_hf, load_hf_config
from pagetier.kvstore.errors import ConfigError

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return config_from_hf({**BASE, **changes}, generation or {}, Path("m/config.json"))


def test_plain_llama() -> None:
    assert read() == ModelConfig(
        architecture="llama",
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope=RopeConfig(10000.0),
        max_model_len=256,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        bos_token_id=1,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(5e5, "linear", 2.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2}}, RopeConfig(5e5, "linear", 2.0)),
        ({"rope_scaling": {"rope_type": "default"}}, RopeConfig(1e4)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
        ),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(5e5)),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}},
            RopeConfig(5e5, "linear", 4.0),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
        ),
    ],
)
def test_rope_in_old_and_new_layout(changes: dict[str, Any], rope: RopeConfig) -> None:
    assert read(**changes).rope == rope


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"head_dim": 32}, "head_dim", 32),
        ({"head_dim": None}, "head_dim", 16),
        ({"architectures": ["Qwen3ForCausalLM"]}, "head_dim", 128),
        ({"num_key_value_heads": None}, "num_kv_heads", 4),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", True),
        ({"attention_bias": True}, "qkv_bias", True),
        ({"attention_bias": True}, "o_bias", True),
        ({"mlp_bias": True}, "mlp_bias", True),
        ({"architectures": ["Qwen2ForCausalLM"]}, "qkv_bias", True),
        ({"architectures": ["Qwen2ForCausalLM"]}, "o_bias", False),
        ({"architectures": ["Qwen3ForCausalLM"]}, "qk_norm", True),
        ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, "o_bias", True),
        ({"architectures": ["MistralForCausalLM"]}, "sliding_window", 4096),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 32}, "sliding_window", 32),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, "sliding_window", None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32}, "sliding_window", None),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "use_sliding_window": False},
            "sliding_window",
            None,
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 32,
                "use_sliding_window": True,
                "max_window_layers": 0,
            },
            "sliding_window",
            32,
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "use_sliding_window": True},
            "sliding_window",
            None,  # max_window_layers defaults to 28: none of the two layers has a window
        ),
        ({"torch_dtype": "float16"}, "torch_dtype", "float16"),
        ({"dtype": "float32"}, "torch_dtype", "float32"),
        ({"eos_token_id": [2, 5]}, "eos_token_ids", (2, 5)),
        ({"eos_token_id": None}, "eos_token_ids", ()),
    ],
)
def test_each_field(changes: dict[str, Any], field: str, value: object) -> None:
    assert getattr(read(**changes), field) == value


def test_generation_config_adds_end_tokens() -> None:
    assert read({"eos_token_id": [7, 2]}).eos_token_ids == (7, 2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            "MixtralForCausalLM is not supported; supported: Llama",
        ),
        ({"architectures": None, "model_type": "gemma"}, r"none named \(model_type 'gemma'\) is not supported"),
        ({"architectures": ["LlamaForCausalLM", "B"]}, "architecture LlamaForCausalLM, B is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\) is not supported"),
        ({"num_local_experts": 8}, "num_local_experts: mixture-of-experts models are not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE scaling 'yarn' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "RoPE scaling 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "RoPE scaling 'longrope' is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters per layer type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor: got -1; allowed: a positive number"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "is missing"),
        ({"rope_scaling": "big"}, "rope_scaling: got 'big'"),
        ({"rope_theta": "big"}, "rope_theta: got 'big'; allowed: a positive number"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": 0}, "hidden_size: got 0; allowed: a positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers: got True"),
        ({"num_attention_heads": 3}, "num_attention_heads = 3 is not a multiple of num_key_value_heads = 2"),
        ({"head_dim": 15}, "head_dim = 15 is odd"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: got 'yes'"),
        ({"sliding_window": 32}, "sliding_window is not part of LlamaForCausalLM"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "sliding_window: got -1"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 1},
            "layer_types mixes full and sliding-window layers",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        read(**changes)
    assert str(caught.value).startswith("m/config.json: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
        ("Llama", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}}),
        ("Mistral", {"sliding_window": 32}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen2", {}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}),
        ("Qwen3", {"attention_bias": True}),
    ],
)
def test_what_transformers_saves_is_read_as_transformers_means_it(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    import transformers

    sizes = {key: value for key, value in BASE.items() if key not in ("architectures", "torch_dtype")}
    theirs = getattr(transformers, f"{architecture}Config")(**sizes, **changes)
    theirs.architectures = [f"{architecture}ForCausalLM"]
    theirs.save_pretrained(tmp_path)
    ours = load_hf_config(tmp_path)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)  # Qwen2Config has none
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope.kind == theirs.rope_parameters["rope_type"]
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.o_bias == getattr(theirs, "attention_bias", False)
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    assert (ours.rms_norm_eps, ours.max_model_len) == (theirs.rms_norm_eps, theirs.max_position_embeddings)


def test_a_config_that_is_not_an_object_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read: No such file"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match=r"config\.json: not a JSON object"):
        load_hf_config(tmp_path)
