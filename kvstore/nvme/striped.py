"""Several folders as one NVMe tier: each is an `NvmeTier` of its own, with its log, lock and cap, and works alone, too.

A record is written to the folder that its key says, and found in whichever holds it: so folders may be added, taken
away or reordered, and what one that fails would be given goes to another. What a folder that fails holds is missing
meanwhile, and that only.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from itertools import zip_longest
from types import TracebackType

from pagetier.kvstore.block import Address, BlockName, BlockStatus
from pagetier.kvstore.breaker import Breaker, Outcome
from pagetier.kvstore.errors import TierUnavailable
from pagetier.kvstore.executor import ThreadPool
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.tier import BlockRead, BlockWrite, Description, ListedRecord, TierCounters

NUM_CALLERS = 3  # the store's: two that read, one that writes
CLOSE_S = 10.0
SILENT_S = 0.25  # a call that ran out of time after less says nothing of the disk


class _Stripe:
    """One folder, left alone for a while when it failed."""

    def __init__(self, tier: NvmeTier, clock: Callable[[], float]) -> None:
        self.tier, self._clock = tier, clock
        self.reads = Breaker(f"nvme reads at {tier.path}", "what it holds is recomputed", clock=clock)
        self.writes = Breaker(f"nvme writes at {tier.path}", "the other folders take its share", clock=clock)

    @property
    def may_read(self) -> bool:
        return self.reads.would_allow() and not self.tier.counters().is_down

    @property
    def may_write(self) -> bool:
        return self.writes.would_allow() and not self.tier.counters().is_down

    def holds(self, addresses: Sequence[Address]) -> list[bool]:
        return self.tier.holds(addresses) if self.reads.would_allow() else [False] * len(addresses)

    def call(self, breaker: Breaker, run: Callable[[], list[BlockStatus]], num_blocks: int) -> list[BlockStatus]:
        """The statuses of a get or put, which its breaker learns from; ERROR for all while that is open."""
        permit = breaker.acquire()
        if permit is None:
            return [BlockStatus.ERROR] * num_blocks
        begun_s, statuses, outcome = self._clock(), [BlockStatus.ERROR] * num_blocks, Outcome.FAILED
        try:
            statuses = run()
            if BlockStatus.TIMEOUT in statuses and self._clock() - begun_s < SILENT_S:
                outcome = Outcome.NEUTRAL
            elif BlockStatus.ERROR not in statuses and BlockStatus.TIMEOUT not in statuses:
                outcome = Outcome.GOOD
        finally:
            breaker.record(permit, outcome)
        return statuses


class StripedTier:
    """Implements what `NvmeTier` does over several, which it closes. Thread-safe.

    clock: the tiers' own, in seconds. in_turn: one folder after the other instead of all at once, for simulated disks.
    """

    name = "nvme"
    answers_at_once = True

    def __init__(self, tiers: Sequence[NvmeTier], clock: Callable[[], float], *, in_turn: bool = False) -> None:
        self._stripes = [_Stripe(tier, clock) for tier in tiers]
        self._tiers = tuple(tiers)
        self._pool = None if in_turn else ThreadPool("kv-nvme-stripe", NUM_CALLERS * (len(tiers) - 1))
        for tier in tiers:
            tier.find_parents_by(lambda packed: any(one.holds_packed(packed) for one in self._tiers))

    # -- the contract's verbs ------------------------------------------------------------------------------------------

    def set_domain(self, domain: bytes) -> None:
        for tier in self._tiers:
            tier.set_domain(domain)

    def lookup(self, addresses: Sequence[Address], deadline_s: float) -> int:
        """As in `Tier`; no I/O. Raises TierUnavailable while no folder can be used."""
        present = self._present(addresses)
        if not any(present) and not any(stripe.may_read for stripe in self._stripes):
            raise TierUnavailable(self.name, "lookup", "none of its folders can be used")
        return len(present) if all(present) else present.index(False)

    def get(self, reads: Sequence[BlockRead], deadline_s: float) -> list[BlockStatus]:
        """As in `Tier`. What a folder that fails holds is a miss as long as another one can be used."""
        if not any(stripe.may_read for stripe in self._stripes):
            return [BlockStatus.ERROR] * len(reads)

        def get(stripe: _Stripe, some: list[int]) -> list[BlockStatus]:
            return stripe.call(stripe.reads, lambda: stripe.tier.get([reads[i] for i in some], deadline_s), len(some))

        found = self._all(self._shares([self._holder(read.address) for read in reads]), get)
        failing = {stripe for stripe, _, statuses in found if BlockStatus.ERROR in statuses}
        is_well = any(stripe.may_read for stripe in self._stripes if stripe not in failing)
        answers = [BlockStatus.MISS] * len(reads)
        for _, some, statuses in found:
            for i, status in zip(some, statuses, strict=True):
                answers[i] = BlockStatus.MISS if is_well and status is BlockStatus.ERROR else status
        return answers

    def put(self, writes: Sequence[BlockWrite], deadline_s: float) -> list[BlockStatus]:
        """As in `Tier`; what one folder fails to write goes to the next."""

        def put(stripe: _Stripe, some: list[int]) -> list[BlockStatus]:
            return stripe.call(stripe.writes, lambda: stripe.tier.put([writes[i] for i in some], deadline_s), len(some))

        there = self._present([write.address for write in writes])
        answers = [BlockStatus.EXISTS if one else BlockStatus.ERROR for one in there]
        for turn in range(len(self._stripes)):
            left = [i for i, status in enumerate(answers) if status is BlockStatus.ERROR]
            homes = {i: self._home(writes[i].name.key, turn) for i in left}
            shares = self._shares([homes.get(i) for i in range(len(writes))])
            for _, some, statuses in self._all(shares, put):
                for i, status in zip(some, statuses, strict=True):
                    answers[i] = status
        return answers

    def touch(self, addresses: Sequence[Address]) -> None:
        for tier in self._tiers:
            tier.touch(addresses)

    def delete(self, addresses: Sequence[Address]) -> int:
        return sum(tier.delete(addresses) for tier in self._tiers)

    def quarantine(self, addresses: Sequence[Address], reason: str) -> None:
        for tier in self._tiers:
            tier.quarantine(addresses, reason)

    def try_write(self, deadline_s: float) -> BlockStatus:
        """As in `TryingTier`: OK when any folder takes it."""
        statuses = [tier.try_write(deadline_s) for tier in self._tiers]
        return BlockStatus.OK if BlockStatus.OK in statuses else statuses[0]

    # -- for people's questions ----------------------------------------------------------------------------------------

    def describe(self, addresses: Sequence[Address], deadline_s: float) -> list[Description | None]:
        found = [tier.describe(addresses, deadline_s) for tier in self._attached("describe")]
        return [next((one for one in each if one is not None), None) for each in zip(*found, strict=True)]

    def names(self, addresses: Sequence[Address], deadline_s: float) -> list[BlockName | None]:
        found = [tier.names(addresses, deadline_s) for tier in self._tiers]
        return [next((one for one in each if one is not None), None) for each in zip(*found, strict=True)]

    def records(self, deadline_s: float) -> Iterator[ListedRecord]:
        """In turn from each folder, so that what was used last comes first."""
        listed = [tier.records(deadline_s) for tier in self._attached("list")]
        return (record for each in zip_longest(*listed) for record in each if record is not None)

    def report_removed(self, callback: Callable[[Sequence[bytes]], None]) -> None:
        lock = threading.Lock()  # one callback at a time

        def report(keys: Sequence[bytes]) -> None:
            with lock:
                callback(keys)

        for tier in self._tiers:
            tier.report_removed(report)

    def put_identity(self, domain: bytes, encoded: bytes) -> None:
        for tier in self._tiers:
            tier.put_identity(domain, encoded)

    def identities(self) -> dict[bytes, bytes]:
        return {domain: encoded for tier in self._tiers for domain, encoded in tier.identities().items()}

    def counters(self) -> TierCounters:
        """Of all folders together; down when all are."""
        all_of = [tier.counters() for tier in self._tiers]
        counts = {name: sum(getattr(one, name) for one in all_of) for name in TierCounters.__slots__}
        return TierCounters(**counts | {"is_down": all(one.is_down for one in all_of)})

    def refresh(self) -> None:
        for tier in self._tiers:
            tier.refresh()

    def check(self) -> None:
        for tier in self._tiers:
            tier.check()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close(CLOSE_S)
        for tier in self._tiers:
            tier.close()

    def __enter__(self) -> StripedTier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _attached(self, op: str) -> list[NvmeTier]:
        tiers = [tier for tier in self._tiers if not tier.counters().is_down]
        if not tiers:
            raise TierUnavailable(self.name, op, "none of its folders can be used")
        return tiers

    def _present(self, addresses: Sequence[Address]) -> list[bool]:
        held = [stripe.holds(addresses) for stripe in self._stripes]
        return reduce(lambda a, b: list(map(operator.or_, a, b)), held)

    def _holder(self, address: Address) -> _Stripe | None:
        return next((stripe for stripe in self._stripes if stripe.holds([address])[0]), None)

    def _home(self, key: bytes, turn: int) -> _Stripe:
        """The folder that a key goes to, if it can be used, else the next one that can; `turn`: that many further."""
        first, count = int.from_bytes(key[:4], "little") + turn, len(self._stripes)
        around = [self._stripes[(first + i) % count] for i in range(count)]
        return next((stripe for stripe in around if stripe.may_write), around[0])

    @staticmethod
    def _shares(stripes: Iterable[_Stripe | None]) -> list[tuple[_Stripe, list[int]]]:
        """Each folder and the indices that are its own."""
        shares: dict[_Stripe, list[int]] = {}
        for i, stripe in enumerate(stripes):
            if stripe is not None:
                shares.setdefault(stripe, []).append(i)
        return list(shares.items())

    def _all(
        self, shares: list[tuple[_Stripe, list[int]]], run: Callable[[_Stripe, list[int]], list[BlockStatus]]
    ) -> list[tuple[_Stripe, list[int], list[BlockStatus]]]:
        """`run` for each folder and its indices, all at once; the last on this thread."""
        found: dict[int, list[BlockStatus]] = {}
        done = threading.Semaphore(0)

        def one(at: int) -> None:
            stripe, some = shares[at]
            found[at] = [BlockStatus.ERROR] * len(some)
            try:
                found[at] = run(stripe, some)
            finally:
                done.release()

        for at in range(len(shares)):
            if self._pool is None or at == len(shares) - 1:
                one(at)
            else:
                self._pool.submit(partial(one, at))
        for _ in shares:
            done.acquire()
        return [(stripe, some, found[at]) for at, (stripe, some) in enumerate(shares)]
