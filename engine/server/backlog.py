"""What the engine has yet to do for the requests it was given, and how soon there is room for more.

Owns the counts of sequences that are open and of prompt tokens that wait for their first output, and how fast both go.
Knows no HTTP and no limits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from pagetier.engine.messages import EngineRequest

WINDOW_S = 60.0  # how far back rates go: past the longest prefill of a prompt, within a change of load
MAX_RETRY_S = 60  # a client that waits for longer may as well ask in between


class Rate:
    """How much goes in a second, over about the last `WINDOW_S` of the time in which there was something to do."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._done = self._busy_s = 0.0
        self._busy_since_s: float | None = None

    def begin(self) -> None:
        """There is something to do. Idempotent."""
        if self._busy_since_s is None:
            self._busy_since_s = self._clock()

    def end(self) -> None:
        """There is nothing to do any more. Idempotent."""
        self.add(0)
        self._busy_since_s = None

    def add(self, amount: float) -> None:
        """So much was done just now."""
        if self._busy_since_s is not None:
            now_s = self._clock()
            elapsed_s, self._busy_since_s = now_s - self._busy_since_s, now_s
            fade = math.exp(-elapsed_s / WINDOW_S)
            self._done, self._busy_s = fade * self._done, fade * self._busy_s + elapsed_s
        self._done += amount

    def retry_s(self, amount: float) -> int:
        """Whole seconds, from 1 to MAX_RETRY_S, until so much will be done; 1 where nothing is known."""
        self.add(0)
        if not self._done or not self._busy_s:
            return 1
        return max(1, min(MAX_RETRY_S, math.ceil(amount * self._busy_s / self._done)))


class Backlog:
    """owner: event loop thread. A prompt's tokens count once, however many choices it has."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokens: dict[str, int] = {}  # of open sequences: their prompt's, 0 once there is output
        self._num_tokens = 0
        self._ended, self._begun = Rate(clock), Rate(clock)

    @property
    def num_open(self) -> int:
        """Sequences that have not ended."""
        return len(self._tokens)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of those that have no output yet."""
        return self._num_tokens

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Sequences were submitted."""
        seen: set[tuple[int, ...]] = set()
        for request in requests:
            count = 0 if request.prompt_ids in seen else len(request.prompt_ids)
            seen.add(request.prompt_ids)
            self._tokens[request.request_id] = count
            self._num_tokens += count
        self._ended.begin()
        self._begun.begin()

    def took(self, request_id: str) -> None:
        """A sequence has output: its prompt is computed."""
        count = self._tokens.get(request_id, 0)
        if count:
            self._tokens[request_id] = 0
            self._drop(count, done=count)

    def end(self, request_id: str) -> None:
        """A sequence ended, or nobody wants it any more. Unknown ids are ignored."""
        if request_id not in self._tokens:
            return
        self._drop(self._tokens.pop(request_id), done=0)
        self._ended.add(1)
        if not self._tokens:
            self._ended.end()

    def _drop(self, count: int, done: int) -> None:
        self._num_tokens -= count
        self._begun.add(done)
        if not self._num_tokens:
            self._begun.end()

    def retry_for_sequences_s(self, count: int) -> int:
        """Seconds until so many sequences will have ended, as fast as they do now."""
        return self._ended.retry_s(count)

    def retry_for_tokens_s(self, count: int) -> int:
        """Seconds until so many prompt tokens will have been computed, as fast as they are now."""
        return self._begun.retry_s(count)
