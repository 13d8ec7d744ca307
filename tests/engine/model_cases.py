"""Tiny random checkpoints, one per architecture feature, with transformers' model as the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from pagetier.engine.models.config import ModelConfig, RopeConfig
from pagetier.engine.models.llama import Llama

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SIZE = {"vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}


@dataclass(frozen=True, slots=True)
class ModelCase:
    """kind: transformers' class prefix. options: of its config. ours: ModelConfig fields that follow from them."""

    name: str
    kind: str
    options: dict[str, Any]
    ours: dict[str, Any]
    rope: RopeConfig = RopeConfig(10_000.0)


CASES = [
    ModelCase("llama", "Llama", {"num_attention_heads": 6, "num_key_value_heads": 2}, {}),
    ModelCase(
        "llama3_rope",
        "Llama",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {**LLAMA3, "rope_theta": 5_000.0, "original_max_position_embeddings": 64},
        },
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
        RopeConfig(5_000.0, "llama3", 8.0, 1.0, 4.0, 64),
    ),
    ModelCase(
        "linear_rope",
        "Llama",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
        },
        {},
        RopeConfig(10_000.0, "linear", 4.0),
    ),
    ModelCase(
        "mistral_window",
        "Mistral",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 19},
        {"sliding_window": 19},
    ),
    ModelCase(
        "qwen2",
        "Qwen2",
        {"num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": True},
        {"qkv_bias": True},
    ),
    ModelCase(
        "qwen3",
        "Qwen3",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
        {"qk_norm": True},
    ),
]


@dataclass(frozen=True, slots=True)
class BuiltCase:
    """logits: token ids -> (num_tokens, vocab_size) float32 of transformers' float32 model, no cache."""

    config: ModelConfig
    tensors: dict[str, Tensor]
    logits: Callable[[list[int]], Tensor]

    def model(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Llama:
        return Llama(self.config, {name: tensor.to(dtype) for name, tensor in self.tensors.items()}, device)


def build(case: ModelCase, seed: int = 0) -> BuiltCase:
    """The case with weights wide enough that logits span tens and attention is far from uniform."""
    hf_config = getattr(transformers, f"{case.kind}Config")(
        **SIZE, max_position_embeddings=512, attn_implementation="eager", **case.options
    )
    torch.manual_seed(seed)
    hf_model = getattr(transformers, f"{case.kind}ForCausalLM")(hf_config).eval()
    with torch.no_grad():
        for name, parameter in hf_model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    config = ModelConfig(
        architecture=case.kind.lower(),
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.intermediate_size,
        num_layers=hf_config.num_hidden_layers,
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=hf_config.num_key_value_heads,
        head_dim=hf_config.head_dim if getattr(hf_config, "head_dim", None) else 48 // hf_config.num_attention_heads,
        rms_norm_eps=hf_config.rms_norm_eps,
        rope=case.rope,
        max_model_len=512,
        tie_word_embeddings=hf_config.tie_word_embeddings,
        **case.ours,
    )
    tensors = {name: tensor.detach() for name, tensor in hf_model.state_dict().items()}

    def logits(token_ids: list[int]) -> Tensor:
        with torch.inference_mode():
            out: Tensor = hf_model(torch.tensor([token_ids]), use_cache=False).logits[0]  # (num_tokens, vocab_size)
        return out.clone()

    return BuiltCase(config, tensors, logits)
