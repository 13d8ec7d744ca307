"""Any checkpoint -> a Hugging Face folder in one dtype, for the oracle of the tests and for other engines.

`python -m pagetier.engine.weights.export_hf SRC DST --dtype bfloat16`. Values are what this engine computes with.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from pagetier.engine.config import DTYPES
from pagetier.engine.models.config import ModelConfig
from pagetier.engine.models.hf_config import ARCHITECTURES
from pagetier.engine.pull import resolve_model
from pagetier.engine.tokenizer import Tokenizer, load_tokenizer
from pagetier.engine.weights.loader import load_checkpoint
from pagetier.kvstore.errors import ConfigError, PagetierError


def export_hf(source: Path, target: Path, dtype: str = "auto") -> None:
    """Write `target`: all files or, on failure, none. It must not exist, or be an empty folder.

    Raises ConfigError when the source is unfit, the target is taken, or it cannot be written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: exists already; name a new folder")
    checkpoint, tokenizer = load_checkpoint(source, dtype), load_tokenizer(source)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        save_file(checkpoint.tensors, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "model.safetensors").chmod(0o644)  # the library makes it 0600; the other files follow the umask
        _write_json(partial / "config.json", hf_config(checkpoint.config, checkpoint.dtype))
        _write_json(partial / "generation_config.json", _generation_config(checkpoint.config, tokenizer))
        _write_json(partial / "tokenizer_config.json", _tokenizer_config(checkpoint.config, tokenizer))
        tokenizer.backend.save(str(partial / "tokenizer.json"))
        os.replace(partial, target)
    except OSError as exc:
        raise ConfigError(f"{target}: cannot be written: {exc.strerror or exc}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """`config.json` in the old transformers layout, which old and new versions both read."""
    arch = config.architecture
    if arch == "llama" and config.sliding_window is not None:
        arch = "mistral"  # ships as llama in GGUF; LlamaForCausalLM knows no window
    names = {name: architecture for architecture, name in ARCHITECTURES.items()}
    out: dict[str, Any] = {
        "architectures": [names[arch]],
        "model_type": arch,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config),
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": dtype,
        "dtype": dtype,
        "use_cache": True,
        **_ids(config.bos_token_id, config.eos_token_ids),
    }
    if arch in ("llama", "qwen3"):
        out["attention_bias"] = config.o_bias
    if arch == "llama":
        out["mlp_bias"] = config.mlp_bias
    else:
        out["sliding_window"] = config.sliding_window
    if arch in ("qwen2", "qwen3"):
        out["use_sliding_window"] = config.sliding_window is not None
        out["max_window_layers"] = 0 if config.sliding_window is not None else config.num_layers
    _refuse_inexpressible(config, arch)
    return out


def _refuse_inexpressible(config: ModelConfig, arch: str) -> None:
    """transformers has one switch for all attention biases, and none in Mistral."""
    expected = {"llama": config.o_bias, "qwen3": config.o_bias, "qwen2": True, "mistral": False}[arch]
    if config.qkv_bias != expected or (arch == "mistral" and (config.o_bias or config.mlp_bias)):
        raise ConfigError(f"a {arch} model with these projection biases has no Hugging Face configuration")


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    rope = config.rope
    if rope.kind == "default":
        return None
    if rope.kind == "linear":
        return {"rope_type": "linear", "factor": rope.factor}
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position,
    }


def _ids(bos: int | None, eos: tuple[int, ...]) -> dict[str, Any]:
    return {"bos_token_id": bos, "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None}


def _generation_config(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    return _ids(config.bos_token_id, tokenizer.eos_token_ids)


def _tokenizer_config(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    templates = tokenizer.facts.chat_templates
    out: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_model_len,
        "clean_up_tokenization_spaces": False,
        **tokenizer.facts.named_tokens,
    }
    if set(templates) == {"default"}:
        out["chat_template"] = templates["default"]
    elif templates:
        out["chat_template"] = [{"name": name, "template": source} for name, source in templates.items()]
    return out


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """The command line; 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m pagetier.engine.weights.export_hf", description=__doc__)
    parser.add_argument("source", help="a model name, a .gguf file or a folder")
    parser.add_argument("target", type=Path, help="the folder to make")
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    options = parser.parse_args(arguments)
    try:
        export_hf(resolve_model(options.source), options.target, options.dtype)
    except PagetierError as exc:
        sys.stderr.write(f"{exc}\n")
        return 2
    sys.stdout.write(f"{options.target}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
