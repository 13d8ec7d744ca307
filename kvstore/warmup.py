"""Warm-up: after a start, the hottest blocks of slower tiers are copied to the host tier while nobody needs the tiers.

Heads of chains first, a piece at a time, at a bounded rate and to bounded bytes; a piece is begun only when the store
has nothing under way, so a request waits for one piece at most. It takes a share of the tier, and ends when something
is evicted there.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pagetier.kvstore.block import Address, BlockName
from pagetier.kvstore.book import Entry
from pagetier.kvstore.copying import COPY_BLOCKS, TierCopier
from pagetier.kvstore.errors import TierUnavailable
from pagetier.kvstore.hot import MAX_HOT_BLOCKS, hot_order
from pagetier.kvstore.keeper import bare
from pagetier.kvstore.port import TierPort
from pagetier.kvstore.tier import ListingTier

logger = logging.getLogger(__name__)

HOST_SHARE = 0.75  # of the host tier, at most: the rest is for what requests bring
PAUSE_S = 0.25  # between two looks whether the tiers are free
BYTES_PER_S = 256 << 20  # a tenth of what an NVMe disk reads


@dataclass(frozen=True, slots=True)
class WarmupPlan:
    """names: hottest first, none: what was used last comes first, where a tier can tell. domain: of the names; warm-up
    ends when it is no longer the store's. max_bytes: copied at most. bytes_per_s: at most, in the mean.
    """

    domain: bytes | None
    max_bytes: int
    names: Sequence[BlockName] = ()
    bytes_per_s: float = BYTES_PER_S


class Warmup:
    """One warm-up of port number `index`. `step` is for one thread: its own, or the test's."""

    def __init__(self, copier: TierCopier, index: int, plan: WarmupPlan, may_go_on: Callable[[], bool | None]) -> None:
        """may_go_on: False: the tiers are needed now; None: for good, as when the domain has changed."""
        self._copier, self._index, self._plan, self._may_go_on = copier, index, plan, may_go_on
        self._port = copier.ports[index]
        self._names: Iterator[BlockName] | None = iter(plan.names) if plan.names else None
        self._left_bytes = plan.max_bytes
        self._lost: set[bytes] = set()
        self._is_over = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Do it all in the background."""
        self._thread = threading.Thread(target=self._run, name="kv-warmup", daemon=True)
        self._thread.start()

    def step(self) -> float | None:
        """Copy a piece, if nobody needs the tiers: seconds to rest, or None when all is done."""
        go_on = None if self._is_over else self._may_go_on()
        if go_on is False:
            return PAUSE_S
        begun_s = time.monotonic()
        piece = self._take_piece() if go_on else []
        if not piece:
            self._is_over = True
            return None
        missing = [name for name in piece if not self._port.has(Address(name.key, self._copier.part))]
        count = self._copier.fill(self._index, missing, self._plan.domain, self._lost) if missing else 0
        nbytes = count * self._copier.payload_bytes
        self._port.num_warmed += count
        self._left_bytes -= nbytes
        return max(0.0, nbytes / self._plan.bytes_per_s - (time.monotonic() - begun_s))

    def close(self) -> None:
        """Stop after the present piece. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while (rest_s := self.step()) is not None and not self._stop.wait(rest_s):
                pass
        except Exception:
            logger.exception("warm-up failed; blocks are read from slower tiers as they are asked for")

    def _take_piece(self) -> list[BlockName]:
        """The next names, as many as there is room for."""
        if self._names is None:
            self._names = iter(self._by_recency())
        room = self._room_bytes() // self._copier.payload_bytes
        return list(itertools.islice(self._names, min(COPY_BLOCKS, room)))

    def _room_bytes(self) -> int:
        counters = self._port.tier.counters()
        if counters.evictions:
            return 0
        return max(0, min(self._left_bytes, int(counters.capacity_bytes * HOST_SHARE) - counters.nbytes))

    def _by_recency(self) -> list[BlockName]:
        """Names from tiers that list what was used last first: twice what there is room for, so that heads are among
        them, which may lie further back than their children."""
        most = min(MAX_HOT_BLOCKS, 2 * self._room_bytes() // self._copier.payload_bytes)
        entries: list[Entry] = []
        for port in self._copier.ports[self._index + 1 :]:
            tier = bare(port.tier)
            try:
                for record in tier.records(float("inf")) if isinstance(tier, ListingTier) else ():
                    if record.domain in (None, self._plan.domain) and record.part == self._copier.part:
                        entries.append(Entry(record.name, record.domain, None, -float(len(entries))))
                    if len(entries) >= most:
                        break
            except TierUnavailable as error:
                logger.info("%s cannot say what was used last: %s", port.name, error)
        return hot_order(entries)


def warmed_port(ports: Sequence[TierPort]) -> int | None:
    """The number of the port that warm-up fills: the host tier's, if there is one with something below it."""
    return next((i for i, port in enumerate(ports[:-1]) if port.name == "host"), None)
