"""Token ids -> text as they arrive: whole code points only, and nothing that may yet turn out to be a stop string.

Knows nothing of requests and streams. One object per sequence; every token is looked at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from pagetier.engine.token_bytes import TokenBytes


class TokenText(Protocol):
    """What is needed of a tokenizer."""

    token_bytes: TokenBytes
    special_ids: frozenset[int]


class IncrementalDetokenizer:
    """Streams the text of one sequence's output.

    All text of `push` and `finish` put together is the tokenizer's decoding of all ids, cut before the first stop
    string (after it with `include_stop`). The first stop string is the one whose last character comes first, the
    longest if several end there: so the answer does not depend on how tokens were grouped into pushes.
    """

    def __init__(
        self,
        tokenizer: TokenText,
        prompt_ids: Sequence[int],
        *,
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`prompt_ids` is what the output continues: a code point that it left unfinished is finished here.

        min_tokens: a stop string does not count when it begins in the text of the first so many tokens.
        """
        self._bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = _StopStrings(stop) if any(stop) else None
        self._include_stop = include_stop
        self._free_tokens = min_tokens
        self._held = ""  # text that may begin a stop string
        self.stopped: str | None = None
        fresh = self._take_up(prompt_ids)
        self._at_start = fresh and self._bytes.strips_first_space

    def _take_up(self, prompt_ids: Sequence[int]) -> bool:
        """Prime the decoder with the prompt's unfinished last code point; whether the prompt has no text at all."""
        tail = b""
        for token in reversed(prompt_ids):
            if token not in self._skipped:
                tail = self._bytes[token] + tail
            if len(tail) >= 4:  # the longest code point
                break
        for start in range(max(len(tail) - 3, 0), len(tail)):
            if tail[start] >= 0xC0:  # a lead byte; complete or broken ones give text, which is the prompt's
                self._utf8.decode(tail[start:])
                break
        return not tail

    def push(self, ids: Sequence[int]) -> str:
        """New text that is certain, "" when there is none yet or the output has stopped."""
        if self.stopped is not None:
            return ""
        if self._stops is None or self._free_tokens <= 0:
            return self._emit(self._decode(ids))
        free, rest = ids[: self._free_tokens], ids[self._free_tokens :]
        self._free_tokens -= len(free)
        return self._decode(free) + (self._emit(self._decode(rest)) if rest else "")

    def finish(self) -> str:
        """The rest: an unfinished code point as U+FFFD, and text that did not become a stop string after all."""
        if self.stopped is not None:
            return ""
        text = self._emit(self._utf8.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _decode(self, ids: Sequence[int]) -> str:
        table, skipped = self._bytes, self._skipped
        text = self._utf8.decode(b"".join([table[token] for token in ids if token not in skipped]))
        if self._at_start and text:
            self._at_start = False
            return text[1:] if text[0] == " " else text
        return text

    def _emit(self, text: str) -> str:
        if self._stops is None or not text:
            return text
        whole = self._held + text
        found = self._stops.feed(text)
        if found is None:
            certain = len(whole) - self._stops.num_open
            self._held = whole[certain:]
            return whole[:certain]
        end, self.stopped = len(self._held) + found[0], found[1]
        self._held = ""
        return whole[:end] if self._include_stop else whole[: end - len(self.stopped)]


class _StopStrings:
    """Finds any of a few strings in text that comes in pieces: one Knuth-Morris-Pratt automaton per string.

    `num_open`: characters at the end of what was fed that may begin a stop string; at most the longest minus one.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = sorted({stop for stop in stops if stop}, key=len, reverse=True)  # the longest is reported
        self._fallbacks = [_borders(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._firsts = tuple({stop[0] for stop in self._stops})
        self.num_open = 0

    def feed(self, text: str) -> tuple[int, str] | None:
        """(characters of `text` up to the match's end, the stop string), or None. O(len(text) * number of strings)."""
        if self.num_open == 0 and not any(first in text for first in self._firsts):
            return None
        states = self._states
        for at, char in enumerate(text):
            for index, stop in enumerate(self._stops):
                state = states[index]
                while state and stop[state] != char:
                    state = self._fallbacks[index][state - 1]
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    return at + 1, stop
                states[index] = state
        self.num_open = max(states)
        return None


def _borders(text: str) -> list[int]:
    """Per prefix of `text`, the length of its longest proper prefix that is also its suffix (Knuth-Morris-Pratt)."""
    out = [0] * len(text)
    length = 0
    for at in range(1, len(text)):
        while length and text[at] != text[length]:
            length = out[length - 1]
        if text[at] == text[length]:
            length += 1
        out[at] = length
    return out
