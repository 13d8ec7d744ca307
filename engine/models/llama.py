"""Llama, Mistral, Qwen2 and Qwen3 over the block pool, in plain torch: what serves without a compiled core, and the
reference for one. Knows batches and blocks, nothing of requests."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pagetier.engine.batch import Batch
from pagetier.engine.models.attention import AttentionPlan, PoolView, Scratch
from pagetier.engine.models.config import ModelConfig, RopeConfig
from pagetier.engine.models.linear import Linear
from pagetier.kvstore.errors import ConfigError

KERNEL_REVISION = "torch-1"  # raise it whenever the arithmetic here changes


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """(head_dim / 2,) float32 radians per token. llama3: `_compute_llama3_parameters` of huggingface/transformers,
    src/transformers/modeling_rope_utils.py. Raises ConfigError for an unknown kind."""
    frequencies = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)  # (head_dim / 2,)
    if rope.kind == "linear":
        frequencies /= rope.factor
    elif rope.kind == "llama3":
        turns = rope.original_max_position * frequencies / (2 * math.pi)  # (head_dim / 2,) within the original context
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = smooth.clamp(0.0, 1.0)  # (head_dim / 2,) 1: high frequency, unscaled
        frequencies = kept * frequencies + (1 - kept) * frequencies / rope.factor
    elif rope.kind != "default":
        raise ConfigError.unknown_name("rope kind", rope.kind, ("default", "linear", "llama3"))
    return frequencies.float()


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer. qkv: q, k and v heads stacked; gate_up: gate over up."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class _Weights:
    """The checkpoint's tensors by Hugging Face name, moved to the device. Raises ConfigError for a missing one."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors = tensors
        self._device = device

    def __call__(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ConfigError(f"the checkpoint lacks the tensor {name!r}")
        return self._tensors[name].to(self._device)

    def linear(self, prefix: str, names: tuple[str, ...], bias: bool) -> Linear:
        """The projections `names` under `prefix`, stacked into one."""
        weight = torch.cat([self(f"{prefix}.{name}.weight") for name in names])  # (sum of outs, in)
        biases = torch.cat([self(f"{prefix}.{name}.bias") for name in names]) if bias else None
        return Linear(weight, biases)


class Llama:
    """A decoder of the Llama family on one device.

    tensors: Hugging Face names, all of the compute dtype. The model keeps no reference to the projections where
    `Linear` packs its own copy: drop the mapping after building and the checkpoint's memory is freed.
    """

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        self.config = config
        self.device = torch.device(device)
        self.core_sampler = None
        weights = _Weights(tensors, self.device)
        self._embedding = weights("model.embed_tokens.weight")  # (vocab_size, hidden_size)
        self.dtype = self._embedding.dtype
        self._layers = [self._layer(weights, f"model.layers.{i}") for i in range(config.num_layers)]
        self._final_norm = weights("model.norm.weight")  # (hidden_size,)
        head = self._embedding if config.tie_word_embeddings else weights("lm_head.weight")
        self._head = Linear(head)
        self._frequencies = rope_frequencies(config.rope, config.head_dim).to(self.device)  # (head_dim / 2,)
        self._scratch = Scratch(self.dtype, self.device)

    @property
    def numerics(self) -> dict[str, str]:
        """What decides the rounding of K and V besides weights and dtype."""
        if self.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(self.device)
            isa = f"cuda-sm{major}{minor}"
        else:
            isa = f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability().lower()}"
        return {"kernel_revision": KERNEL_REVISION, "isa": isa}

    def prefill_s(self, num_new: int, context: int) -> float | None:
        """Not measured."""
        return None

    @property
    def is_batch_invariant(self) -> bool:
        """No: library GEMMs choose their order of additions by the number of rows."""
        return False

    def close(self) -> None:
        """Nothing to let go of."""

    def _layer(self, weights: _Weights, prefix: str) -> _Layer:
        config = self.config
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return _Layer(
            input_norm=weights(f"{prefix}.input_layernorm.weight"),
            qkv=weights.linear(attention, ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
            q_norm=weights(f"{attention}.q_norm.weight") if config.qk_norm else None,
            k_norm=weights(f"{attention}.k_norm.weight") if config.qk_norm else None,
            output=weights.linear(attention, ("o_proj",), config.o_bias),
            mlp_norm=weights(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=weights.linear(mlp, ("gate_proj", "up_proj"), config.mlp_bias),
            down=weights.linear(mlp, ("down_proj",), config.mlp_bias),
        )

    def prepare(self, batch: Batch) -> None:
        """There is nothing to make ready."""

    def forward(self, token_ids: Tensor, batch: Batch, pool: Tensor) -> Tensor:
        """Runs the batch's tokens, writes their K and V, returns float32 logits (num_samples, vocab_size).

        token_ids: (num_tokens,) int64 on the model's device, token sources resolved. pool: (num_blocks, num_layers, 2,
        num_kv_heads, block_size, head_dim) in the model's dtype. Call under torch.inference_mode, from one thread.
        """
        config = self.config
        plan = AttentionPlan(batch, PoolView(pool, config.num_heads, config.sliding_window), self._scratch)
        positions = torch.from_numpy(batch.positions).to(self.device)  # (num_tokens,)
        angles = positions.float()[:, None, None] * self._frequencies  # (num_tokens, 1, head_dim / 2)
        cos = angles.cos().repeat(1, 1, 2)  # (num_tokens, 1, head_dim)
        sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)  # (num_tokens, 1, head_dim)
        wanted = torch.from_numpy(batch.logits_indices).to(self.device)  # (num_samples,)
        hidden = self._embedding[token_ids]  # (num_tokens, hidden_size)
        for index, layer in enumerate(self._layers):
            attended = self._attention(index, layer, hidden, (cos, sin), plan)  # (num_tokens, num_heads * head_dim)
            if index == config.num_layers - 1:  # past its K and V, the last layer matters only where logits are wanted
                attended, hidden = attended[wanted], hidden[wanted]
                if not len(wanted):
                    return torch.empty(0, config.vocab_size, device=self.device)
            hidden = hidden + layer.output(attended)  # (num_tokens, hidden_size)
            gate_up = layer.gate_up(self._norm(hidden, layer.mlp_norm))  # (num_tokens, 2 * intermediate_size)
            gate, up = gate_up.chunk(2, dim=-1)  # 2 x (num_tokens, intermediate_size)
            hidden = hidden + layer.down(F.silu(gate).mul_(up))  # (num_tokens, hidden_size)
        return self._head.float32(self._norm(hidden, self._final_norm))  # (num_samples, vocab_size)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _attention(
        self, index: int, layer: _Layer, hidden: Tensor, rotation: tuple[Tensor, Tensor], plan: AttentionPlan
    ) -> Tensor:
        config = self.config
        num_heads, num_rotated = config.num_heads, config.num_heads + config.num_kv_heads
        qkv = layer.qkv(self._norm(hidden, layer.input_norm)).view(len(hidden), -1, config.head_dim)
        q_and_k = qkv[:, :num_rotated]  # (num_tokens, num_heads + num_kv_heads, head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            qkv[:, :num_heads] = self._norm(q_and_k[:, :num_heads], layer.q_norm)
            qkv[:, num_heads:num_rotated] = self._norm(q_and_k[:, num_heads:], layer.k_norm)
        cos, sin = rotation
        swapped = (
            q_and_k.view(len(hidden), num_rotated, 2, -1).flip(-2).flatten(-2)
        )  # (num_tokens, num_rotated, head_dim)
        torch.addcmul(q_and_k * cos, swapped, sin, out=q_and_k)  # in float32, rounded once
        plan.write(index, qkv[:, num_heads:])
        return plan.attend(index, qkv[:, :num_heads]).flatten(1)
