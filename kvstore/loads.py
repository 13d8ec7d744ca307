"""One load: blocks stream front to back, in bounded pieces, from the tiers that have them into the caller's buffers.

Tiers are read side by side, each by its own threads. A block that a tier fails is tried in the next tier that has it
while time is left. At the deadline the completed blocks count, and a thread that still writes is waited for separately.
A block that another load of the store is reading, or has just read, is copied from there (flights.py).
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagetier.kvstore.block import Address, BlockName, BlockStatus, Part
from pagetier.kvstore.executor import Task
from pagetier.kvstore.flights import FlightKey, Flights, Loan, copy_block
from pagetier.kvstore.job import LoadDone, LoadQuiesced
from pagetier.kvstore.port import TierPort
from pagetier.kvstore.tier import BlockRead


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What to load: `destinations[i]` takes block i, sought from port `first_ports[i]` on, until `deadline_s`.
    domain: of the records, None for the tiers' own.
    """

    job: int
    names: tuple[BlockName, ...]
    part: Part
    domain: bytes | None
    destinations: tuple[memoryview, ...]
    first_ports: tuple[int, ...]
    deadline_s: float
    piece_blocks: int


Report = Callable[[LoadDone | LoadQuiesced], None]
Promote = Callable[[int, Sequence[BlockRead]], None]  # (port they came from, blocks now in their destinations)


class Passenger(NamedTuple):
    """Block `i` of `load`, to be read from port number `port`, which waits for another load that reads it."""

    load: Load
    i: int
    port: int


