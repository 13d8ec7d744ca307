"""An exported folder is the same model: for this engine and for transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagetier.engine.weights.export_hf import export_hf, main
from pagetier.engine.weights.loader import load_checkpoint
from pagetier.kvstore.errors import ConfigError
from tests.engine.checkpoints import byte_level_tokenizer, hf_model, tokenizer_fields, write_gguf

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGETIER_CACHE_DIR", str(tmp_path / "cache"))


def save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {"tie_word_embeddings": True}),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
        ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        ("MistralForCausalLM", {"sliding_window": 8}),
        ("MistralForCausalLM", {"sliding_window": None}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
        ("Qwen3ForCausalLM", {"head_dim": 24, "attention_bias": True}),
    ],
)
def test_logits_and_config_survive_the_round_trip(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = hf_model(architecture, **changes)
    save(model, tmp_path / "source")
    export_hf(tmp_path / "source", tmp_path / "target", "float32")
    before, after = load_checkpoint(tmp_path / "source"), load_checkpoint(tmp_path / "target")
    assert before.config == after.config
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert type(theirs).__name__ == architecture
    ids = torch.arange(24).reshape(1, -1) * 7
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, model(ids).logits)


def test_a_llama_gguf_becomes_the_model_it_was_made_from(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = hf_model("LlamaForCausalLM")
    write_gguf(tmp_path / "m.gguf", model, **tokenizer_fields(byte_level_tokenizer()))
    export_hf(tmp_path / "m.gguf", tmp_path / "target")
    ids = torch.arange(24).reshape(1, -1) * 7
    with torch.no_grad():
        expected, got = model(ids).logits, AutoModelForCausalLM.from_pretrained(tmp_path / "target")(ids).logits
    assert torch.equal(got, expected)


def test_a_windowed_gguf_becomes_mistral(tmp_path: Path) -> None:
    model = hf_model("MistralForCausalLM", sliding_window=8)
    fields = tokenizer_fields(byte_level_tokenizer(), llama__attention__sliding_window=8)
    write_gguf(tmp_path / "m.gguf", model, **fields)
    export_hf(tmp_path / "m.gguf", tmp_path / "target")
    config = load_checkpoint(tmp_path / "target").config
    assert (config.architecture, config.sliding_window) == ("mistral", 8)


def test_the_target_is_never_written_over_and_never_half_there(tmp_path: Path) -> None:
    save(hf_model("LlamaForCausalLM"), tmp_path / "source")
    with pytest.raises(ConfigError, match="source: exists already; name a new folder"):
        export_hf(tmp_path / "source", tmp_path / "source")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="target: cannot be written: "):
        export_hf(tmp_path / "source", tmp_path / "file" / "target")
    (tmp_path / "source" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: missing"):
        export_hf(tmp_path / "source", tmp_path / "target")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "file", "cache"}


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(hf_model("LlamaForCausalLM"), tmp_path / "source")
    assert main([str(tmp_path / "source"), str(tmp_path / "target"), "--dtype", "bfloat16"]) == 0
    assert load_checkpoint(tmp_path / "target").dtype == "bfloat16"
    capsys.readouterr()
    assert main([str(tmp_path / "source"), str(tmp_path / "target")]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'target'}: exists already; name a new folder\n"
