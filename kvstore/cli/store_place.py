"""A store service as a place that commands ask: blocks, pins and figures, each by the domain of its cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from pagetier.kvstore.admin import BlockInfo, PinInfo, PurgeResult
from pagetier.kvstore.block import BlockName
from pagetier.kvstore.event_forms import forms_of, shown_event
from pagetier.kvstore.measure import TierSpeed
from pagetier.kvstore.service.address import parse_address
from pagetier.kvstore.service.client import StoreClient


class StorePlace:
    """The service at an address. Raises ConfigError for what is no address; all methods raise PagetierError."""

    counts_hits = True

    def __init__(self, url: str) -> None:
        self._client = StoreClient(parse_address(url, flag="--store"))

    @property
    def shown(self) -> str:
        return self._client.shown

    def identities(self) -> dict[bytes, bytes]:
        return self._client.identities()

    def blocks(self, domain: bytes, keys: Sequence[bytes]) -> list[BlockInfo]:
        return self._of(domain).query(keys)

    def known(self, domain: bytes) -> list[BlockInfo]:
        return self._of(domain).known()

    def purge(
        self, domain: bytes, keys: Collection[bytes] | None, root: bytes | None, tiers: Collection[str]
    ) -> PurgeResult:
        return self._of(domain).purge(keys=keys, root=root, tiers=tiers)

    def pin(self, domain: bytes, names: Sequence[BlockName], ttl_s: float | None, tiers: Collection[str]) -> PinInfo:
        return self._of(domain).pin(names, ttl_s, tiers)

    def pins(self, domain: bytes) -> list[PinInfo]:
        return self._of(domain).pins()

    def unpin(self, domain: bytes, pin_ids: Sequence[str] | None) -> list[PinInfo]:
        return self._of(domain).unpin(pin_ids)

    def stats(self) -> dict[str, Any]:
        """`GET /stats` of a store."""
        return self._client.stats()

    def measure(self) -> dict[str, TierSpeed]:
        """How fast each tier is now."""
        return self._of(b"").measure()

    def events(self) -> Iterator[dict[str, Any]]:
        """What tiers take and lose from now on, as `GET /events` shows it, until the service ends."""
        next_seq: int | None = None
        for event in self._client.events():
            if next_seq is not None and event.seq > next_seq:
                yield {"kind": "lost", "events": event.seq - next_seq}
            next_seq = event.seq + 1
            yield from map(shown_event, forms_of(event))

    def close(self) -> None:
        """Idempotent."""
        self._client.close()

    def _of(self, domain: bytes) -> StoreClient:
        self._client.domain = domain
        return self._client
