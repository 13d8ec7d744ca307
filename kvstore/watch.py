"""What is noticed of a set of tiers while a store, or several over the same tiers, work with them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pagetier.kvstore.book import BlockBook
from pagetier.kvstore.events import EventLog
from pagetier.kvstore.keeper import PinShares, bare
from pagetier.kvstore.tier import ReportingTier, Tier


@dataclass(frozen=True, slots=True)
class Watch:
    """One book, one log of events, and one account of what is pinned."""

    book: BlockBook = field(default_factory=BlockBook)
    events: EventLog = field(default_factory=EventLog)
    pin_shares: PinShares = field(default_factory=PinShares)

    def removed(self, tier: str, keys: Sequence[bytes]) -> None:
        """These left a tier. Cheap, since a tier may call it under its own lock."""
        self.events.removed(tier, keys)
        self.book.left(tier, keys)

    @classmethod
    def of(cls, tiers: Iterable[Tier]) -> Watch:
        """A new one that is told what leaves these tiers."""
        watch = cls()
        for tier in map(bare, tiers):
            if isinstance(tier, ReportingTier):
                tier.report_removed(functools.partial(watch.removed, tier.name))
        return watch
