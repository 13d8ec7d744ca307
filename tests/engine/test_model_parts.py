"""KV of a real model of 8 heads over 4 KV heads: what one process stored is what ranks of TP and PP read, and back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagetier.engine.llm import LLM
from pagetier.engine.sampling_params import SamplingParams
from pagetier.kvstore.block import BlockStatus, Part
from pagetier.kvstore.config import MIB, StoreConfig
from pagetier.kvstore.identity import CacheIdentity
from pagetier.kvstore.identity_places import read_identity
from pagetier.kvstore.job import Completion, LoadDone, LookupDone, PutDone
from pagetier.kvstore.keys import chain_names, root_key
from pagetier.kvstore.parts import Division, divide
from pagetier.kvstore.store import TieredStore, open_store
from tests.engine.checkpoints import byte_level_tokenizer, hf_model, tokenizer_fields, write_gguf
from tests.kvstore.valkey import Valkey, valkey, valkey_server  # noqa: F401

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 4, 8, 16
WHOLE = Part(0, 0, NUM_LAYERS, 0, NUM_KV_HEADS)
HEAD_BYTES = BLOCK_SIZE * HEAD_DIM * 4  # float32, of one layer and plane
PROMPT = [int(token) for token in np.random.default_rng(1).integers(3, 440, 5 * BLOCK_SIZE + 1)]
DEGREES = [(1, 2), (1, 4), (2, 1), (2, 2)]  # stages, ranks


def nbytes(part: Part) -> int:
    return (part.end_layer - part.first_layer) * 2 * (part.end_head - part.first_head) * HEAD_BYTES


def cut(whole: bytes, part: Part) -> bytes:
    """A part of a block, the slow obvious way."""
    runs = np.frombuffer(whole, np.uint8).reshape(NUM_LAYERS, 2, NUM_KV_HEADS, HEAD_BYTES)
    return runs[part.first_layer : part.end_layer, :, part.first_head : part.end_head].tobytes()


def answer(store: TieredStore, kind: type[Completion]) -> Any:
    limit_s = time.monotonic() + 20.0
    while time.monotonic() < limit_s:
        for completion in store.poll():
            assert isinstance(completion, kind)
            return completion
        time.sleep(0.001)
    raise AssertionError("no answer")


class Medium:
    """One tier, and what ranks read from and write to it."""

    def __init__(self, tier: str, folder: Path, redis_url: str) -> None:
        self.config = StoreConfig(
            tiers=(tier,), nvme_path=folder, nvme_size=64 * MIB, redis_url=redis_url, load_budget_s=10.0
        )
        self.identity: CacheIdentity

    def read(self, part: Part, divisions: list[Division]) -> list[bytes]:
        names = chain_names(root_key(self.identity.domain()), PROMPT, BLOCK_SIZE)
        with open_store(self.config, self.identity, part, nbytes(part), divisions) as store:
            ticket = store.submit_lookup(names)
            assert answer(store, LookupDone).tiers == self.config.tiers * len(names)
            buffers = [bytearray(nbytes(part)) for _ in names]
            store.submit_load(ticket, names, [memoryview(buffer) for buffer in buffers])
            assert answer(store, LoadDone).statuses == (BlockStatus.OK,) * len(names)
            store.release(ticket)
        return [bytes(buffer) for buffer in buffers]

    def write(self, part: Part, payloads: list[bytes]) -> None:
        names = chain_names(root_key(self.identity.domain()), PROMPT, BLOCK_SIZE)
        with open_store(self.config, self.identity, part, nbytes(part)) as store:
            store.submit_put(names, [memoryview(payload) for payload in payloads])
            assert answer(store, PutDone).statuses == (BlockStatus.OK,) * len(names)


@pytest.mark.parametrize("tier", ["nvme", "redis"])
def test_ranks_share_with_a_model_that_is_whole(
    tier: str,
    tmp_path: Path,
    valkey: Valkey,  # noqa: F811
) -> None:
    path = tmp_path / "model.gguf"
    model = hf_model("LlamaForCausalLM", num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4)
    write_gguf(path, model, **tokenizer_fields(byte_level_tokenizer()))
    medium = Medium(tier, tmp_path / "nvme", valkey.url)
    store_options = {"nvme_path": tmp_path / "nvme", "redis_url": valkey.url, "load_budget_s": 10.0}
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "4MiB", "threads": 1, **store_options}
    with LLM(str(path), kv_tier=[tier], **options) as llm:
        llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=1))
    found = read_identity(str(tmp_path / "nvme") if tier == "nvme" else valkey.url)
    assert found is not None
    medium.identity = found.identity
    whole = medium.read(WHOLE, [])
    assert len({*whole}) == 5, "five blocks, all different"
    for degree in DEGREES:
        for part in divide(WHOLE, *degree):
            assert medium.read(part, [(WHOLE,)]) == [cut(block, part) for block in whole], (degree, part)
    for i, degree in enumerate(DEGREES):
        valkey.client().flushall()
        empty = Medium(tier, tmp_path / f"nvme{i}", valkey.url)
        empty.identity = medium.identity
        for part in divide(WHOLE, *degree):
            empty.write(part, [cut(block, part) for block in whole])
        assert empty.read(WHOLE, [divide(WHOLE, *degree)]) == whole, degree
