"""What a bounded tier in memory holds: sizes, order and pins of its records, in one account.

Owns who is there, who leaves first and what may not leave; knows no bytes. Shared by the host tier and the memory tier.
Not thread-safe: the owner's lock guards it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pagetier.kvstore.block import Address
from pagetier.kvstore.lru import ChainLRU


@dataclass(slots=True)
class Lease:
    """Pins that were given together. Handing it back empties it, so a second time does nothing; a record that was
    removed took its pins along, and one that came after it at the same address keeps its own.
    """

    held: list[tuple[Address, int]] = field(default_factory=list)  # address and birth of each record

    def __len__(self) -> int:
        return len(self.held)


class Residents:
    """Records by address. Invariants, tested by `check()`: order and sizes hold the same addresses; the counted bytes
    are theirs; what is pinned takes at most `max_pinned_bytes`.
    """

    def __init__(self, max_pinned_bytes: int) -> None:
        self._max_pinned_bytes = max_pinned_bytes
        self._sizes: dict[Address, int] = {}
        self._births: dict[Address, int] = {}  # tells a record from an earlier one at its address
        self._lru: ChainLRU[Address] = ChainLRU()
        self._nbytes = self._pinned_bytes = self._num_evicted = self._num_added = 0
        self.on_gone: Callable[[Sequence[bytes]], None] | None = None  # told the keys of what was removed or evicted

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, address: Address) -> bool:
        return address in self._sizes

    @property
    def nbytes(self) -> int:
        """Bytes of all that is there."""
        return self._nbytes

    @property
    def num_pinned(self) -> int:
        """Records with at least one pin."""
        return self._lru.num_pinned

    @property
    def num_evicted(self) -> int:
        """Records that `evict` took since start."""
        return self._num_evicted

    def num_leading(self, addresses: Sequence[Address]) -> int:
        """How many of `addresses` are there before the first that is not."""
        for i, address in enumerate(addresses):
            if address not in self._sizes:
                return i
        return len(addresses)

    def add(self, address: Address, parent: Address, nbytes: int) -> None:
        """A new record, as recent as its chain."""
        self._lru.add(address, parent)
        self._num_added += 1
        self._sizes[address], self._births[address] = nbytes, self._num_added
        self._nbytes += nbytes

    def remove(self, address: Address) -> bool:
        """Forget a record and its pins; whether it was there."""
        if address not in self._sizes:
            return False
        if self._lru.is_pinned(address):
            self._pinned_bytes -= self._sizes[address]
        self._lru.remove(address)
        self._forget(address)
        self._report([address])
        return True

    def _forget(self, address: Address) -> None:
        self._nbytes -= self._sizes.pop(address)
        del self._births[address]

    def touch(self, addresses: Sequence[Address]) -> None:
        """Renew a chain, given head first."""
        self._lru.touch(addresses)

    def evict(self, num_records: int) -> list[Address]:
        """Take out the coldest that are not pinned, children before parents."""
        victims = self._lru.evict(num_records)
        for address in victims:
            self._forget(address)
        self._num_evicted += len(victims)
        self._report(victims)
        return victims

    def _report(self, gone: Sequence[Address]) -> None:
        if self.on_gone is not None and gone:
            self.on_gone([address.key for address in gone])

    def evict_for(self, parent: Address, *, is_head: bool) -> Address | None:
        """Take out the coldest for a child of `parent`, None when nobody leaves for it.

        A suffix without its prefix is useless: the child's own parent is not taken, and nothing is for an orphan.
        """
        held = parent in self._lru
        if not held and not is_head:
            return None
        if held:
            self._lru.pin(parent)
        victims = self.evict(1)
        if held:
            self._lru.unpin(parent)
        return victims[0] if victims else None

    def pin(self, addresses: Iterable[Address]) -> Lease:
        """Hold the leading ones that are there against eviction, as far as the bound allows."""
        lease = Lease()
        for address in addresses:
            nbytes = self._sizes.get(address)
            if nbytes is None:
                break
            if not self._lru.is_pinned(address) and self._pinned_bytes + nbytes > self._max_pinned_bytes:
                break
            if self._lru.pin(address):
                self._pinned_bytes += nbytes
            lease.held.append((address, self._births[address]))
        return lease

    def unpin(self, lease: Lease) -> None:
        """Give a lease back."""
        held, lease.held = lease.held, []
        for address, birth in held:
            if self._births.get(address) == birth and self._lru.unpin(address):
                self._pinned_bytes -= self._sizes[address]

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken. O(n)."""
        self._lru.check()
        assert set(self._lru) == self._sizes.keys(), "the order and the sizes hold different records"
        assert self._births.keys() == self._sizes.keys(), "births and sizes hold different records"
        nbytes = sum(self._sizes.values())
        assert nbytes == self._nbytes, f"{nbytes} bytes, counted {self._nbytes}"
        pinned = sum(size for address, size in self._sizes.items() if self._lru.is_pinned(address))
        assert pinned == self._pinned_bytes <= self._max_pinned_bytes, (
            f"{pinned} bytes pinned, counted {self._pinned_bytes} of {self._max_pinned_bytes}"
        )
