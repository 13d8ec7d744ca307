"""Small tokenizers for tests: byte-level and SentencePiece, as GGUF metadata gives them."""

from __future__ import annotations

from typing import Any

from pagetier.engine.gguf_tokenizer import backend_from_gguf
from pagetier.engine.tokenizer import Tokenizer, TokenizerFacts
from tests.engine.checkpoints import CORPUS, SPECIAL, byte_level_tokenizer, tokenizer_fields

SP_SPECIAL = ("<unk>", "<s>", "</s>")


def metadata(pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    """GGUF metadata of a small byte-level BPE; changes use "__" for "."."""
    fields = tokenizer_fields(byte_level_tokenizer(), pre, **changes)
    return {key.replace("__", "."): value for key, value in fields.items() if value is not None}


def byte_level(pre: str = "smollm", **changes: Any) -> Tokenizer:
    return Tokenizer(backend_from_gguf(metadata(pre, **changes), "test"), TokenizerFacts("test"))


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types like Llama 2's: specials, 256 bytes, then pieces grown from CORPUS, then characters.

    Pieces are prefixes of words, so that each has one split into pieces and ties do not arise.
    """
    words = sorted({f"▁{word}" for line in CORPUS for word in line.split()})
    prefixes = {word[:length] for word in words for length in range(2, min(len(word), 7) + 1)}
    pieces = sorted(prefixes, key=lambda piece: (len(piece), piece))
    characters = sorted({char for line in CORPUS for char in line} - {" "} | {"▁"})
    tokens = [*SP_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *characters]
    scores = [0.0] * (len(SP_SPECIAL) + 256) + [-float(rank) for rank in range(len(pieces) + len(characters))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) + len(characters))
    return tokens, scores, types


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    tokens, scores, types = sentencepiece_vocabulary()
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    changed = {**fields, **{key.replace("__", "."): value for key, value in changes.items()}}
    return {key: value for key, value in changed.items() if value is not None}


def sentencepiece(**changes: Any) -> Tokenizer:
    backend = backend_from_gguf(sentencepiece_metadata(**changes), "test")
    return Tokenizer(backend, TokenizerFacts("test", named_tokens={"bos_token": "<s>", "eos_token": "</s>"}))


__all__ = ["SPECIAL", "byte_level", "metadata", "sentencepiece", "sentencepiece_metadata", "sentencepiece_vocabulary"]
