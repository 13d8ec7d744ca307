"""Builds the real engine for the engine process, from the JSON-able fields that crossed to it.

The only file of the server that loads torch, and only the engine's side imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagetier.engine.build import Engine, ServeConfig, build_engine
from pagetier.engine.server.engine_process import ServedEngine
from pagetier.engine.server.wire import Ready
from pagetier.kvstore.config import StoreConfig


def build(fields: Mapping[str, Any]) -> ServedEngine:
    """The engine of a `ServeConfig` as plain fields, its store's under "store". Raises ConfigError, CapacityError."""
    engine = build_engine(serve_config(fields))

    def set_weights_version(version: str) -> bytes:
        engine.set_weights_version(version)
        return engine.identity.encode()

    return ServedEngine(engine.core, ready_of(engine), engine.close, set_weights_version)


def serve_config(fields: Mapping[str, Any]) -> ServeConfig:
    """Plain fields as the engine's configuration; what is left out has its default. Raises ConfigError."""
    own = dict(fields)
    store = dict(own.pop("store", {}))
    for name in ("nvme_path", "mac_key_file"):
        if store.get(name) is not None:
            store[name] = Path(store[name])
    store["tiers"] = tuple(store.get("tiers", ()))
    return ServeConfig(**own, store=StoreConfig(**store))


def ready_of(engine: Engine) -> Ready:
    """What the API process must know. No sequence can outgrow the device pool, so the pool bounds the length too."""
    config, tokenizer = engine.config, engine.tokenizer
    return Ready(
        identity=engine.identity.encode(),
        block_size=config.block_size,
        hash_name=engine.identity.hash_name,
        max_len_tokens=min(config.max_model_len, config.num_blocks * config.block_size),
        vocab_size=engine.model_config.vocab_size,
        max_num_seqs=config.max_num_seqs,
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
        eos_token_ids=tuple(dict.fromkeys((*engine.model_config.eos_token_ids, *tokenizer.eos_token_ids))),
        tiers=engine.tiers,
        tiers_down=engine.tiers_down,
    )
