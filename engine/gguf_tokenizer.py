"""GGUF tokenizer metadata -> a `tokenizers` object: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).

Everything else is refused by name: a tokenizer that is nearly right gives quietly worse answers.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from pagetier.kvstore.errors import ConfigError

# tokenizer.ggml.token_type
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
PRE_TOKENIZERS = ("gpt-2", "llama-bpe", "qwen2", "smollm")
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "gpt2": "gpt-2"}


def backend_from_gguf(metadata: dict[str, Any], where: str) -> Tokenizer:
    """Raises ConfigError naming `where` (the file) and the key that is missing or not supported."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ConfigError(f"{where}: tokenizer.ggml.tokens is missing: the file has no vocabulary")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ConfigError(f"{where}: tokenizer.ggml.tokens names {len(tokens) - len(vocab)} tokens twice")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ConfigError(f"{where}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    if model == "gpt2":
        backend, bos_default = _byte_level(metadata, vocab, where)
    elif model == "llama":
        backend, bos_default = _sentencepiece(metadata, vocab, tokens, where), True
    else:
        raise ConfigError(f"{where}: tokenizer.ggml.model {model!r} is not supported; supported: gpt2, llama")
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL or (kind == UNKNOWN and model == "llama")
        ]
    )
    backend.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == USER_DEFINED
        ]
    )
    _add_bos(backend, metadata, tokens, bos_default)
    return backend


def _byte_level(metadata: dict[str, Any], vocab: dict[str, int], where: str) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether it adds a bos where the file does not say."""
    pre = metadata.get("tokenizer.ggml.pre")
    pre = _ALIASES.get(str(pre), pre)
    if pre not in PRE_TOKENIZERS:
        raise ConfigError(
            f"{where}: tokenizer.ggml.pre {pre!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    bad = next((merge for merge in merges if len(merge) != 2 or "".join(merge) not in vocab), None)
    if bad is not None or not merges:
        what = f"holds {' '.join(bad)!r}, which makes no token" if bad is not None else "is missing"
        raise ConfigError(f"{where}: tokenizer.ggml.merges {what}")
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm"))
    first: dict[str, pre_tokenizers.PreTokenizer] = {
        "smollm": pre_tokenizers.Digits(individual_digits=True),
        "qwen2": pre_tokenizers.Split(Regex(_QWEN2), "isolated"),
        "llama-bpe": pre_tokenizers.Split(Regex(_LLAMA3), "isolated"),
    }
    backend.pre_tokenizer = pre_tokenizers.Sequence([first[pre], whole]) if pre in first else whole
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, pre == "llama-bpe"


def _sentencepiece(metadata: dict[str, Any], vocab: dict[str, int], tokens: list[str], where: str) -> Tokenizer:
    """SentencePiece BPE as Hugging Face writes Llama 2: merges are every split of a piece into two pieces, best first.

    Source: transformers, convert_slow_tokenizer.py, `LlamaConverter` and `generate_merges`.
    """
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ConfigError(f"{where}: tokenizer.ggml.scores is missing or does not match the {len(tokens)} tokens")
    ranked: list[tuple[float, str, str]] = []
    for piece, score in zip(tokens, scores, strict=True):
        splits = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        found = [pair for pair in splits if pair[0] in vocab and pair[1] in vocab]
        found.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        ranked += [(score, left, right) for left, right in found]
    ranked.sort(key=lambda item: (item[0], len(item[1]), len(item[2])), reverse=True)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise ConfigError(f"{where}: tokenizer.ggml.unknown_token_id is {unknown!r}, not a token")
    backend = Tokenizer(
        BPE(
            vocab=vocab,
            merges=[(left, right) for _, left, right in ranked],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _add_bos(backend: Tokenizer, metadata: dict[str, Any], tokens: list[str], default: bool) -> None:
    around: dict[str, int] = {}
    pieces = ["$A"]
    for name, at, fallback in (("bos", 0, default), ("eos", len(pieces), False)):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if metadata.get(f"tokenizer.ggml.add_{name}_token", fallback) and isinstance(token_id, int):
            pieces.insert(at if name == "bos" else len(pieces), tokens[token_id])
            around[tokens[token_id]] = token_id
    if around:
        backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=list(around.items()))
    elif metadata.get("tokenizer.ggml.model") == "gpt2":
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
