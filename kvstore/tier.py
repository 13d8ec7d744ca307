"""The contract every lower tier keeps (memory, host, nvme, redis); `tests/kvstore/tier_contract.py` checks it.

A tier moves records between its medium and caller-owned buffers. It knows nothing of requests, pins or other tiers.
All calls block and come from the store's byte threads (any number at once); none raises for a miss, a fault of the
medium or a deadline: those are statuses. Deadlines are absolute `time.monotonic()` seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pagetier.kvstore.block import Address, BlockName, BlockStatus, Part
from pagetier.kvstore.residents import Lease


@dataclass(frozen=True, slots=True)
class BlockRead:
    """Read record (name, part) into `destination` (writable, exactly the payload's size). domain: the record's; None:
    the tier's own.
    """

    name: BlockName
    part: Part
    destination: memoryview
    domain: bytes | None = None

    @property
    def address(self) -> Address:
        return Address(self.name.key, self.part)


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """Write `source` (readable, the whole payload) as record (name, part). The source is stable until `put`
    returns. domain: the record's; None: the tier's own.
    """

    name: BlockName
    part: Part
    source: memoryview
    domain: bytes | None = None

    @property
    def address(self) -> Address:
        return Address(self.name.key, self.part)


@dataclass(frozen=True, slots=True)
class TierCounters:
    """A tier's own account. Counts since start; `blocks` and `nbytes` are present values.

    restarts: times the medium was found to have begun anew, perhaps empty. is_down: it cannot be used at all now, as
    far as is known without asking it. quarantined: damaged records of which a copy was kept for a look. scrubbed_bytes:
    re-read for no other reason than to check them.
    """

    blocks: int = 0
    nbytes: int = 0
    capacity_bytes: int = 0
    evictions: int = 0
    errors: int = 0
    corrupt: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    restarts: int = 0
    is_down: bool = False
    quarantined: int = 0
    scrubbed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Description:
    """A record as its tier knows it. nbytes: of the payload. name: None where it would take reading the record.
    stored_s: since 1970, when it or something a little older was stored; None when the tier does not know.
    """

    nbytes: int
    name: BlockName | None = None
    stored_s: float | None = None


@dataclass(frozen=True, slots=True)
class ListedRecord:
    """A record that a tier holds. domain: None when the tier does not know it."""

    name: BlockName
    part: Part
    nbytes: int
    domain: bytes | None = None

    @property
    def address(self) -> Address:
        return Address(self.name.key, self.part)


class Tier(Protocol):
    """One lower tier. Thread-safe."""

    @property
    def name(self) -> str:
        """`host`, `nvme`, `redis` or `memory`."""

    @property
    def answers_at_once(self) -> bool:
        """True when `lookup` does no I/O, so that the engine's thread may call it."""

    def set_domain(self, domain: bytes) -> None:
        """From now on `domain` is the tier's own: that of lookups, touches and records that name none. No I/O.

        Records of the former one stay, untouched and so the first to be evicted; reads and writes that name it go on.
        """

    def lookup(self, addresses: Sequence[Address], deadline_s: float) -> int:
        """Number of leading addresses that are present. A hint: a record may be gone by the time it is read.

        Raises TierUnavailable when the medium does not answer in time.
        """

    def get(self, reads: Sequence[BlockRead], deadline_s: float) -> list[BlockStatus]:
        """Fill each destination; a status per read: OK, MISS, CORRUPT, TIMEOUT or ERROR.

        A destination whose status is not OK holds undefined bytes. Once `get` returned, no destination is written.
        Header, tokens, parent, domain and checksum were verified for every OK.
        """

    def put(self, writes: Sequence[BlockWrite], deadline_s: float) -> list[BlockStatus]:
        """Store each record; a status per write: OK, EXISTS, DROPPED, TIMEOUT or ERROR.

        A record becomes visible to `lookup` only when it is complete, in whole, and never after a failure.
        """

    def touch(self, addresses: Sequence[Address]) -> None:
        """Renew recency of a chain, given head first; the tail is touched first so no parent is colder than its
        child.
        """

    def delete(self, addresses: Sequence[Address]) -> int:
        """Remove records; how many were there. Best effort, never raises."""

    def put_identity(self, domain: bytes, encoded: bytes) -> None:
        """Keep the encoded CacheIdentity of `domain` beside its records. Best effort, never raises."""

    def identities(self) -> dict[bytes, bytes]:
        """Domain -> encoded CacheIdentity of all that are stored here."""

    def counters(self) -> TierCounters:
        """The tier's account. No I/O."""

    def check(self) -> None:
        """Raise AssertionError, with ids, when an invariant of the tier's own state is broken."""

    def close(self) -> None:
        """Flush what is buffered and let go of files and connections. Idempotent."""


@runtime_checkable
class PinningTier(Protocol):
    """What a tier adds when a lookup can hold its records against eviction until they were read (memory, host).

    Pins are bounded by the tier, at half of its capacity: beyond, lookups answer shorter. A pin is not a use: it does
    not renew recency. Deleting or quarantining a record ends its pins.
    """

    def pin(self, addresses: Sequence[Address]) -> Lease:
        """Hold the leading present addresses, as far as the bound allows. No I/O."""

    def unpin(self, lease: Lease) -> None:
        """Give a lease back; nothing for records that are gone, or when it was given back before. No I/O."""


@runtime_checkable
class TryingTier(Protocol):
    """What a tier adds whose put answers EXISTS without asking its medium (nvme)."""

    def try_write(self, deadline_s: float) -> BlockStatus:
        """Write a little of no consequence and remove it: OK, DROPPED when there is no room to be had or nothing is
        stored here, ERROR or TIMEOUT. Never raises.
        """


@runtime_checkable
class QuarantiningTier(Protocol):
    """What a tier adds when it can keep a copy of a record that it takes out of use (nvme)."""

    def quarantine(self, addresses: Sequence[Address], reason: str) -> None:
        """Like `delete`; each record that was there counts as corrupt. Best effort, never raises."""


@runtime_checkable
class FollowingTier(Protocol):
    """A tier that other processes write to as well, and that learns of it a little later."""

    def refresh(self) -> None:
        """Learn it now. Blocks on I/O; never raises; any thread."""


@runtime_checkable
class DescribingTier(Protocol):
    """What a tier adds that can say more of a record than whether it is there. For people's questions, not for the
    engine's way; any thread.
    """

    def describe(self, addresses: Sequence[Address], deadline_s: float) -> list[Description | None]:
        """What is known of each record of the tier's own domain; None for one that is not there.

        Reads no payload. Raises TierUnavailable when the medium does not answer in time.
        """


@runtime_checkable
class ListingTier(Protocol):
    """What a tier adds that can go through all of its records (memory, host, nvme). Any thread."""

    def records(self, deadline_s: float) -> Iterator[ListedRecord]:
        """Every record of whatever domain, in no order, as far as the deadline allows; reads headers where it must.

        What comes or goes meanwhile may be left out. Raises TierUnavailable when the medium fails or time is up.
        """


@runtime_checkable
class ReportingTier(Protocol):
    """What a tier adds that knows when records leave it (memory, host, nvme; Redis evicts in silence)."""

    def report_removed(self, callback: Callable[[Sequence[bytes]], None]) -> None:
        """Call `callback` with keys of records that are gone, soon after they went, on whatever thread noticed: it must
        not block, raise or call the tier. One callback at a time."""
