"""How a token id becomes text: every supported decoder is "bytes per token, concatenated, read as UTF-8".

That one form is what lets text be streamed without ever decoding a token twice. Knows no streams and no templates.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as Backend

from pagetier.kvstore.errors import ConfigError


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, reversed. Source: openai/gpt-2 encoder.py, `bytes_to_unicode`."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in set(kept)]
    return {**{chr(byte): byte for byte in kept}, **{chr(256 + n): byte for n, byte in enumerate(moved)}}


class TokenBytes:
    """Bytes of each token id, filled in as ids are seen.

    strips_first_space: whether a text's very first character is dropped when it is a space (SentencePiece models put
    one there). Not thread-safe beyond what the GIL gives: racing fills write equal values.
    """

    def __init__(self, backend: Backend, where: str) -> None:
        """Read the decoder of a tokenizer. Raises ConfigError naming a decoder step that is not understood."""
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        self._alphabet: dict[str, int] | None = None
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self.strips_first_space = False
        decoder = backend.decoder
        if decoder is None:
            raise ConfigError(f"{where}: the tokenizer has no decoder")
        state: dict[str, Any] = json.loads(decoder.__getstate__())
        for step in state["decoders"] if state["type"] == "Sequence" else [state]:
            if not self._read_step(step):
                raise ConfigError(f"{where}: the tokenizer's decoder {step['type']!r} is not supported")

    def _read_step(self, step: dict[str, Any]) -> bool:
        kind = step["type"]
        if kind == "ByteLevel":
            self._alphabet = byte_alphabet()
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind == "Replace" and "String" in step["pattern"]:
            self._replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            self._replacements.append((step["replacement"], " "))
            self.strips_first_space = step["prepend_scheme"] != "never"
        elif kind == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0):
            self.strips_first_space = True
        else:
            return bool(kind == "Fuse")
        return True

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes; empty for an id outside the vocabulary (models pad theirs)."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._read(token_id)
        return found

    def _read(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if token is None:
            return b""
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes((int(token[3:5], 16),))
            except ValueError:
                pass
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._alphabet is not None:
            try:
                return bytes(self._alphabet[char] for char in token)
            except KeyError:  # an added token that was never written in the alphabet: taken as it is
                pass
        return token.encode("utf-8")
