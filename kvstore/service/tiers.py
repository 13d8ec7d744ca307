"""The tiers of a service and the stores over them: one for each cache identity, part and payload size that is served.

Tiers, executors, book and events are shared; what differs between models is the name of their blocks. All methods are
for the service's loop thread, but `admin` objects, which are for any.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

from pagetier.kvstore import places
from pagetier.kvstore.block import BlockName, BlockStatus, Part
from pagetier.kvstore.breaker import BreakerState
from pagetier.kvstore.config import StoreConfig
from pagetier.kvstore.errors import CapacityError, ConfigError
from pagetier.kvstore.executor import Executor, Task, ThreadPool
from pagetier.kvstore.host import HostTier
from pagetier.kvstore.hot import HotFile
from pagetier.kvstore.identity import CacheIdentity
from pagetier.kvstore.job import Completion, LoadDone, LoadQuiesced, LookupDone, PutDone
from pagetier.kvstore.measure import TierSpeed, measure_tier
from pagetier.kvstore.opening import open_tiers
from pagetier.kvstore.pins import PinFile
from pagetier.kvstore.port import tier_stats
from pagetier.kvstore.redis.tier import RedisTier
from pagetier.kvstore.store import TieredStore
from pagetier.kvstore.tier import Tier, TierCounters
from pagetier.kvstore.watch import Watch

MAX_SPACES = 64  # cache identities times parts; a store and a few threads' work queues each
IDLE_PUMP_S = 0.02  # how late a deadline may be noticed
MEASURED_PART, MEASURED_BYTES = Part(0, 0, 1, 0, 1), 512 << 10  # where no engine says what its blocks are
NO_DOMAIN = bytes(32)  # of tiers that are opened before anybody says what for


class _Lent:
    """An executor that several stores use: only its owner ends it."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def submit(self, task: Task) -> None:
        self._executor.submit(task)

    def pump(self) -> None:
        self._executor.pump()

    def close(self, timeout_s: float) -> bool:
        return True


class _View:
    """A tier as one store of several sees it: everything is the tier's but its end."""

    def __init__(self, tier: Tier) -> None:
        self.inner = tier
        for verb in ("name", "answers_at_once", "lookup", "get", "put", "touch", "delete", "put_identity"):
            setattr(self, verb, getattr(tier, verb))
        for verb in ("identities", "check", "pin", "unpin", "try_write", "quarantine"):
            if hasattr(tier, verb):
                setattr(self, verb, getattr(tier, verb))

    def set_domain(self, domain: bytes) -> None:
        """Views are made for a domain and keep it."""

    def counters(self) -> TierCounters:
        return self.inner.counters()

    def close(self) -> None:
        """The tier is closed by its owner."""


@dataclass(slots=True)
class Hits:
    """Of one space. lookup_tokens: in all chains that were looked up; tokens and blocks: loaded, by tier."""

    lookup_tokens: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    blocks: Counter[str] = field(default_factory=Counter)


