"""A tier read across TP and PP degrees: a rank's part of a block, or the parts of other ranks that together hold it.

Wraps any tier and keeps its contract. Writes only its own part; owns nothing but the tier it wraps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pagetier.kvstore.block import Address, BlockStatus, Part
from pagetier.kvstore.parts import Division, PartLayout, sources_of
from pagetier.kvstore.tier import BlockRead, BlockWrite, Tier, TierCounters

SCRATCH_BYTES = 16 << 20  # most that pieces take at once, beyond one block's
# Of what befell a block's pieces, the worst tells: a fault must not look like a miss to the breaker.
WORST_FIRST = (BlockStatus.ERROR, BlockStatus.TIMEOUT, BlockStatus.CORRUPT, BlockStatus.MISS)


class AssemblingTier:
    """Implements `tier.Tier` over `tier`. Addresses of other parts than `part` pass as they are.

    A block counts as present when its own record is, or all pieces of one of the `divisions`, so it is a hit only if
    nothing of it is missing. Every piece is verified as a record of its own before a byte of it is used.
    """

    def __init__(self, tier: Tier, part: Part, layout: PartLayout, divisions: Sequence[Division]) -> None:
        self._tier, self._part, self._layout = tier, part, layout
        self._sources = sources_of(part, divisions)

    @property
    def inner(self) -> Tier:
        """The tier below."""
        return self._tier

    @property
    def name(self) -> str:
        return self._tier.name

    @property
    def answers_at_once(self) -> bool:
        return self._tier.answers_at_once

    def set_domain(self, domain: bytes) -> None:
        self._tier.set_domain(domain)

    def lookup(self, addresses: Sequence[Address], deadline_s: float) -> int:
        """One round trip more for each way to assemble the first block whose own record is missing."""
        found = self._tier.lookup(addresses, deadline_s)
        while found < len(addresses) and addresses[found].part == self._part:
            more = next(
                (n for pieces in self._sources if (n := self._leading(addresses[found:], pieces, deadline_s))), 0
            )
            if not more:
                break
            found += more
            found += self._tier.lookup(addresses[found:], deadline_s) if found < len(addresses) else 0
        return found

    def _leading(self, addresses: Sequence[Address], pieces: Division, deadline_s: float) -> int:
        """How many leading blocks have all of `pieces`; the first one is asked about alone, since most chains end."""
        first = [Address(addresses[0].key, piece) for piece in pieces]
        if self._tier.lookup(first, deadline_s) < len(first):
            return 0
        rest = [Address(address.key, piece) for address in addresses[1:] for piece in pieces]
        return 1 + (self._tier.lookup(rest, deadline_s) // len(pieces) if rest else 0)

    def get(self, reads: Sequence[BlockRead], deadline_s: float) -> list[BlockStatus]:
        statuses = self._tier.get(reads, deadline_s)
        for pieces in self._sources:
            missing = [
                i
                for i, status in enumerate(statuses)
                if status in (BlockStatus.MISS, BlockStatus.CORRUPT) and reads[i].part == self._part
            ]
            block_bytes = sum(map(self._layout.nbytes, pieces))
            step = max(1, SCRATCH_BYTES // block_bytes)
            for start in range(0, len(missing), step):
                batch = missing[start : start + step]
                for i, status in zip(batch, self._assemble([reads[i] for i in batch], pieces, deadline_s), strict=True):
                    statuses[i] = _worse(statuses[i], status)
        return statuses

    def _assemble(self, reads: Sequence[BlockRead], pieces: Division, deadline_s: float) -> list[BlockStatus]:
        """Read the pieces of each block and put them together; OK only where all of them are."""
        scratch = [memoryview(bytearray(self._layout.nbytes(piece))) for _ in reads for piece in pieces]
        owners = [(read, piece) for read in reads for piece in pieces]
        wanted = [
            replace(read, part=piece, destination=buffer) for (read, piece), buffer in zip(owners, scratch, strict=True)
        ]
        answers = self._tier.get(wanted, deadline_s)
        statuses = []
        for i, read in enumerate(reads):
            own = slice(i * len(pieces), (i + 1) * len(pieces))
            worst = next((status for status in WORST_FIRST if status in answers[own]), BlockStatus.OK)
            if worst is BlockStatus.OK:
                for piece, buffer in zip(pieces, scratch[own], strict=True):
                    self._layout.copy(buffer, piece, read.destination, read.part)
            statuses.append(worst)
        return statuses

    def put(self, writes: Sequence[BlockWrite], deadline_s: float) -> list[BlockStatus]:
        return self._tier.put(writes, deadline_s)

    def touch(self, addresses: Sequence[Address]) -> None:
        """The pieces too: whoever wrote them may be gone."""
        self._tier.touch(self._with_pieces(addresses))

    def delete(self, addresses: Sequence[Address]) -> int:
        """Its own records. Pieces belong to the ranks that wrote them."""
        return self._tier.delete(addresses)

    def put_identity(self, domain: bytes, encoded: bytes) -> None:
        self._tier.put_identity(domain, encoded)

    def identities(self) -> dict[bytes, bytes]:
        return self._tier.identities()

    def counters(self) -> TierCounters:
        return self._tier.counters()

    def check(self) -> None:
        self._tier.check()

    def close(self) -> None:
        self._tier.close()

    def _with_pieces(self, addresses: Sequence[Address]) -> list[Address]:
        """Each address and those of all that its block may be assembled from, in the chain's order."""
        pieces = [piece for source in self._sources for piece in source]
        widened = []
        for address in addresses:
            widened.append(address)
            if address.part == self._part:
                widened += [Address(address.key, piece) for piece in pieces]
        return widened


def _worse(before: BlockStatus, status: BlockStatus) -> BlockStatus:
    """A block's status after another way was tried: OK when that worked, else the worse of both."""
    return status if status is BlockStatus.OK else min(before, status, key=WORST_FIRST.index)
