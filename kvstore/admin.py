"""What people ask of a store and do to it: query, top, pin, unpin, purge. Thread-safe; may block on tiers' I/O.

Never for the engine's own thread. Owns no bytes; what is known beside the tiers comes from the book.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagetier.kvstore.block import Address, BlockName, Part
from pagetier.kvstore.book import Entry, Use
from pagetier.kvstore.errors import ConfigError, TierUnavailable
from pagetier.kvstore.keeper import RENEW_S, Kept, PinKeeper, bare
from pagetier.kvstore.measure import TierSpeed, measure_tier
from pagetier.kvstore.pins import Pin, PinFile, expiry
from pagetier.kvstore.port import TierPort
from pagetier.kvstore.prefixes import Prefix, hottest
from pagetier.kvstore.redis.tier import RedisTier
from pagetier.kvstore.tier import DescribingTier, Description, FollowingTier, ListedRecord, ListingTier
from pagetier.kvstore.watch import Watch

logger = logging.getLogger(__name__)

QUERY_TIMEOUT_S = 2.0
PURGE_TIMEOUT_S = 30.0
MAX_LEARNT = 65_536  # records whose headers are read for `top` after a start
LEARN_S = 5.0
DELETE_BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """A block as people see it. Fields that nobody knows are None.

    nbytes: of its payload. age_s: since it was stored, at most (a tier may know only when it began to write where the
    block lies). idle_s: since the last use. hits: times it was loaded from a lower tier or used again on the device,
    since this process began.
    """

    key: bytes
    tiers: tuple[str, ...] = ()
    nbytes: int = 0
    name: BlockName | None = None
    age_s: float | None = None
    idle_s: float | None = None
    hits: int = 0
    pinned: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The block's entry in `GET /query`, without text. `tokens`: positions of the first and the last."""
        name = self.name
        return {
            "key": self.key.hex(),
            "tokens": None if name is None else [name.position, name.position + name.num_tokens - 1],
            "num_tokens": None if name is None else name.num_tokens,
            "tiers": list(self.tiers),
            "bytes": self.nbytes,
            "age_s": _rounded(self.age_s),
            "idle_s": _rounded(self.idle_s),
            "hits": self.hits,
            "pinned": self.pinned,
        }


@dataclass(frozen=True, slots=True)
class PinInfo:
    """A pin and what of it the tiers hold, as of the last round."""

    pin: Pin
    held: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        names, pin = self.pin.names, self.pin
        return {
            "id": pin.pin_id,
            "domain": pin.domain.hex(),
            "num_blocks": len(names),
            "num_tokens": sum(name.num_tokens for name in names),
            "tiers": list(pin.tiers),
            "held": dict(self.held),
            "expires_in_s": None if pin.expires_s is None else round(max(0.0, pin.expires_s - time.time()), 3),
        }


@dataclass(frozen=True, slots=True)
class PurgeResult:
    """Records removed by tier, and tiers where not all could be done, with the reason."""

    removed: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {"removed": self.removed, "errors": self.errors}


def refuse_other_tiers(own: str, tiers: Collection[str]) -> None:
    """Raise ConfigError for the name of a tier in a place that is another one."""
    for tier in tiers:
        if tier != own:
            raise ConfigError.unknown_name("tier", tier, [own])


class Admin(Protocol):
    """What people ask of a store, wherever it runs: `StoreAdmin`, or a service's client. May block; any thread."""

    def query(self, keys: Sequence[bytes]) -> list[BlockInfo]:
        """Where each block is and what is known of it."""

    def known(self) -> list[BlockInfo]:
        """Every block that the store knows of."""

    def pin(
        self, names: Sequence[BlockName], ttl_s: float | None = None, tiers: Collection[str] | None = None
    ) -> PinInfo:
        """Keep a prefix, head first."""

    def unpin(self, pin_ids: Sequence[str] | None = None) -> list[PinInfo]:
        """Give up pins, or all; those that there were."""

    def pins(self) -> list[PinInfo]:
        """The pins of the store's domain."""

    def measure(self) -> dict[str, TierSpeed]:
        """How fast each tier is now."""

    def purge(
        self,
        *,
        keys: Collection[bytes] | None = None,
        root: bytes | None = None,
        tiers: Collection[str] | None = None,
    ) -> PurgeResult:
        """Remove records of the store's domain."""


