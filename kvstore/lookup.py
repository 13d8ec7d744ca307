"""One lookup: the longest prefix of a chain that the tiers hold between them, block by block, pinned.

Knows tiers only as ports. Runs where it is told to: on the caller's thread as far as no I/O is needed, else on a tier's
lookup thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pagetier.kvstore.block import Address, AddressRun, BlockName, Part
from pagetier.kvstore.job import LookupDone
from pagetier.kvstore.port import TierPort
from pagetier.kvstore.residents import Lease
from pagetier.kvstore.tier import PinningTier

FIRST_STEP_BLOCKS = 64


class Lookup:
    """A ticket: what was asked, what is found and pinned so far, and whether it was answered.

    Block i is served by the first port, in hierarchy order, that has it. Invariant: every pin belongs to a block in
    `_assigned`; after `close` there is no pin.
    """

    def __init__(
        self,
        ticket: int,
        names: Sequence[BlockName],
        part: Part,
        ports: Sequence[TierPort],
        deadline_s: float,
        clock: Callable[[], float],
        report: Callable[[LookupDone], None],
    ) -> None:
        self.ticket, self.deadline_s = ticket, deadline_s
        self.loads: set[int] = set()  # owner: the store's thread, as the two below
        self.is_released = False
        self.domain: bytes | None = None  # of the names
        self._names, self._ports, self._clock, self._report = tuple(names), ports, clock, report
        self._begun_s = clock()
        self.spent_s = 0.0  # of the ticket's budget; owner: the store's thread, once answered
        self._charged_until_s = 0.0  # owner: the store's thread
        self._part = part
        self._keys: list[bytes] = []  # owner: whoever runs it; of the leading blocks, taken as far as needed
        self._runs: dict[int, tuple[int, int]] = {}  # owner: whoever runs it; port -> half-open run last found by I/O
        self._full: set[int] = set()  # owner: whoever runs it; ports whose pins reached their bound
        self._lock = threading.Lock()
        self._assigned: list[int] = []  # guarded by self._lock; port index of each leading block
        self._pins: list[tuple[PinningTier, Lease]] = []  # guarded by self._lock
        self._found: dict[bytes, int] | None = None  # owner: the store's thread, once answered; key -> port index
        self._is_answered = self._is_closed = False  # guarded by self._lock

    @property
    def is_complete(self) -> bool:
        """Whether every block was found."""
        with self._lock:
            return len(self._assigned) == len(self._names)

    @property
    def is_answered(self) -> bool:
        with self._lock:
            return self._is_answered

    def extend(self, ports: Sequence[int]) -> None:
        """Find as much as these ports (indices, hierarchy order) hold between them, from where it stands."""
        while True:
            with self._lock:
                at = len(self._assigned)
                if self._is_closed or self._is_answered or at == len(self._names):
                    return
            if not self._extend_run(at, ports):
                return

    def answer(self) -> None:
        """Report what was found so far, once; whatever is still looking ends without effect."""
        with self._lock:
            if self._is_answered or self._is_closed:
                return
            self._is_answered = True
            self.spent_s = self._clock() - self._begun_s
            names = [port.name for port in self._ports]
            tiers = tuple(map(names.__getitem__, self._assigned))
            self._report(LookupDone(self.ticket, tiers))

    def first_ports(self, blocks: Sequence[BlockName]) -> list[int]:
        """For each block, the index of the port it was found in; 0 for one that was not found."""
        if self._found is None:
            with self._lock:
                self._found = {name.key: port for name, port in zip(self._names, self._assigned, strict=False)}
        return [self._found.get(block.key, 0) for block in blocks]

    def charge(self, begun_s: float, ended_s: float, free_s: float) -> None:
        """Take a load's time from the ticket's budget: the part not charged for another load, beyond `free_s`."""
        own_s = ended_s - max(begun_s, self._charged_until_s)
        self.spent_s += max(0.0, own_s - free_s)
        self._charged_until_s = max(self._charged_until_s, ended_s)

    def close(self) -> None:
        """Drop all pins. Idempotent."""
        with self._lock:
            self._is_closed = True
            pins, self._pins = self._pins, []
        for tier, lease in pins:
            tier.unpin(lease)

    def _extend_run(self, at: int, ports: Sequence[int]) -> bool:
        for rank, index in enumerate(ports):
            count = self._count(index, at)
            count = self._until_faster(ports[:rank], at, count)
            run = self._window(at, count)
            tier = self._ports[index].pinning
            if not run:
                continue
            if tier is None:
                return self._assign(index, len(run), None)
            lease = tier.pin(run)
            if len(lease) < count:
                self._full.add(index)
            if lease:
                return self._assign(index, len(lease), (tier, lease))
        return False

    def _count(self, index: int, at: int) -> int:
        """How many blocks from `at` on the port has. What I/O told before is not asked again."""
        if index in self._full:
            return 0
        start, end = self._runs.get(index, (0, 0))
        if start <= at < end:
            return end - at
        if start < end == at:
            return 0
        port = self._ports[index]
        if port.at_once:
            return self._count_at_once(port, at)
        count = port.find(self._window(at, len(self._names) - at), self.deadline_s)
        if count:
            self._runs[index] = (at, at + count)
        return count

    def _count_at_once(self, port: TierPort, at: int) -> int:
        """In growing steps: most long chains are missed at their first blocks."""
        count, step = 0, FIRST_STEP_BLOCKS
        while window := self._window(at + count, step):
            found = port.find(window, self.deadline_s)
            count += found
            if found < len(window):
                break
            step *= 4
        return count

    def _window(self, at: int, count: int) -> AddressRun:
        """Addresses of up to `count` blocks from `at` on."""
        end = min(at + count, len(self._names))
        if end > len(self._keys):
            self._keys += [name.key for name in self._names[len(self._keys) : end]]
        return AddressRun(self._keys[at:end], self._part)

    def _until_faster(self, faster: Sequence[int], at: int, count: int) -> int:
        """Cut a run where an earlier port, one that answers at once, has a block again."""
        candidates = [self._ports[i] for i in faster if self._ports[i].at_once and i not in self._full]
        for i in range(1, count if candidates else 0):
            if any(port.has(Address(self._keys[at + i], self._part)) for port in candidates):
                return i
        return count

    def _assign(self, index: int, count: int, pins: tuple[PinningTier, Lease] | None) -> bool:
        with self._lock:
            if not self._is_closed and not self._is_answered:
                self._assigned.extend([index] * count)
                if pins is not None:
                    self._pins.append(pins)
                return True
        if pins is not None:
            pins[0].unpin(pins[1])
        return False
