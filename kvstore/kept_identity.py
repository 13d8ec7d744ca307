"""The identity beside the records: puts the encoded CacheIdentity into every tier, and again where it may be lost.

A medium that began anew has none, and a full Redis with `allkeys-lru`, the embedded one among them, evicts what nobody
asks for: without it nobody could say, offline, what the records are of. For the store's own thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from pagetier.kvstore.port import TierPort

RENEW_S = 60.0  # a Redis that is written through once within this keeps nothing for long anyway


class KeptIdentity:
    """Of one store. num_returns: times that a tier came back; clock: seconds."""

    def __init__(self, ports: Sequence[TierPort], num_returns: Callable[[], int], clock: Callable[[], float]) -> None:
        self._ports, self._num_returns, self._clock = tuple(ports), num_returns, clock
        self._kept: tuple[bytes, bytes] | None = None  # domain and encoding
        self._returns_then, self._due_s = 0, 0.0

    def put(self, domain: bytes, encoded: bytes) -> None:
        """Later and best effort."""
        self._kept = (domain, encoded)
        self._returns_then, self._due_s = self._num_returns(), self._clock() + RENEW_S
        for port in self._ports:
            port.write_executor.submit(functools.partial(port.tier.put_identity, domain, encoded))

    def renew(self) -> None:
        """Put it again when that is due, or when a tier came back. Called whenever the store is used."""
        if self._kept is None:
            return
        if self._clock() >= self._due_s or self._num_returns() != self._returns_then:
            self.put(*self._kept)