class StoreAdmin:
    """Over a store's tiers. domain: that of what the store puts now. purged: called after every purge. clock: seconds;
    must be the tiers' own.

    `keep_pins` starts the one thread that renews them.
    """

    def __init__(
        self,
        ports: Sequence[TierPort],
        part: Part,
        payload_bytes: int,
        domain: Callable[[], bytes | None],
        watch: Watch,
        purged: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ports, self._part, self._domain = tuple(ports), part, domain
        self._payload_bytes = payload_bytes
        self._book, self._events, self._purged, self._clock = watch.book, watch.events, purged, clock
        self._lock = threading.Lock()
        # guarded by self._lock, as all below
        self._keeper = PinKeeper(self._ports, part, payload_bytes, watch.pin_shares, clock)
        self._file: PinFile | None = None
        self._kept: list[Kept] = []
        self._has_learnt = False
        self._wake = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    # -- questions -----------------------------------------------------------------------------------------------------

    def query(self, keys: Sequence[bytes], timeout_s: float = QUERY_TIMEOUT_S) -> list[BlockInfo]:
        """Where each block is and what is known of it. A tier that does not answer in time holds nothing."""
        deadline_s = self._clock() + timeout_s
        addresses = [Address(key, self._part) for key in keys]
        entries = self._book.find(keys)
        names = [None if entry is None else entry.name for entry in entries]
        found: list[dict[str, Description]] = [{} for _ in keys]
        for port in self._ports:
            for i, one in enumerate(self._describe(port, addresses, deadline_s)):
                if one is not None:
                    found[i][port.name] = one
                    names[i] = names[i] or one.name
        self._read_names(addresses, names, found, deadline_s)
        pinned = {name.key for kept in self._kept for name in kept.pin.names}
        return [
            _info(key, entry, name, places, key in pinned)
            for key, entry, name, places in zip(keys, entries, names, found, strict=True)
        ]

    def top(self, limit: int = 20, timeout_s: float = QUERY_TIMEOUT_S) -> list[Prefix]:
        """The hottest stored prefixes of the store's domain as a forest, hottest first; `limit` nodes at most.

        What an NVMe tier holds from before is learnt once, with no hits."""
        infos = self.known(timeout_s)
        return hottest([(info.name, info) for info in infos if info.tiers and info.name is not None], limit)

    def known(self, timeout_s: float = QUERY_TIMEOUT_S) -> list[BlockInfo]:
        """Every block of the store's domain that this process knows of, stored or not."""
        self._learn()
        entries = self._book.entries(self._domain())
        return self.query([entry.name.key for entry in entries], timeout_s) if entries else []

    def pins(self) -> list[PinInfo]:
        """The pins of the store's domain and what is held of them."""
        with self._lock:
            held = {kept.pin.pin_id: kept.held for kept in self._kept}
            pins = [] if self._file is None else self._own(self._file.read())
        return [PinInfo(pin, dict(held.get(pin.pin_id, {}))) for pin in pins]

    def measure(self) -> dict[str, TierSpeed]:
        """How fast each tier is now, by name; one that is held back by its breaker is not asked."""
        return {
            port.name: measure_tier(bare(port.tier), self._part, self._payload_bytes)
            if port.reads.would_allow() and port.writes.would_allow()
            else TierSpeed(fault="its breaker is open")
            for port in self._ports
        }

    # -- changes -------------------------------------------------------------------------------------------------------

    def pin(
        self, names: Sequence[BlockName], ttl_s: float | None = None, tiers: Collection[str] | None = None
    ) -> PinInfo:
        """Keep a prefix, head first, in these tiers (default: all) until `unpin` or for `ttl_s`; and what is held now.

        Blocks that are stored later are held from the next round on. Raises ConfigError, CapacityError, PagetierError.
        """
        domain = self._domain()
        if not names or domain is None:
            raise ConfigError("pin: nothing to pin; give a prompt of at least one full block")
        if ttl_s is not None and not 0 < ttl_s < 10 * 365 * 86_400:
            raise ConfigError.bad_value("--ttl", ttl_s, "seconds, above 0")
        for tier in tiers or ():
            self._port(tier)
        pin = Pin(domain, tuple(names), tuple(tiers or ()), expiry(ttl_s))
        self._checked_file().add(pin)
        self.renew_pins()
        return next((info for info in self.pins() if info.pin.pin_id == pin.pin_id), PinInfo(pin, {}))

    def unpin(self, pin_ids: Sequence[str] | None = None) -> list[PinInfo]:
        """Give up these pins, by the hex key of their last block, or all of the domain; those that there were."""
        domain = self._domain()
        gone = [] if domain is None else self._checked_file().remove(domain, pin_ids)
        self.renew_pins()
        return [PinInfo(pin, {}) for pin in gone]

    def purge(
        self,
        *,
        keys: Collection[bytes] | None = None,
        root: bytes | None = None,
        tiers: Collection[str] | None = None,
        timeout_s: float = PURGE_TIMEOUT_S,
    ) -> PurgeResult:
        """Remove records of the store's domain: all, those of `keys`, or those below one `root` (a tenant's salt).

        Puts that are queued may still land. Pins stay: they name what is to be kept once it is there again."""
        for tier in tiers or ():
            self._port(tier)
        deadline_s, result = self._clock() + timeout_s, PurgeResult()
        for port in self._ports:
            if tiers and port.name not in tiers:
                continue
            try:
                result.removed[port.name] = self._purge_tier(port, keys, root, deadline_s)
                if keys is None and root is None:
                    self._events.cleared(port.name, self._domain())
            except TierUnavailable as error:
                result.errors[port.name] = error.reason
        self._purged()
        return result

    # -- pins over time ------------------------------------------------------------------------------------------------

    def keep_pins(self, file: PinFile, every_s: float = RENEW_S) -> None:
        """Keep what `file` says, now and every few seconds; 0: only when `renew_pins` is called."""
        with self._lock:
            self._file = file
            if every_s and self._thread is None:
                self._thread = threading.Thread(target=self._keep, args=(every_s,), name="kv-pins", daemon=True)
                self._thread.start()

    def renew_pins(self) -> list[Kept]:
        """One round: hold what is pinned, let go of what is not, bring back what a tier lost."""
        with self._lock:
            if self._file is None or self._is_closed:
                return []
            self._kept = self._keeper.renew(self._own(self._file.read()))
            return list(self._kept)

    def close(self) -> None:
        """Let go of all pins of this process; the file keeps them. Idempotent."""
        self._wake.set()
        with self._lock:
            self._is_closed = True
            self._keeper.close()
            self._kept = []
        if self._thread is not None:
            self._thread.join()

    def _keep(self, every_s: float) -> None:
        state: object = object()
        while True:
            file = self._file
            now = None if file is None else file.state
            if (now is not None or state is not None) and not self._wake.is_set():
                try:
                    self.renew_pins()
                except Exception:
                    logger.exception("pins could not be renewed; pinned blocks may be evicted")
            state = now
            if self._wake.wait(every_s):
                return

    # -- inside --------------------------------------------------------------------------------------------------------

    def _own(self, pins: Iterable[Pin]) -> list[Pin]:
        return [pin for pin in pins if pin.domain == self._domain()]

    def _checked_file(self) -> PinFile:
        with self._lock:
            if self._file is None:
                raise ConfigError("this store keeps no pins; open it with a place for them")
            return self._file

    def _port(self, name: str) -> TierPort:
        for port in self._ports:
            if port.name == name:
                return port
        raise ConfigError.unknown_name("tier", name, [port.name for port in self._ports])

    def _describe(self, port: TierPort, addresses: Sequence[Address], deadline_s: float) -> list[Description | None]:
        tier = bare(port.tier)
        if not isinstance(tier, DescribingTier) or not port.reads.would_allow():
            return [None] * len(addresses)
        try:
            _follow(tier)
            return tier.describe(addresses, deadline_s)
        except TierUnavailable as error:
            logger.info("%s could not be asked about blocks: %s", port.name, error)
            return [None] * len(addresses)

    def _read_names(
        self,
        addresses: Sequence[Address],
        names: list[BlockName | None],
        found: Sequence[dict[str, Description]],
        deadline_s: float,
    ) -> None:
        """Fill in names that only headers in NVMe tell."""
        for port in self._ports:
            read = getattr(bare(port.tier), "names", None)
            unknown = [i for i, name in enumerate(names) if name is None and port.name in found[i]]
            if read is not None and unknown:
                for i, name in zip(unknown, read([addresses[i] for i in unknown], deadline_s), strict=True):
                    names[i] = name

    def _learn(self) -> None:
        """Once: enter what tiers hold from before."""
        with self._lock:
            if self._has_learnt:
                return
            self._has_learnt = True
        domain, deadline_s = self._domain(), self._clock() + LEARN_S
        for port in self._ports:
            learnt: list[BlockName] = []
            try:
                for record in self._listed(port, deadline_s):
                    if record.domain in (None, domain) and record.part == self._part:
                        learnt.append(record.name)
                    if len(learnt) >= MAX_LEARNT:
                        break
            except TierUnavailable as error:
                logger.info("%s could not be gone through: %s", port.name, error)
            self._book.note(Use.FOUND, learnt, domain)

    def _listed(self, port: TierPort, deadline_s: float) -> Iterable[ListedRecord]:
        tier = bare(port.tier)
        if not isinstance(tier, ListingTier):
            return ()
        _follow(tier)
        return tier.records(deadline_s)

    def _purge_tier(self, port: TierPort, keys: Collection[bytes] | None, root: bytes | None, deadline_s: float) -> int:
        tier, domain = bare(port.tier), self._domain()
        if keys is not None and root is None:
            wanted = [Address(key, self._part) for key in keys]
        elif isinstance(tier, RedisTier):
            return tier.namespaces().purge(domain or tier.domain, deadline_s, keys=keys, root=root).num_removed
        else:
            wanted = [
                record.address
                for record in self._listed(port, deadline_s)
                if record.domain in (None, domain)
                and (root is None or record.name.root == root)
                and (keys is None or record.name.key in keys)
            ]
        firsts = range(0, len(wanted), DELETE_BLOCKS)
        return sum(port.tier.delete(wanted[first : first + DELETE_BLOCKS]) for first in firsts)


def _follow(tier: object) -> None:
    """Learn what others stored a moment ago: people ask of it, too."""
    if isinstance(tier, FollowingTier):
        tier.refresh()


def _info(
    key: bytes, entry: Entry | None, name: BlockName | None, places: dict[str, Description], pinned: bool
) -> BlockInfo:
    now_s = time.time()
    stored = [one.stored_s for one in places.values() if one.stored_s is not None]
    if entry is not None and entry.stored_s is not None:
        stored = [entry.stored_s]
    return BlockInfo(
        key=key,
        tiers=tuple(places),
        nbytes=max((one.nbytes for one in places.values()), default=0),
        name=name,
        age_s=max(0.0, now_s - min(stored)) if stored and places else None,
        idle_s=max(0.0, now_s - entry.used_s) if entry is not None and entry.stored_s is not None else None,
        hits=0 if entry is None else entry.hits,
        pinned=pinned,
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
