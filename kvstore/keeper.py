"""Keeps pinned prefixes where they are pinned: holds, renews and, where a tier lost one, brings it back from another.

A pin is a promise renewed every few seconds, not a lock: memory tiers hold pinned blocks outright, NVMe and Redis are
told that they were used, which makes them the last to go. So pins survive restarts (the file is read again) and a tier
that was emptied is filled from one that was not. Pinned blocks take at most PIN_SHARE of a tier, whoever pinned
them; the rest of a pin waits for room. A keeper's methods are for one thread, or under the caller's lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagetier.kvstore.block import Address, BlockName, Part
from pagetier.kvstore.copying import CALL_S, TierCopier
from pagetier.kvstore.errors import TierUnavailable
from pagetier.kvstore.pins import Pin
from pagetier.kvstore.port import TierPort
from pagetier.kvstore.residents import Lease
from pagetier.kvstore.tier import DescribingTier, Tier

logger = logging.getLogger(__name__)

PIN_SHARE = 0.25  # of a tier's capacity, for all pins together
RENEW_S = 5.0  # between two rounds
SLOW_RENEW_S = 60.0  # for tiers whose touch is I/O


@dataclass(slots=True)
class _Held:
    lease: Lease | None = None
    touched_s: float = float("-inf")


@dataclass(slots=True)
class Kept:
    """What a round found of a pin: blocks held by tier, and how many were brought back."""

    pin: Pin
    held: dict[str, int] = field(default_factory=dict)
    restored: dict[str, int] = field(default_factory=dict)


class PinShares:
    """What the keepers of one set of tiers may pin of each tier: PIN_SHARE of it together, first come, first served.

    A keeper is of one cache identity and part. Any thread. Invariant: the grants of a tier add up to its share at most.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._granted: dict[str, dict[object, int]] = {}  # guarded by self._lock; bytes by tier and keeper

    def grant(self, tier: str, keeper: object, wanted_bytes: int, capacity_bytes: int) -> int:
        """The bytes that a keeper may pin of a tier from now on, at most those that it wants; 0 gives all back."""
        with self._lock:
            granted = self._granted.setdefault(tier, {})
            others = sum(nbytes for other, nbytes in granted.items() if other is not keeper)
            nbytes = max(0, min(wanted_bytes, int(capacity_bytes * PIN_SHARE) - others))
            if nbytes:
                granted[keeper] = nbytes
            else:
                granted.pop(keeper, None)
            return nbytes


class PinKeeper:
    """Invariant: every lease belongs to a pin that the last round was given."""

    def __init__(
        self,
        ports: Sequence[TierPort],
        part: Part,
        payload_bytes: int,
        shares: PinShares,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ports, self._part, self._payload_bytes, self._clock = ports, part, payload_bytes, clock
        self._shares = shares
        self._copier = TierCopier(ports, part, payload_bytes, clock)
        self._held: dict[tuple[str, str], _Held] = {}  # by pin and tier

    def renew(self, pins: Sequence[Pin]) -> list[Kept]:
        """One round: let go of pins that are not among these, hold and renew the others. Blocks on I/O."""
        wanted = {(pin.pin_id, port.name) for pin in pins for port in self._ports if _is_for(pin, port)}
        for gone in self._held.keys() - wanted:
            self._let_go(gone)
        kept = {pin.pin_id: Kept(pin) for pin in pins}
        for index, port in enumerate(self._ports):
            own = [pin for pin in pins if _is_for(pin, port)]
            room = self._room_blocks(port, sum(len(pin.names) for pin in own))
            for pin in own:
                names = pin.names[:room]
                room -= len(names)
                self._keep(index, pin, names, kept[pin.pin_id])
        return list(kept.values())

    def close(self) -> None:
        """Let go of everything."""
        for held in list(self._held):
            self._let_go(held)
        for port in self._ports:
            self._shares.grant(port.name, self, 0, 0)

    def _room_blocks(self, port: TierPort, num_wanted: int) -> int:
        """How many blocks pins may take; 0 capacity is a medium without a bound."""
        capacity, size = port.tier.counters().capacity_bytes, max(1, self._payload_bytes)
        return self._shares.grant(port.name, self, num_wanted * size, capacity) // size if capacity else num_wanted

    def _keep(self, index: int, pin: Pin, names: Sequence[BlockName], kept: Kept) -> None:
        port = self._ports[index]
        if not names:  # earlier pins have all the room
            kept.held[port.name] = 0
            if (pin.pin_id, port.name) in self._held:
                self._let_go((pin.pin_id, port.name))
            return
        held = self._held.setdefault((pin.pin_id, port.name), _Held())
        there = self._there(port, names)
        if there is None:
            return
        missing = [name for name, is_there in zip(names, there, strict=True) if not is_there]
        restored = self._copier.fill(index, missing, pin.domain, set()) if missing else 0
        if restored:
            logger.info("%s: %d pinned blocks were brought back", port.name, restored)
        addresses = [Address(name.key, self._part) for name in names]
        if port.pinning is not None:
            lease = port.pinning.pin(addresses)  # the new one first, so that nothing is free in between
            if held.lease is not None:
                port.pinning.unpin(held.lease)
            held.lease = lease
        now_s = self._clock()
        if now_s - held.touched_s >= (RENEW_S / 2 if port.at_once else SLOW_RENEW_S):
            held.touched_s = now_s
            port.tier.touch(addresses)
        kept.held[port.name] = len(names) - len(missing) + restored
        if restored:
            kept.restored[port.name] = restored

    def _there(self, port: TierPort, names: Sequence[BlockName]) -> list[bool] | None:
        """Which of them the tier holds; None when it cannot say."""
        tier = bare(port.tier)
        if not isinstance(tier, DescribingTier) or not port.reads.would_allow():
            return None
        try:
            found = tier.describe([Address(name.key, self._part) for name in names], self._clock() + CALL_S)
        except TierUnavailable:
            return None
        return [one is not None for one in found]

    def _let_go(self, which: tuple[str, str]) -> None:
        lease = self._held.pop(which).lease
        port = next((port for port in self._ports if port.name == which[1]), None)
        if lease is not None and port is not None and port.pinning is not None:
            port.pinning.unpin(lease)


def bare(tier: Tier) -> Tier:
    """The tier itself, below what assembles parts."""
    inner: Tier = getattr(tier, "inner", tier)
    return inner


def _is_for(pin: Pin, port: TierPort) -> bool:
    return not pin.tiers or port.name in pin.tiers