class Load:
    """The state of a load, advanced by the threads of the tiers. Implements `flights.Leader`.

    Invariants: a block is open, waiting for one port, being read in one piece, a passenger of another load, or final;
    no destination is written after the job quiesced; LoadDone is reported once, LoadQuiesced only after a LoadDone that
    was not quiesced. No lock of a load is taken inside that of another.
    """

    def __init__(
        self,
        request: LoadRequest,
        ports: Sequence[TierPort],
        clock: Callable[[], float],
        report: Report,
        promote: Promote,
        flights: Flights[Passenger],
    ) -> None:
        self.request = request
        self._flights = flights
        self._led: list[FlightKey] = []  # guarded by self._lock; what it has begun to read
        self._ports, self._clock, self._report, self._promote = ports, clock, report, promote
        num_blocks = len(request.names)
        self._keys: list[FlightKey] = [(Address(name.key, request.part), request.domain) for name in request.names]
        self._lock = threading.Lock()
        self._statuses: list[BlockStatus | None] = [
            None
        ] * num_blocks  # guarded by self._lock, as all below; None: open
        self._failures: list[BlockStatus | None] = [None] * num_blocks  # the first one of each block
        self._served: list[str | None] = [None] * num_blocks
        self._waiting: list[deque[int]] = [deque() for _ in ports]
        self._lanes = [0] * len(ports)  # tasks that take pieces from that port's queue
        self._num_open, self._num_reading = num_blocks, 0  # num_reading: pieces, copies from others, loans to others
        self._is_reported = self._is_quiesced = False
        self.begun_s = clock()
        self.ended_s = 0.0  # set before it is reported

    def start(self) -> None:
        """Queue all blocks at their first ports, which are known to have them from the lookup."""
        with self._lock:
            in_time = self._clock() < self.request.deadline_s
            usable = [in_time and port.reads.would_allow() for port in self._ports]
            for i, index in enumerate(self.request.first_ports):
                if usable[index]:
                    self._waiting[index].append(i)
                else:
                    self._route(i, index + 1)
            for index in range(len(self._ports)):
                self._open_lanes(index)
            self._settle()

    def expire(self) -> None:
        """Answer now: blocks that are not complete count as timed out. For the store's thread, at the deadline."""
        with self._lock:
            if self._is_reported:
                return
            for waiting in self._waiting:
                waiting.clear()
            self._num_open = 0
            left = self._finish()
        for passenger in left:
            passenger.load._retry(passenger.i, passenger.port)

    def lend(self) -> bool:
        with self._lock:
            self._num_reading += not self._is_reported
            return not self._is_reported

    def take_back(self) -> None:
        with self._lock:
            self._num_reading -= 1
            self._settle()

    def _route(self, i: int, first_port: int) -> None:
        """Give block i to the first port from `first_port` on that may have it, or make it final. Needs the lock."""
        if self._clock() >= self.request.deadline_s:
            return self._make_final(i, self._failures[i] or BlockStatus.TIMEOUT)
        for index in range(first_port, len(self._ports)):
            port = self._ports[index]
            if port.reads.would_allow() and (not port.at_once or port.has(self._keys[i][0])):
                self._waiting[index].append(i)
                return self._open_lanes(index)
        return self._make_final(i, self._failures[i] or BlockStatus.MISS)

    def _make_final(self, i: int, status: BlockStatus, tier: str | None = None) -> None:
        self._statuses[i], self._served[i] = status, tier
        self._num_open -= 1

    def _open_lanes(self, index: int) -> None:
        """Keep as many tasks on a port's queue as there are pieces, at most its threads. Needs the lock."""
        num_pieces = -(-len(self._waiting[index]) // self.request.piece_blocks)
        while self._lanes[index] < min(num_pieces, self._ports[index].num_lanes):
            self._lanes[index] += 1
            self._ports[index].read_executor.submit(functools.partial(self._take, index))

    def _take(self, index: int) -> Task | None:
        """First phase of a lane's turn: take the next piece."""
        with self._lock:
            waiting = self._waiting[index]
            piece = [waiting.popleft() for _ in range(min(len(waiting), self.request.piece_blocks))]
            if not piece:
                self._lanes[index] -= 1
                return None
            self._num_reading += 1
        return functools.partial(self._read, index, piece)

    def _read(self, index: int, piece: list[int]) -> None:
        """Second phase: read it. The lane queues again behind other loads, which keeps them fair."""
        port = self._ports[index]
        request = self.request
        piece = self._unshared(piece, index)
        reads = [BlockRead(request.names[i], request.part, request.destinations[i], request.domain) for i in piece]
        statuses = port.get(reads, self.request.deadline_s) if reads else []
        loaded = [read for read, status in zip(reads, statuses, strict=True) if status is BlockStatus.OK]
        if loaded:
            port.probe_writes(loaded[0], request.deadline_s)
            self._promote(index, loaded)
        self._land(piece, statuses, port.name)
        with self._lock:
            self._num_reading -= 1
            self._lanes[index] -= 1
            if not self._is_reported:
                for i, status in zip(piece, statuses, strict=True):
                    if status is BlockStatus.OK:
                        self._make_final(i, status, port.name)
                    else:
                        self._failures[i] = self._failures[i] or status
                        self._route(i, index + 1)
                self._open_lanes(index)
            self._settle()

    def _unshared(self, piece: list[int], index: int) -> list[int]:
        """Those of a piece that have to be read, most of them as their leader; no other load reads or lends them."""
        keys = [self._keys[i] for i in piece]
        with self._lock:
            if self._is_reported:
                return piece
            found = self._flights.join(keys, self, lambda at: Passenger(self, piece[at], index))
            self._led += [key for at, key in enumerate(keys) if at not in found] if found else keys
        unshared = [i for at, i in enumerate(piece) if at not in found] if found else piece
        for at, answer in found.items():
            if not isinstance(answer, Loan):
                continue
            if not answer.leader.lend():
                unshared.append(piece[at])
                continue
            self._copy(piece[at], answer)
            answer.leader.take_back()
            self._flights.count_loan()
        return unshared

    def _land(self, piece: list[int], statuses: Sequence[BlockStatus], tier: str) -> None:
        """These blocks were read from `tier`, or were not: see to the loads that waited for them."""
        loans = [
            Loan(self, self.request.destinations[i], tier) if status is BlockStatus.OK else None
            for i, status in zip(piece, statuses, strict=True)
        ]
        landed = list(zip([self._keys[i] for i in piece], loans, strict=True))
        for (load, theirs, index), loan in self._flights.land(landed, self):
            if loan is None:
                load._retry(theirs, index)
            else:
                load._copy(theirs, loan)

    def _copy(self, i: int, loan: Loan) -> None:
        """Take block i from another load, whose destinations stay as they are till then."""
        with self._lock:
            if self._is_reported:
                return
            self._num_reading += 1
        copy_block(loan.source, self.request.destinations[i])
        with self._lock:
            self._num_reading -= 1
            if not self._is_reported:
                self._make_final(i, BlockStatus.OK, loan.tier)
            self._settle()

    def _retry(self, i: int, index: int) -> None:
        """Whoever read block i for this load has failed: ask the port itself."""
        with self._lock:
            if not self._is_reported:
                self._route(i, index)
                self._settle()

    def _settle(self) -> None:
        """Report if this was the last step. Needs the lock."""
        if self._num_reading or self._num_open:
            return
        if not self._is_reported:
            left = self._finish()
            assert not left, "everything that it led has landed"
        elif not self._is_quiesced:
            self._is_quiesced = True
            self._report(LoadQuiesced(self.request.job))

    def _finish(self) -> Sequence[Passenger]:
        """Report; who still waits for a block that is being read. Needs the lock."""
        self._is_reported = True
        left = self._flights.forget(self._led, self)
        self.ended_s = self._clock()
        self._is_quiesced = self._num_reading == 0
        statuses = tuple(status or BlockStatus.TIMEOUT for status in self._statuses)
        tiers = tuple(self._served)
        self._report(LoadDone(self.request.job, statuses, tiers, self._is_quiesced, self.ended_s))
        for port in self._ports:
            served = [n for n, tier in zip(self.request.names, self._served, strict=True) if tier == port.name]
            port.submit_touch(served, self.request.part)
        return left
