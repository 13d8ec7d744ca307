"""The slow, obvious tokenizers: regular expression, then merge the best neighbouring pair until none is left.

Written from the algorithms' descriptions and llama.cpp's patterns, with nothing of the `tokenizers` library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import regex  # type: ignore[import-untyped]  # comes with transformers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# llama.cpp, src/llama-vocab.cpp, by pre-tokenizer: patterns applied one after the other
PATTERNS = {
    "smollm": (r"\p{N}", GPT2),
    "gpt-2": (GPT2,),
    "qwen2": (
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "llama-bpe": (
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}


def alphabet() -> list[str]:
    """The 256 printable stand-ins for bytes, by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    out, spare = [], 256
    for byte in range(256):
        if byte in printable:
            out.append(chr(byte))
        else:
            out.append(chr(spare))
            spare += 1
    return out


def split(text: str, pattern: str) -> Iterator[str]:
    """Matches and what lies between them, in order."""
    at = 0
    for match in regex.finditer(pattern, text):
        if match.start() > at:
            yield text[at : match.start()]
        if match.group():
            yield match.group()
        at = match.end()
    if at < len(text):
        yield text[at:]


def merge(pieces: list[str], rank: Callable[[str, str], float | None]) -> list[str]:
    """Repeatedly join the neighbours of lowest rank, leftmost first, until no pair has a rank."""
    while True:
        ranks = [
            (r, at) for at, pair in enumerate(zip(pieces, pieces[1:], strict=False)) if (r := rank(*pair)) is not None
        ]
        if not ranks:
            return pieces
        _, at = min(ranks)
        pieces = [*pieces[:at], pieces[at] + pieces[at + 1], *pieces[at + 2 :]]


class ByteLevelReference:
    """special: strings that are single tokens. whole_words: a word that is a token is not merged (Llama 3)."""

    def __init__(self, tokens: list[str], merges: list[tuple[str, str]], pre: str, special: tuple[str, ...]) -> None:
        self._ids = {token: index for index, token in enumerate(tokens)}
        self._ranks: dict[tuple[str, str], float] = {pair: float(rank) for rank, pair in enumerate(merges)}
        self._patterns, self._special, self._letters = PATTERNS[pre], special, alphabet()
        self._whole_words = pre == "llama-bpe"

    def encode(self, text: str) -> list[int]:
        special = "|".join(regex.escape(token) for token in self._special)
        out: list[int] = []
        for part in split(text, special):
            if part in self._special:
                out.append(self._ids[part])
                continue
            words = [part]
            for pattern in self._patterns:
                words = [piece for word in words for piece in split(word, pattern)]
            for word in words:
                letters = [self._letters[byte] for byte in word.encode()]
                if self._whole_words and "".join(letters) in self._ids:
                    letters = ["".join(letters)]
                out += [self._ids[piece] for piece in merge(letters, lambda a, b: self._ranks.get((a, b)))]
        return out


class SentencePieceReference:
    """SentencePiece BPE: join the neighbours whose joint piece scores best; characters without a piece become bytes."""

    def __init__(self, tokens: list[str], scores: list[float]) -> None:
        self._ids = {token: index for index, token in enumerate(tokens)}
        self._scores = dict(zip(tokens, scores, strict=True))

    def encode(self, text: str, prefix: str = "▁") -> list[int]:
        def rank(left: str, right: str) -> float | None:
            score = self._scores.get(left + right)
            return None if score is None else -score

        pieces = merge(list(prefix + text.replace(" ", "▁")), rank) if text else []
        out: list[int] = []
        for piece in pieces:
            if piece in self._ids:
                out.append(self._ids[piece])
            else:
                out += [self._ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
        return out
