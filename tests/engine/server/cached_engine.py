"""A real engine core over the ledger model, with real tiers: small enough that every hit is known beforehand.

Tokens are bytes, four make a block; no weights are loaded. What the server above sees is the engine of a `serve`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pagetier.connectors.local import LocalConnector
from pagetier.connectors.remote import RemoteConnector, open_remote_store
from pagetier.engine.config import EngineConfig
from pagetier.engine.core import EngineCore
from pagetier.engine.identity import roots_of
from pagetier.engine.server.engine_process import ServedEngine
from pagetier.engine.server.wire import Ready
from pagetier.kvstore.block import Part
from pagetier.kvstore.config import StoreConfig
from pagetier.kvstore.store import open_store
from tests.engine.ledger import LedgerBlocks, LedgerRunner
from tests.engine.server.double import BLOCK_SIZE, IDENTITY

FACTORY = "tests.engine.server.cached_engine:build"
VOCAB_SIZE = 256  # plain bytes: it never ends by itself
PART = Part(0, 0, 1, 0, 1)


def build(config: Mapping[str, Any]) -> ServedEngine:
    """The factory an `EngineOrder` names. nvme_path, redis_url: the tiers there are. num_blocks: of the device pool.
    weights_version: another one is another domain. pins_path: where pins are kept. store_url: a store service instead
    of tiers."""
    fields = dict(config)
    num_blocks = fields.pop("num_blocks", 64)
    identity = replace(IDENTITY, weights_version=fields.pop("weights_version", ""))
    tiers = tuple(name for name, key in (("nvme", "nvme_path"), ("redis", "redis_url")) if key in fields)
    paths: dict[str, Any] = {key: Path(fields.pop(key)) for key in ("nvme_path", "pins_path") if key in fields}
    store_config = StoreConfig(tiers=tiers, nvme_size=16 << 20, nvme_allow_unsafe=True, **paths, **fields)
    blocks = LedgerBlocks(num_blocks, BLOCK_SIZE)
    runner = LedgerRunner(blocks, VOCAB_SIZE, {}, lazy=False)
    runner._expected = defaultdict(lambda: np.zeros(0, np.uint32))  # every request is welcome
    connector: LocalConnector | None = None
    if store_config.store_url is not None:
        remote = open_remote_store(store_config, identity, PART, blocks.block_nbytes)
        connector, tiers = RemoteConnector(remote, blocks), remote.tier_names
    elif tiers:
        store = open_store(store_config, identity, PART, blocks.block_nbytes)
        connector = LocalConnector(store, blocks)
    engine_config = EngineConfig(num_blocks=num_blocks, max_model_len=240, block_size=BLOCK_SIZE, paranoid=True)
    core = EngineCore(engine_config, runner, connector, root_of=roots_of(identity), block_nbytes=blocks.block_nbytes)
    ready = Ready(
        identity=identity.encode(),
        block_size=BLOCK_SIZE,
        hash_name="sha256",
        max_len_tokens=240,
        vocab_size=VOCAB_SIZE,
        max_num_seqs=engine_config.max_num_seqs,
        max_num_queued_reqs=engine_config.max_num_queued_reqs,
        max_num_queued_tokens=engine_config.max_num_queued_tokens,
        eos_token_ids=(),
        tiers=("device", *tiers),
    )

    def close(timeout_s: float) -> None:
        core.flush(timeout_s)
        core.close()

    def set_weights_version(version: str) -> bytes:
        updated = replace(identity, weights_version=version)
        core.set_identity(updated)
        return updated.encode()

    return ServedEngine(core, ready, close, set_weights_version)
