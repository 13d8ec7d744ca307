"""What a model's KV bytes depend on, as the store's cache identity; and how blocks are named under one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagetier.engine.models.config import ModelConfig
from pagetier.kvstore.block import KVGroup
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.identity import CacheIdentity
from pagetier.kvstore.keys import hash_named, root_key

MAX_VERSION_CHARS = 256
LAYOUT = "block-layer-plane-head-token-dim"  # (num_layers, 2, num_kv_heads, block_size, head_dim) in one block


def cache_identity(
    config: ModelConfig,
    group: KVGroup,
    *,
    numerics: Mapping[str, str],
    block_size: int,
    fingerprint: str,
    hash_name: str,
    weights_version: str = "",
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
        weights_version=checked_weights_version(weights_version),
        numerics=tuple(numerics.items()),
        hash_name=hash_name,
    )


def checked_weights_version(version: str) -> str:
    """`version` itself. Raises ConfigError for what is too long or no text to be part of an identity."""
    if not isinstance(version, str) or len(version) > MAX_VERSION_CHARS or not version.isprintable():
        raise ConfigError.bad_value("weights_version", version, f"up to {MAX_VERSION_CHARS} printable characters")
    return version


def salt_bytes(salt: str) -> bytes:
    """A tenant's `cache_salt` as keys are made of it. Raises ConfigError for half of a surrogate pair."""
    try:
        return salt.encode()
    except UnicodeEncodeError:
        raise ConfigError("cache_salt: contains half of a surrogate pair; allowed: text that UTF-8 can hold") from None


def roots_of(identity: CacheIdentity) -> Callable[[str], bytes]:
    """`cache_salt` -> root key of that tenant's chains; raises ConfigError as `salt_bytes` does."""
    domain, hash_ = identity.domain(), hash_named(identity.hash_name)
    return lambda salt: root_key(domain, salt_bytes(salt), hash_)
