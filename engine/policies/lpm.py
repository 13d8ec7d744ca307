"""Longest prefix match first (SGLang, Zheng et al. 2024, section 3): what is cached is used before it is evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pagetier.engine.policies.base import SortedQueue
from pagetier.engine.request import Request

WINDOW = 128  # of the earliest arrivals; to match thousands of prompts in a step would take longer than the step
MAX_PASSED = 128  # admissions of others after which a request goes first


class LongestPrefix(SortedQueue):
    """Among the first `WINDOW` arrivals the longest device match first, equal ones by arrival. One that `MAX_PASSED`
    others were admitted before goes first: it cannot starve.

    match: the request's device match in tokens. version: changes with the index; matches are kept until then.
    """

    def __init__(self, match: Callable[[Request], int], version: Callable[[], int]) -> None:
        super().__init__()
        self._match = match
        self._version = version
        self._matches: dict[Request, int] = {}
        self._matched_version = -1
        self._num_admitted = 0
        self._queued_at: dict[Request, int] = {}

    def push(self, request: Request) -> None:
        super().push(request)
        self._queued_at[request] = self._num_admitted

    def remove(self, request: Request) -> None:
        super().remove(request)
        del self._queued_at[request]
        self._matches.pop(request, None)
        self._num_admitted += 1

    def candidates(self) -> Iterator[Request]:
        version = self._version()
        if version != self._matched_version:
            self._matches.clear()
            self._matched_version = version
        return iter(sorted(self.first(WINDOW), key=self._urgency))

    def _urgency(self, request: Request) -> tuple[bool, int, int]:
        if self._num_admitted - self._queued_at[request] >= MAX_PASSED:
            return (False, 0, request.order)
        match = self._matches.get(request)
        if match is None:
            match = self._matches[request] = self._match(request)
        return (True, -match, request.order)
