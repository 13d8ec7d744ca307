"""Single flight: a block that one load reads, or has just read, is copied to the other loads that want it.

Knows who reads what now, not how. A load leads a block from when it begins to read it until the load is answered; till
then its destination holds the bytes. Others wait for the read, or copy at once where it is done already, block by
block: nobody waits for a whole load. When a leader fails, or its time is up, each who waited asks the tier itself,
and the first of them leads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from pagetier.kvstore.block import Address

MAX_WAITING = 4  # of one block: its leader copies for them before it goes on; more read for themselves

FlightKey = tuple[Address, bytes | None]  # a record and its domain
W = TypeVar("W")  # who waits


class Leader(Protocol):
    """A load, as another load sees it. May be called by any thread that holds no lock of a load."""

    def lend(self) -> bool:
        """Keep all destinations as they are until `take_back`; False when it is answered already."""

    def take_back(self) -> None:
        """One loan ends."""


class Loan(NamedTuple):
    """A block that was read already. source: its bytes, as long as `leader` lends them. tier: where they came from."""

    leader: Leader
    source: memoryview
    tier: str


class Waits:
    """The block is being read for somebody else; whoever asked is told."""


WAITS = Waits()


@dataclass(slots=True)
class _Flight(Generic[W]):
    leader: Leader
    loan: Loan | None = None  # once it was read
    waiting: list[W] = field(default_factory=list)


class Flights(Generic[W]):
    """Who leads which block. Thread-safe; its lock is taken last, inside those of loads.

    num_shared: blocks that were not read because another load had them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[FlightKey, _Flight[W]] = {}  # guarded by self._lock, as below
        self.num_shared = 0

    def join(self, keys: Sequence[FlightKey], leader: Leader, who: Callable[[int], W]) -> dict[int, Loan | Waits]:
        """Ask before reading blocks. What is not in the answer: read it, as its leader if nobody was; a loan:
        try to copy it; WAITS: `who(i)`, for keys[i], comes back from `land` or `forget` of its leader.
        """
        found: dict[int, Loan | Waits] = {}
        with self._lock:
            for i, key in enumerate(keys):
                flight = self._flights.get(key)
                if flight is None:
                    self._flights[key] = _Flight(leader)
                elif flight.leader is leader:
                    continue
                elif flight.loan is not None:
                    found[i] = flight.loan
                elif len(flight.waiting) < MAX_WAITING:
                    flight.waiting.append(who(i))
                    found[i] = WAITS
        return found

    def land(self, landed: Sequence[tuple[FlightKey, Loan | None]], leader: Leader) -> list[tuple[W, Loan | None]]:
        """The leader has read these blocks, or failed to (no loan): who waited for that, with what it waited for."""
        left: list[tuple[W, Loan | None]] = []
        with self._lock:
            for key, loan in landed:
                flight = self._flights.get(key)
                if flight is None or flight.leader is not leader:
                    continue
                if flight.waiting:
                    left += [(who, loan) for who in flight.waiting]
                    self.num_shared += 0 if loan is None else len(flight.waiting)
                    flight.waiting = []
                if loan is None:
                    del self._flights[key]
                else:
                    flight.loan = loan
        return left

    def forget(self, keys: Sequence[FlightKey], leader: Leader) -> Sequence[W]:
        """The leader is answered, and its destinations are its caller's again: who still waited."""
        left: list[W] = []
        with self._lock:
            for key in keys:
                flight = self._flights.get(key)
                if flight is not None and flight.leader is leader:
                    left += flight.waiting
                    del self._flights[key]
        return left

    def count_loan(self) -> None:
        """A loan was taken."""
        with self._lock:
            self.num_shared += 1

    def __len__(self) -> int:
        with self._lock:
            return len(self._flights)


def copy_block(source: memoryview, destination: memoryview) -> None:
    """Copy without the GIL."""
    np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))


def copy_of(source: memoryview) -> memoryview:
    """A copy in memory of its own, made without the GIL."""
    return np.frombuffer(source, np.uint8).copy().data
