"""Tiny checkpoints for the tests: Hugging Face folders made by transformers, GGUF files made by gguf's own writer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CORPUS = (
    "The quick brown fox jumps over the lazy dog. The dog didn't mind; it's a lazy dog's life, they'll say.",
    "Numbers 0 1 2 3 4 5 6 7 8 9 10 11 2024 1999 42 007 and words, again and again: the the the and and and.",
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass\n    \n",
    "Grüße aus Köln, señor! Ça va? Привет мир, здравствуй. 日本語の文章です。日本語。 한국어 문장입니다. 😀😀 👍",
)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def byte_level_tokenizer(vocab_size: int = 448) -> Tokenizer:
    """A byte-level BPE trained on CORPUS in the way of SmolLM2: special tokens first, single digits.

    Smaller than the models' vocabulary, which many checkpoints pad too.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def vocab_and_merges(tokenizer: Tokenizer) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens in id order, and merges best first."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [tuple(merge) for merge in model["merges"]]


def hf_model(architecture: str, **changes: Any) -> Any:
    """A random transformers model of `LlamaForCausalLM` and the like; every tensor random, norms and biases too."""
    import transformers

    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config_class(**{**SIZES, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5)
    return model


def permute(weights: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's row order of q and k. Source: convert_hf_to_gguf.py, `LlamaModel.permute`."""
    pairs = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(path: Path, model: Any, kind: str = "F32", **metadata: Any) -> None:
    """A transformers model as llama.cpp would store it: F32 norms and biases, matrices of type `kind`.

    metadata: more keys, "__" for "."; a value of None removes a key that is set here.
    """
    config = model.config
    arch = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}[config.model_type]
    writer = gguf.GGUFWriter(path, arch)
    fields: dict[str, Any] = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": config.head_dim if config.model_type == "qwen3" else None,
        f"{arch}.attention.value_length": config.head_dim if config.model_type == "qwen3" else None,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_id,
        **{key.replace("__", "."): value for key, value in metadata.items()},
    }
    for key, value in fields.items():
        add_field(writer, key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        add_tensor(writer, gguf_name(name), tensor.float().numpy(), kind, config, arch)
    finish(writer)


def add_tensor(writer: Any, name: str, values: np.ndarray[Any, Any], kind: str, config: Any, arch: str) -> None:
    if arch == "llama" and "attn_q." in name:
        values = permute(values, config.num_attention_heads)
    if arch == "llama" and "attn_k." in name:
        values = permute(values, config.num_key_value_heads)
    values = np.ascontiguousarray(values)
    if values.ndim == 1 or kind == "F32":
        writer.add_tensor(name, values)
    else:
        ggml = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(values, ggml), raw_dtype=ggml)


def add_field(writer: Any, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_array(key, value)


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """Hugging Face's name of a tensor -> llama.cpp's, by gguf's own table (the loader has its own)."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 8)
    return str(names.get_name(name, try_suffixes=(".weight", ".bias")))


def tokenizer_fields(tokenizer: Tokenizer, pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    """GGUF metadata of a byte-level BPE."""
    tokens, merges = vocab_and_merges(tokenizer)
    fields = {
        "tokenizer__ggml__model": "gpt2",
        "tokenizer__ggml__pre": pre,
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer__ggml__merges": [" ".join(merge) for merge in merges],
        "tokenizer__ggml__add_bos_token": False,
    }
    return {**fields, **changes}
