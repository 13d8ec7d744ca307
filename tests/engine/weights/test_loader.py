"""Both file formats give the weights that transformers has, and an unfit checkpoint is refused in one telling line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagetier.engine.weights.loader import expected_tensors, load_checkpoint, load_config
from pagetier.kvstore.errors import ConfigError
from tests.engine.checkpoints import hf_model, write_gguf

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGETIER_CACHE_DIR", str(tmp_path / "cache"))


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    tied = model.config.tie_word_embeddings
    return {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_gives_the_weights_of_transformers(architecture: str, tied: bool, tmp_path: Path) -> None:
    model = hf_model(architecture, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "m")
    checkpoint = load_checkpoint(tmp_path / "m")
    assert_same(checkpoint.tensors, weights_of(model))
    assert checkpoint.dtype == "float32" and checkpoint.config.tie_word_embeddings == tied
    assert load_config(tmp_path / "m") == checkpoint.config


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_gives_the_weights_of_transformers(architecture: str, tied: bool, tmp_path: Path) -> None:
    """Names mapped back, and llama's rows of q and k un-permuted: exact, because F32 loses nothing."""
    model = hf_model(architecture, tie_word_embeddings=tied)
    write_gguf(tmp_path / "m.gguf", model)
    checkpoint = load_checkpoint(tmp_path / "m.gguf")
    assert_same(checkpoint.tensors, weights_of(model))
    assert checkpoint.dtype == "float32" and checkpoint.config.tie_word_embeddings == tied


@pytest.mark.parametrize(
    ("architecture", "biases"),
    [
        ("LlamaForCausalLM", {"attention_bias": True}),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen3ForCausalLM", {"attention_bias": True}),
    ],
)
def test_biases_are_loaded_and_permuted_like_their_rows(
    architecture: str, biases: dict[str, bool], tmp_path: Path
) -> None:
    model = hf_model(architecture, **biases)
    model.save_pretrained(tmp_path / "m")
    write_gguf(tmp_path / "m.gguf", model)
    expected = weights_of(model)
    assert any(name.endswith("o_proj.bias") for name in expected)
    assert_same(load_checkpoint(tmp_path / "m").tensors, expected)
    assert_same(load_checkpoint(tmp_path / "m.gguf").tensors, expected)


