"""Which facts about a model name its cache: all that its KV bytes depend on, in every process alike."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagetier.engine.device_pool import kv_group
from pagetier.engine.identity import cache_identity
from pagetier.engine.models.config import ModelConfig, RopeConfig
from pagetier.kvstore.keys import chain_names, root_key

ROPE = RopeConfig(theta=10_000.0, kind="llama3", factor=8.0, original_max_position=4096)
MODEL = ModelConfig(
    architecture="llama",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=ROPE,
    max_model_len=128,
    tie_word_embeddings=True,
)
# Why a field may change and the domain stay: KV does not depend on it, or the fingerprint of the weights has it.
ELSEWHERE = {
    "vocab_size": "a tensor's shape, in the fingerprint",
    "hidden_size": "a tensor's shape, in the fingerprint",
    "intermediate_size": "a tensor's shape, in the fingerprint",
    "o_bias": "a tensor, in the fingerprint",
    "mlp_bias": "a tensor, in the fingerprint",
    "tie_word_embeddings": "the output head writes no KV",
    "max_model_len": "a bound",
    "torch_dtype": "what `auto` means; the group has what was resolved",
    "bos_token_id": "a token",
    "eos_token_ids": "tokens",
}


def domain(config: ModelConfig, dtype: str = "float32", **changes: Any) -> bytes:
    facts = {"numerics": {"weight_path": dtype}, "block_size": 16, "fingerprint": "f" * 64, "hash_name": "sha256"}
    return cache_identity(config, kv_group(config, dtype), **{**facts, **changes}).domain()


def changed(value: object) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value * 2
        case str():
            return "linear" if value == "llama3" else "qwen3"
        case None:
            return 4096
        case tuple():
            return (*value, 7)
        case _:
            raise AssertionError(f"no other value of {value!r} is known")


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(ModelConfig) if f.name != "rope"])
def test_every_field_of_the_model_changes_the_domain_or_is_said_not_to(name: str) -> None:
    other = dataclasses.replace(MODEL, **{name: changed(getattr(MODEL, name))})
    assert (domain(other) != domain(MODEL)) == (name not in ELSEWHERE)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(RopeConfig)])
def test_every_field_of_the_rotation_changes_the_domain(name: str) -> None:
    other = dataclasses.replace(ROPE, **{name: changed(getattr(ROPE, name))})
    assert domain(dataclasses.replace(MODEL, rope=other)) != domain(MODEL)


def test_dtype_numerics_block_size_weights_and_hash_each_change_it() -> None:
    sound = {"weight_path": "float32"}
    others = [
        domain(MODEL, "bfloat16", numerics=sound),
        domain(MODEL, "float16", numerics=sound),
        domain(MODEL, numerics={"weight_path": "bfloat16"}),
        domain(MODEL, numerics={**sound, "isa": "avx2"}),
        domain(MODEL, numerics={**sound, "isa": "avx512"}),
        domain(MODEL, block_size=32),
        domain(MODEL, fingerprint="e" * 64),
        domain(MODEL, hash_name="xxh3-128"),
    ]
    assert len({domain(MODEL), *others}) == len(others) + 1


def keys() -> str:
    names = chain_names(root_key(domain(MODEL), b"salt"), list(range(64)), 16)
    return "".join(name.key.hex() for name in names)


def test_processes_of_different_hash_seeds_share() -> None:
    """A replica that names blocks its own way would find nothing, and nobody would be told."""
    said = set()
    for seed in ("0", "1", "4242"):
        command = [sys.executable, "-c", "from tests.engine.test_identity import keys; print(keys())"]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
        )
        said.add(done.stdout.strip())
    assert said == {keys()}
