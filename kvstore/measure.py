"""How fast a tier is now, by the contract's own verbs: a few blocks of nobody's are put, found, read and deleted.

Takes a fraction of a second on a sound tier and is bounded by its deadlines on any other. The blocks belong to a domain
of no model, so nobody can ever be served one.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from pagetier.kvstore.block import Address, BlockStatus, Part
from pagetier.kvstore.errors import TierUnavailable
from pagetier.kvstore.keys import chain_names, root_key
from pagetier.kvstore.tier import BlockRead, BlockWrite, Tier

NUM_BLOCKS = 8
NUM_LOOKUPS = 16
CALL_S = 5.0  # longest that one call may take
DOMAIN = hashlib.sha256(b"pgt1-measure").digest()
STORED = (BlockStatus.OK, BlockStatus.EXISTS)


@runtime_checkable
class ScopedTier(Protocol):
    """A tier that finds and deletes records of one domain only (redis)."""

    def of_domain(self, domain: bytes) -> Tier:
        """The same tier as seen from another domain."""


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """What was seen. lookup_s: median of asking for NUM_BLOCKS blocks. block_s: to read one block, the latency of a
    hit. Rates over NUM_BLOCKS blocks. fault: why there is no figure; empty where all went well.
    """

    lookup_s: float | None = None
    block_s: float | None = None
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    fault: str = ""

    def load_s(self, nbytes: int) -> float | None:
        """How long a load of so many bytes takes at that speed."""
        if self.block_s is None or self.lookup_s is None or not self.read_bytes_per_s:
            return None
        return self.lookup_s + self.block_s + nbytes / self.read_bytes_per_s

    def as_dict(self) -> dict[str, Any]:
        return {
            "lookup_s": self.lookup_s,
            "block_s": self.block_s,
            "read_bytes_per_s": self.read_bytes_per_s,
            "write_bytes_per_s": self.write_bytes_per_s,
            "fault": self.fault,
        }


def measure_tier(tier: Tier, part: Part, payload_bytes: int, clock: Callable[[], float] = time.monotonic) -> TierSpeed:
    """Measure a tier; its contents are as before, but what made room for the blocks. Blocks; any thread; never raises
    for what the tier does. clock: the tier's."""
    if isinstance(tier, ScopedTier):
        tier = tier.of_domain(DOMAIN)
    seed = int.from_bytes(os.urandom(4), "little")  # else a run that was cut short would leave what the next one finds
    names = chain_names(root_key(DOMAIN), [seed + i for i in range(4 * NUM_BLOCKS)], 4)
    addresses = [Address(name.key, part) for name in names]
    payload = memoryview(os.urandom(payload_bytes))
    writes = [BlockWrite(name, part, payload, DOMAIN) for name in names]
    begun_s = clock()
    statuses = tier.put(writes, begun_s + CALL_S)
    write_s = clock() - begun_s
    try:
        if any(status not in STORED for status in statuses):
            return TierSpeed(fault=f"a write answered {next(s for s in statuses if s not in STORED)}")
        return _read(tier, part, addresses, writes, payload_bytes, write_s, clock)
    except TierUnavailable as error:
        return TierSpeed(fault=error.reason)
    finally:
        tier.delete(addresses)


def _read(
    tier: Tier,
    part: Part,
    addresses: list[Address],
    writes: list[BlockWrite],
    payload_bytes: int,
    write_s: float,
    clock: Callable[[], float],
) -> TierSpeed:
    lookups_s = []
    for _ in range(NUM_LOOKUPS):
        begun_s = clock()
        tier.lookup(addresses, begun_s + CALL_S)
        lookups_s.append(clock() - begun_s)
    buffers = [memoryview(bytearray(payload_bytes)) for _ in writes]
    reads = [BlockRead(w.name, part, buffer, DOMAIN) for w, buffer in zip(writes, buffers, strict=True)]
    singles_s = []
    for read in reads[:3]:
        begun_s = clock()
        (status,) = tier.get([read], begun_s + CALL_S)
        if status is not BlockStatus.OK:
            return TierSpeed(fault=f"a read answered {status}")
        singles_s.append(clock() - begun_s)
    begun_s = clock()
    statuses = tier.get(reads, begun_s + CALL_S)
    read_s = clock() - begun_s
    if any(status is not BlockStatus.OK for status in statuses):
        return TierSpeed(fault=f"a read answered {next(s for s in statuses if s is not BlockStatus.OK)}")
    nbytes = payload_bytes * len(writes)
    return TierSpeed(
        statistics.median(lookups_s),
        statistics.median(singles_s),
        nbytes / max(read_s, 1e-9),
        nbytes / max(write_s, 1e-9),
    )
