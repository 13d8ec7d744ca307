"""KV of a real checkpoint of 8 heads over 4 KV heads goes from any TP and PP degree to any other.

Ranks read their parts of what one process stored, and one process serves from what ranks stored, with the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pagetier.engine.llm import LLM
from pagetier.engine.sampling_params import SamplingParams
from pagetier.kvstore.block import BlockName, BlockStatus, Part
from pagetier.kvstore.config import MIB, StoreConfig
from pagetier.kvstore.identity import CacheIdentity
from pagetier.kvstore.job import Completion, LoadDone, LookupDone, PutDone
from pagetier.kvstore.keys import chain_names, root_key
from pagetier.kvstore.parts import Division, divide
from pagetier.kvstore.store import TieredStore, open_store
from tests.engine.checkpoints import byte_level_tokenizer, hf_model, tokenizer_fields, write_gguf

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 3, 8, 4, 16, 16
WHOLE = Part(0, 0, NUM_LAYERS, 0, NUM_KV_HEADS)
PROMPT = [int(token) for token in np.random.default_rng(0).integers(3, 440, 100)]
NUM_BLOCKS = len(PROMPT) // BLOCK_SIZE
DEGREES = [(1, 2), (3, 1), (2, 4)]  # pipeline stages, tensor ranks
F32 = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "model.gguf"
    heads = {"num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_KV_HEADS}
    sizes = {"hidden_size": NUM_HEADS * HEAD_DIM, "num_hidden_layers": NUM_LAYERS, **heads}
    write_gguf(path, hf_model("LlamaForCausalLM", **sizes), **tokenizer_fields(byte_level_tokenizer()))
    return path


def generated(checkpoint: Path, folder: Path) -> tuple[list[int], dict[str, int], CacheIdentity]:
    """The tokens, where the prompt's KV came from, and the model's identity; what was computed is stored after."""
    options: dict[str, Any] = {"kv_cache_memory": "2MiB", "threads": 1, "load_budget_s": 30.0, "nvme_path": folder}
    with LLM(str(checkpoint), dtype="float32", kv_tier=["nvme"], **options) as llm:
        answer = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=8))[0]
        return answer.outputs[0].token_ids, answer.cached_tokens, llm._engine.identity


def opened(folder: Path, identity: CacheIdentity, part: Part, divisions: Sequence[Division] = ()) -> TieredStore:
    config = StoreConfig(tiers=("nvme",), nvme_path=folder, nvme_size=64 * MIB, load_budget_s=30.0)
    return open_store(config, identity, part, nbytes_of(part), divisions)


def shape_of(part: Part) -> tuple[int, ...]:
    layers, heads = part.end_layer - part.first_layer, part.end_head - part.first_head
    return (layers, 2, heads, BLOCK_SIZE, HEAD_DIM)


def nbytes_of(part: Part) -> int:
    return int(np.prod(shape_of(part))) * 4


def cut(block: F32, part: Part) -> F32:
    """A rank's part of a whole block, by the documented layout: layer, plane, head, token, head_dim."""
    return np.ascontiguousarray(block[part.first_layer : part.end_layer, :, part.first_head : part.end_head])


def answer(store: TieredStore, kind: type[Completion]) -> Any:
    limit_s = time.monotonic() + 30.0
    while time.monotonic() < limit_s:
        for completion in store.poll():
            assert isinstance(completion, kind)
            return completion
        time.sleep(0.001)
    raise AssertionError("no answer")


def read(store: TieredStore, names: list[BlockName], part: Part) -> list[F32]:
    ticket = store.submit_lookup(names)
    assert answer(store, LookupDone).tiers == ("nvme",) * len(names)
    blocks = [np.empty(shape_of(part), np.float32) for _ in names]
    store.submit_load(ticket, names, [block.data.cast("B") for block in blocks])
    assert answer(store, LoadDone).statuses == (BlockStatus.OK,) * len(names)
    store.release(ticket)
    return blocks


def write(store: TieredStore, names: list[BlockName], blocks: list[F32]) -> None:
    store.submit_put(names, [block.data.cast("B") for block in blocks])
    assert answer(store, PutDone).statuses == (BlockStatus.OK,) * len(names)


def test_any_degree_reads_what_one_process_computed_and_back(checkpoint: Path, tmp_path: Path) -> None:
    tokens, cached, identity = generated(checkpoint, tmp_path / "one")
    assert cached == {}
    names = chain_names(root_key(identity.domain()), PROMPT, BLOCK_SIZE)[:NUM_BLOCKS]
    with opened(tmp_path / "one", identity, WHOLE) as store:
        computed = read(store, names, WHOLE)
    assert len({block.tobytes() for block in computed}) == NUM_BLOCKS and all(np.any(b) for b in computed)
    for degree in DEGREES:
        ranks, folder = divide(WHOLE, *degree), tmp_path / "-".join(map(str, degree))
        for part in ranks:
            with opened(tmp_path / "one", identity, part, [(WHOLE,)]) as store:
                parts = read(store, names, part)
            assert all(np.array_equal(a, cut(b, part)) for a, b in zip(parts, computed, strict=True)), part
            with opened(folder, identity, part) as store:
                write(store, names, parts)
        with opened(folder, identity, WHOLE, [ranks]) as store:
            whole = read(store, names, WHOLE)
        assert all(np.array_equal(a, b) for a, b in zip(whole, computed, strict=True)), degree
        with opened(folder / "whole", identity, WHOLE) as store:
            write(store, names, whole)
        assert generated(checkpoint, folder / "whole")[:2] == (tokens, {"nvme": NUM_BLOCKS * BLOCK_SIZE}), degree
