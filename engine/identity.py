"""What a model's KV bytes depend on, as the store's cache identity."""

from __future__ import annotations

from collections.abc import Mapping

from pagetier.engine.models.config import ModelConfig
from pagetier.kvstore.block import KVGroup
from pagetier.kvstore.identity import CacheIdentity

LAYOUT = "block-layer-plane-head-token-dim"  # (num_layers, 2, num_kv_heads, block_size, head_dim) in one block


def cache_identity(
    config: ModelConfig,
    group: KVGroup,
    *,
    numerics: Mapping[str, str],
    block_size: int,
    fingerprint: str,
    hash_name: str,
) -> CacheIdentity:
    """The identity of KV that `config`'s weights of `fingerprint` produce.

    numerics: what decides rounding beside the pool's dtype: weight path, activations, kernels, instruction set.
    """
    rope = config.rope
    attention: dict[str, None | bool | int | float | str] = {
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "sliding_window": config.sliding_window,
        "qk_norm": config.qk_norm,
        "qkv_bias": config.qkv_bias,
        "rms_norm_eps": float(config.rms_norm_eps),
        "rope_kind": rope.kind,
        "rope_theta": float(rope.theta),
        "rope_factor": float(rope.factor),
        "rope_low_freq_factor": float(rope.low_freq_factor),
        "rope_high_freq_factor": float(rope.high_freq_factor),
        "rope_original_max_position": rope.original_max_position,
    }
    return CacheIdentity(
        architecture=config.architecture,
        attention=tuple(attention.items()),
        groups=(group,),
        layout=LAYOUT,
        block_size=block_size,
        weights_fingerprint=fingerprint,
        numerics=tuple(numerics.items()),
        hash_name=hash_name,
    )