@pytest.mark.parametrize(("kind", "own"), [("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")])
def test_auto_is_the_checkpoints_own_dtype(kind: str, own: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", hf_model("LlamaForCausalLM"), kind)
    checkpoint = load_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.dtype == own
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {getattr(torch, own)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_cast_to_the_dtype_asked_for(dtype: str, tmp_path: Path) -> None:
    model = hf_model("LlamaForCausalLM").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    checkpoint = load_checkpoint(tmp_path / "m", dtype)
    assert checkpoint.dtype == dtype
    assert_same(checkpoint.tensors, {name: t.to(getattr(torch, dtype)) for name, t in weights_of(model).items()})


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--dtype: got 'int8'; allowed: auto, float32, bfloat16, float16"):
        load_checkpoint(tmp_path, "int8")


def test_shards_are_put_together(tmp_path: Path) -> None:
    model = hf_model("LlamaForCausalLM", num_hidden_layers=4)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = load_checkpoint(tmp_path / "one"), load_checkpoint(tmp_path / "many")
    assert_same(many.tensors, weights_of(model))
    assert one.fingerprint == many.fingerprint  # the same tensors, however they are cut into files


def test_tensors_outlive_the_file(tmp_path: Path) -> None:
    model = hf_model("LlamaForCausalLM")
    model.save_pretrained(tmp_path / "m")
    write_gguf(tmp_path / "m.gguf", model)
    loaded = [load_checkpoint(tmp_path / "m").tensors, load_checkpoint(tmp_path / "m.gguf").tensors]
    for path in (tmp_path / "m" / "model.safetensors", tmp_path / "m.gguf"):
        with path.open("r+b") as file:
            file.write(b"\0" * path.stat().st_size)
    for tensors in loaded:
        assert_same(tensors, weights_of(model))


def test_a_folder_with_one_gguf_is_that_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", hf_model("LlamaForCausalLM"))
    assert load_checkpoint(tmp_path).fingerprint == load_checkpoint(tmp_path / "m.gguf").fingerprint


def test_a_tied_head_that_was_saved_all_the_same_is_ignored(tmp_path: Path) -> None:
    model = hf_model("LlamaForCausalLM", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    assert_same(load_checkpoint(tmp_path).tensors, weights_of(model))


def test_expected_tensors_are_those_of_transformers(tmp_path: Path) -> None:
    for architecture in ARCHITECTURES:
        model = hf_model(architecture, tie_word_embeddings=False)
        model.save_pretrained(tmp_path / architecture)
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        assert dict(expected_tensors(load_config(tmp_path / architecture))) == expected


# Unfit checkpoints: one line that names the file and the culprit.


def save_changed(folder: Path, change: Any) -> Path:
    """A good folder whose weights went through `change(dict)`; the weights file."""
    hf_model("LlamaForCausalLM").save_pretrained(folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)
    return path


def refused(path: Path, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


Q = "model.layers.1.self_attn.q_proj.weight"


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_changed(tmp_path, lambda weights: weights.pop(Q))
    refused(tmp_path, rf"tensor '{Q}' is missing")


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    save_changed(tmp_path, lambda weights: weights.update({Q: weights[Q][:32].contiguous()}))
    refused(tmp_path, rf"tensor '{Q}' has shape \[32, 64\], expected \[64, 64\]")


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    bias = Q.replace("weight", "bias")
    save_changed(tmp_path, lambda weights: weights.update({bias: torch.zeros(64)}))
    refused(tmp_path, rf"tensor '{bias}' has no place in this llama model")


def test_an_unsupported_dtype_is_named(tmp_path: Path) -> None:
    save_changed(tmp_path, lambda weights: weights.update({Q: weights[Q].to(torch.int8)}))
    refused(tmp_path, rf"tensor '{Q}' is I8; supported: F64, F32, F16, BF16")


def test_truncated_safetensors_name_the_tensor(tmp_path: Path) -> None:
    path = save_changed(tmp_path, lambda weights: None)
    path.write_bytes(path.read_bytes()[:-100])
    refused(tmp_path, r"model\.safetensors: .*truncated: tensor '.+' ends at byte \d+, the file has \d+")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "its header claims 0 bytes, the file has 0"),
        (b"\xff" * 16, r"its header claims \d+ bytes, the file has 16"),
        (b"\x04\0\0\0\0\0\0\0nope", "its header is not JSON"),
        (b"\x02\0\0\0\0\0\0\0[]", "its header is not a JSON object"),
        (b'\x0a\0\0\0\0\0\0\0{"a": [1]}', "tensor 'a' has a malformed entry"),
        (b"GGUF" + b"\0" * 60, r"its header claims \d+ bytes|not JSON"),
    ],
)
def test_other_bytes_in_safetensors_are_named(content: bytes, says: str, tmp_path: Path) -> None:
    path = save_changed(tmp_path, lambda weights: None)
    path.write_bytes(content)
    refused(tmp_path, says)


def test_folder_faults_are_named(tmp_path: Path) -> None:
    refused(tmp_path / "gone", "gone: no such file or folder")
    refused(tmp_path, "the folder holds neither config.json nor a .gguf file")
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    refused(tmp_path, r"the folder holds 2 \.gguf files \(name one of them\)")
    hf_model("LlamaForCausalLM").save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "pytorch_model.bin")
    refused(tmp_path / "m", "no safetensors files; convert pytorch_model.bin")
    (tmp_path / "m" / "config.json").write_text("{")
    refused(tmp_path / "m", r"config\.json: not JSON")


def test_index_faults_are_named(tmp_path: Path) -> None:
    hf_model("LlamaForCausalLM").save_pretrained(tmp_path, max_shard_size="100KB")
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    shards = sorted(set(good["weight_map"].values()))
    elsewhere = {name: shards[0] for name in good["weight_map"]}
    index.write_text(json.dumps({"weight_map": elsewhere}))
    refused(tmp_path, rf"{shards[0]}: tensor '.+' is not in it, though model\.safetensors\.index\.json says so")
    index.write_text(json.dumps({"weight_map": {Q: "../x.safetensors"}}))
    refused(tmp_path, r"shard '\.\./x\.safetensors' of tensor '.+' is not a plain file name")
    index.write_text(json.dumps({}))
    refused(tmp_path, "weight_map is missing or empty")
    index.write_text(json.dumps(good))
    (tmp_path / shards[-1]).unlink()
    refused(tmp_path, rf"{shards[-1]}: the shard that model\.safetensors\.index\.json names is missing")
    index.unlink()
    refused(tmp_path, r"safetensors files but no model\.safetensors\.index\.json|is missing")


def test_gguf_faults_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    model = hf_model("LlamaForCausalLM")
    write_gguf(path, model)
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    refused(path, r"m\.gguf: not a usable GGUF file: truncated: tensor '.+' ends at byte")
    path.write_bytes(whole.replace(b"blk.1.attn_q.weight", b"blk.7.attn_q.weight"))
    refused(path, rf"tensor '{Q}' is missing")
    path.write_bytes(whole.replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"))
    refused(path, "tensor 'blk.1.attn_x.weight' has no place in this llama model")
    write_gguf(path, model, llama__feed_forward_length=95)
    refused(path, r"tensor 'blk\.0\.ffn_gate\.weight' has shape \[96, 64\], expected \[95, 64\]")
    write_gguf(path, model, llama__block_count=1_000_000_000)
    refused(path, r"tensor 'model\.layers\.2\.input_layernorm\.weight' is missing")