class Space:
    """One store and those who wait for its answers."""

    def __init__(self, store: TieredStore, identity: CacheIdentity, part: Part, payload_bytes: int) -> None:
        self.store, self.identity, self.part, self.payload_bytes = store, identity, part, payload_bytes
        self.domain = identity.domain()
        self.hits = Hits()
        self.begun_s = time.monotonic()
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # owner: the loop thread, as all here
        self._quiescing: dict[int, asyncio.Future[None]] = {}
        self._done = asyncio.Event()
        self._pumping: asyncio.Task[None] | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand out answers from now on."""

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._done.set)

        self.store.wake = wake
        self._pumping = loop.create_task(self._pump())

    async def stop(self) -> None:
        """No more answers: whoever waits is cancelled."""
        if self._pumping is not None:
            self._pumping.cancel()
            await asyncio.wait((self._pumping,))
        for future in [*self._waiting.values(), *self._quiescing.values()]:
            future.cancel()

    async def lookup(self, names: Sequence[BlockName]) -> LookupDone:
        """The answer; its ticket is the caller's to release. Cancelled: the ticket is released."""
        ticket = self.store.submit_lookup(names)
        self.hits.lookup_tokens += sum(name.num_tokens for name in names)
        try:
            done = await self._answer(ticket)
        except asyncio.CancelledError:
            self._waiting.pop(ticket, None)
            self.store.release(ticket)
            raise
        assert isinstance(done, LookupDone)
        return done

    async def load(
        self, ticket: int, names: Sequence[BlockName], destinations: Sequence[memoryview]
    ) -> tuple[LoadDone, asyncio.Future[None] | None]:
        """The answer, and what to wait for before the destinations are used again. Not to be cancelled."""
        job = self.store.submit_load(ticket, names, destinations)
        quiesced: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._quiescing[job] = quiesced
        done = await self._answer(job)
        assert isinstance(done, LoadDone)
        self.count_hits(names, done.tiers)
        if done.quiesced:
            self._quiescing.pop(job, None)
            return done, None
        return done, quiesced

    def count_hits(self, names: Sequence[BlockName], tiers: Sequence[str | None]) -> None:
        """These were served by these."""
        for name, tier in zip(names, tiers, strict=True):
            if tier is not None:
                self.hits.tokens[tier] += name.num_tokens
                self.hits.blocks[tier] += 1

    async def put(self, names: Sequence[BlockName], sources: Sequence[memoryview]) -> tuple[BlockStatus, ...]:
        """The statuses, when no source is read any more. Not to be cancelled."""
        done = await self._answer(self.store.submit_put(names, sources))
        assert isinstance(done, PutDone)
        return done.statuses

    def stats(self) -> dict[str, Any]:
        """One entry of `domains` in the shape of `GET /stats`."""
        hits, looked_up = self.hits, self.hits.lookup_tokens
        tiers = self.store.stats()
        for name, tier in tiers.items():
            tier["hit_blocks"], tier["hit_tokens"] = hits.blocks[name], hits.tokens[name]
            tier["hit_rate"] = hits.tokens[name] / looked_up if looked_up else 0.0
        hit_tokens = sum(hits.tokens.values())
        rate = hit_tokens / looked_up if looked_up else 0.0
        return {
            "model": self.identity.architecture,
            "domain": self.domain.hex(),
            "uptime_s": round(time.monotonic() - self.begun_s, 3),
            "lookup": {"lookup_tokens": looked_up, "hit_tokens": hit_tokens, "hit_rate": rate},
            "tiers": tiers,
            "preemptions": {"recompute": 0, "swap": 0},
            "harmful_hits": 0,
        }

    async def _answer(self, number: int) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._hand_out_all()  # what memory tiers answer is there already
        self._done.set()
        return await future

    async def _pump(self) -> None:
        while True:
            timeout_s = IDLE_PUMP_S if self.store.has_work else None
            try:
                async with asyncio.timeout(timeout_s):
                    await self._done.wait()
            except TimeoutError:
                pass  # a deadline may have passed
            self._done.clear()
            self._hand_out_all()

    def _hand_out_all(self) -> None:
        for done in self.store.poll():
            self._hand_out(done)

    def _hand_out(self, done: Completion) -> None:
        if isinstance(done, LoadQuiesced):
            quiesced = self._quiescing.pop(done.job, None)
            if quiesced is not None and not quiesced.done():
                quiesced.set_result(None)
            return
        number = done.ticket if isinstance(done, LookupDone) else done.job
        future = self._waiting.pop(number, None)
        if future is not None and not future.done():
            future.set_result(done)


class TierSet:
    """What a service opened, and its spaces. `host`: the host tier, where there is one."""

    def __init__(self, config: StoreConfig, pins: PinFile) -> None:
        """Opens the tiers; a tier that fails to start for reasons of its medium is left out. Raises ConfigError."""
        self.config, self._pins = config, pins
        self._resources = ExitStack()
        self.tiers, self.left_out = open_tiers(config, NO_DOMAIN, self._resources)
        self.host = next((tier for tier in self.tiers if isinstance(tier, HostTier)), None)
        self.watch = Watch.of(self.tiers)
        self._pools: dict[str, ThreadPool] = {}
        self.spaces: dict[tuple[bytes, Part, int], Space] = {}
        self._is_closed = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tier.name for tier in self.tiers)

    def space(self, encoded: bytes, part: Part, payload_bytes: int) -> Space:
        """The space of an identity, made when it is new. Raises ProtocolError for bytes that are no identity,
        CapacityError when there are too many or the payload can never fit.
        """
        identity = CacheIdentity.decode(encoded)
        which = (identity.domain(), part, payload_bytes)
        found = self.spaces.get(which)
        if found is not None:
            return found
        if len(self.spaces) >= MAX_SPACES:
            raise CapacityError(f"this store serves {MAX_SPACES} caches already; start another one for more")
        tiers = [
            cast(Tier, _View(tier.of_domain(which[0]) if isinstance(tier, RedisTier) else tier)) for tier in self.tiers
        ]
        store = TieredStore(
            tiers,
            part=part,
            payload_bytes=payload_bytes,
            domain=which[0],
            load_budget_s=self.config.load_budget_s,
            limits=self.config.limits,
            make_executor=self._executor,
            left_out=self.left_out,
            second_touch=self.config.second_touch,
            watch=self.watch,
        )
        store.put_identity(which[0], encoded)
        store.admin.keep_pins(self._pins)
        if self.config.warmup:
            warmup = store.warm_up(self.config.warmup, HotFile(places.hot_dir(), which[0]), self._is_busy)
            if warmup is not None:
                warmup.start()
        space = self.spaces[which] = Space(store, identity, part, payload_bytes)
        space.start(asyncio.get_running_loop())
        return space

    def _is_busy(self) -> bool:
        """Whether any store uses the tiers. Any thread."""
        return any(space.store.has_work for space in list(self.spaces.values()))

    async def find(self, domain: bytes) -> Space:
        """The space of a domain, or of the beginning of one; the only one for an empty one. A cache that is stored and
        that nobody asked for since the start counts, too. Raises ConfigError."""
        found = {space.domain: space for space in reversed(self.spaces.values()) if space.domain.startswith(domain)}
        if not found:
            stored = await asyncio.to_thread(self.identities)
            fitting = [encoded for one, encoded in stored.items() if one.startswith(domain)]
            if len(fitting) == 1:
                return self._whole(fitting[0])
            found = {space.domain: space for space in self.spaces.values()} if not domain else {}
            known = [one.hex()[:12] for one in stored]
        else:
            known = [one.hex()[:12] for one in found]
        if len(found) == 1:
            return next(iter(found.values()))
        asked = f"no cache with the domain {domain.hex()[:16]}" if domain else "several caches, or none"
        raise ConfigError(f"{asked} in this store; give --domain, one of: {', '.join(sorted(known)) or 'none yet'}")

    def _whole(self, encoded: bytes) -> Space:
        """The space of blocks that one process holds whole."""
        identity = CacheIdentity.decode(encoded)
        group, heads = identity.groups[0], dict(identity.attention).get("num_kv_heads", 1)
        part = Part(0, 0, len(group.layers), 0, heads if isinstance(heads, int) else 1)
        return self.space(encoded, part, group.nbytes_per_token * identity.block_size)

    def identities(self) -> dict[bytes, bytes]:
        """Of all tiers. Blocks on I/O."""
        found = {space.domain: space.identity.encode() for space in self.spaces.values()}
        for tier in self.tiers:
            found.update(tier.identities())
        return found

    def measure(self) -> dict[str, TierSpeed]:
        """How fast each tier is now, for blocks as large as the largest that are served. Blocks on I/O."""
        nbytes = max((space.payload_bytes for space in self.spaces.values()), default=MEASURED_BYTES)
        return {tier.name: measure_tier(tier, MEASURED_PART, nbytes) for tier in self.tiers}

    def stats(self) -> dict[str, Any]:
        """The shape of `GET /stats` for a store that holds several identities, and each tier as a whole."""
        domains = [space.stats() for space in self.spaces.values()]
        tiers = {}
        for tier in self.tiers:
            states = {domain["tiers"][tier.name]["breaker"] for domain in domains}
            counters = tier.counters()
            is_open = counters.is_down or BreakerState.OPEN in states
            worst = BreakerState.HALF_OPEN if BreakerState.HALF_OPEN in states else BreakerState.CLOSED
            tiers[tier.name] = tier_stats(counters, BreakerState.OPEN if is_open else worst)
        tiers |= {name: tier_stats(TierCounters(), BreakerState.OPEN) for name in self.left_out}
        return {"domains": domains, "tiers": tiers}

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        for space in self.spaces.values():
            space.store.check()

    async def close(self, timeout_s: float) -> bool:
        """Write what is queued for so long, end everything; whether all was written. Idempotent."""
        if self._is_closed:
            return True
        self._is_closed = True
        deadline_s = time.monotonic() + timeout_s
        done = True
        for space in self.spaces.values():
            done &= await asyncio.to_thread(space.store.flush, max(0.0, deadline_s - time.monotonic()))
            await space.stop()
            await asyncio.to_thread(space.store.close)
        for pool in self._pools.values():
            await asyncio.to_thread(pool.close, self.config.limits.close_s)
        for tier in self.tiers:
            await asyncio.to_thread(tier.close)
        self._resources.close()
        return done

    def _executor(self, name: str, num_threads: int) -> Executor:
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = ThreadPool(name, num_threads)
        return _Lent(pool)
