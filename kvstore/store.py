"""The store: one set of lower tiers behind verbs that never block, and `poll` for what became of them.

Owns tickets, jobs, budgets and the tiers' lives. Knows names and buffers, not requests, device blocks or tensors.
Control runs on the caller's thread, inside `submit_*` and `poll`; only bytes and lookups with I/O go to threads. (An
asyncio control thread was the plan: it would add a third thread to every hand-over and nothing to wait for, since tiers
bring deadlines of their own.)
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any

from pagetier.kvstore import places
from pagetier.kvstore.admin import StoreAdmin
from pagetier.kvstore.assembling import AssemblingTier
from pagetier.kvstore.block import Address, BlockName, BlockStatus, Part
from pagetier.kvstore.book import Use
from pagetier.kvstore.breaker import BreakerState
from pagetier.kvstore.config import StoreConfig, StoreLimits
from pagetier.kvstore.copying import TierCopier
from pagetier.kvstore.errors import ClosedError, ConfigError
from pagetier.kvstore.executor import ExecutorFactory, ThreadPool
from pagetier.kvstore.flights import Flights, copy_of
from pagetier.kvstore.hot import HotFile, hot_order
from pagetier.kvstore.identity import CacheIdentity
from pagetier.kvstore.job import Completion, LoadDone, LoadQuiesced, LookupDone
from pagetier.kvstore.kept_identity import KeptIdentity
from pagetier.kvstore.loads import Load, LoadRequest, Passenger
from pagetier.kvstore.lookup import Lookup
from pagetier.kvstore.opening import open_tiers
from pagetier.kvstore.parts import Division, PartLayout
from pagetier.kvstore.pins import PinFile
from pagetier.kvstore.port import NUM_READ_THREADS, TierPort, tier_stats
from pagetier.kvstore.puts import PutJob, PutQueue, QueuedPut
from pagetier.kvstore.second_touch import SecondTouch
from pagetier.kvstore.tier import BlockRead, BlockWrite, Tier, TierCounters
from pagetier.kvstore.warmup import Warmup, WarmupPlan, warmed_port
from pagetier.kvstore.watch import Watch

logger = logging.getLogger(__name__)

FLUSH_POLL_S = 0.001


class TieredStore:
    """Lower tiers in hierarchy order, fastest first. One part, one payload size, one cache identity at a time.

    All methods are for one thread, the engine's; none blocks but `flush` and `close`, none raises for what a tier does.
    The caller keeps destinations until their load quiesced and sources until their put is done. Jobs and tickets are
    numbered from one counter, so no two share a number.

    load_budget_s: for one ticket's lookup and loads together. clock: seconds; must be the tiers' own. make_executor:
    `SeededExecutor(seed).factory` makes a run replay exactly, if the clock is a fake one too. resources: closed with
    the store, after its tiers. domain: of what is put and looked up from now on; None: the tiers' own. left_out: names
    of tiers that should be there and could not be built. watch: one for all, where several stores share tiers.
    second_touch: names of tiers that are given a block when it is used for a second time.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        part: Part,
        payload_bytes: int,
        domain: bytes | None = None,
        load_budget_s: float = 1.0,
        limits: StoreLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        make_executor: ExecutorFactory = ThreadPool,
        resources: ExitStack | None = None,
        left_out: Sequence[str] = (),
        second_touch: Sequence[str] = (),
        watch: Watch | None = None,
    ) -> None:
        names = [tier.name for tier in tiers]
        if len(set(names)) != len(names):
            raise ConfigError.bad_value("--kv-tier", ",".join(names), "each tier once")
        self._part, self._payload_bytes = part, payload_bytes
        self._domain = domain  # owner: the caller's thread
        self._budget_s, self._limits, self._clock = load_budget_s, limits or StoreLimits(), clock
        self._resources, self._left_out = resources or ExitStack(), tuple(left_out)
        self._ports = [TierPort(tier, self._limits, load_budget_s, make_executor, clock) for tier in tiers]
        self._queues = [PutQueue(port, part, self._limits, clock) for port in self._ports]
        watch = watch or Watch.of(tiers)
        self.book, self.events = watch.book, watch.events
        for port in self._ports:
            port.events = self.events
        self._num_purges = 0
        self.admin = StoreAdmin(self._ports, part, payload_bytes, lambda: self._domain, watch, self._count_purge, clock)
        executors = (e for p in self._ports for e in (p.lookup_executor, p.read_executor, p.write_executor))
        self._executors = list(dict.fromkeys(executors))
        self._second_touch = {i: SecondTouch() for i, tier in enumerate(tiers) if tier.name in second_touch}
        self._done: deque[Completion] = deque()  # appended to by any thread
        self.wake: Callable[[], None] | None = None  # called on any thread when `poll` has something new
        self._next = 1  # owner: the caller's thread, as all below
        self._kept_identity = KeptIdentity(self._ports, lambda: self.num_returns, clock)
        self._tickets: dict[int, Lookup] = {}
        self._asking: dict[int, Lookup] = {}  # not answered yet
        self._loads: dict[int, tuple[Load, Lookup]] = {}
        self._flights: Flights[Passenger] = Flights()
        self.warmup: Warmup | None = None
        self._hot_file: HotFile | None = None
        self._is_closed = False

    # -- the verbs -----------------------------------------------------------------------------------------------------

    def submit_lookup(self, blocks: Sequence[BlockName]) -> int:
        """Ask for the longest prefix of a chain, head first; a ticket. `LookupDone` comes with a later `poll`: the very
        next one if only tiers that answer at once need to be asked. What was found is pinned, where the tier can, until
        `release`."""
        self._check_open()
        number, report = self._take_number(), self._report
        deadline_s = self._clock() + self._budget_s * self._limits.lookup_share
        lookup = Lookup(number, blocks, self._part, self._ports, deadline_s, self._clock, report)
        lookup.domain = self._domain
        self._tickets[lookup.ticket] = lookup
        usable = [i for i, port in enumerate(self._ports) if port.reads.would_allow()]
        first_slow = next((i for i in usable if not self._ports[i].at_once), None)
        lookup.extend(usable if first_slow is None else [i for i in usable if i < first_slow])
        if first_slow is None or lookup.is_complete:
            lookup.answer()
        else:
            self._asking[lookup.ticket] = lookup
            self._ports[first_slow].lookup_executor.submit(functools.partial(_find, lookup, usable))
        return lookup.ticket

    def submit_load(self, ticket: int, blocks: Sequence[BlockName], destinations: Sequence[memoryview]) -> int:
        """Load blocks of a ticket's hit; a job. Destinations are writable and exactly `payload_bytes` each.

        `LoadDone` comes with a status per block, at the latest with the first `poll` after the budget is used up; if it
        is not quiesced, `LoadQuiesced` follows."""
        self._check_open()
        lookup = self._tickets[ticket]
        left_s = max(0.0, self._budget_s - lookup.spent_s)
        request = LoadRequest(
            job=self._take_number(),
            names=tuple(blocks),
            part=self._part,
            domain=lookup.domain,
            destinations=tuple(self._sized(destination) for destination in destinations),
            first_ports=tuple(lookup.first_ports(blocks)),
            deadline_s=self._clock() + left_s + self._floor_s(len(blocks)),
            piece_blocks=self._piece_blocks(len(blocks)),
        )
        promote = functools.partial(self._promote, request.job)
        load = Load(request, self._ports, self._clock, self._report, promote, self._flights)
        self._loads[request.job] = (load, lookup)
        lookup.loads.add(request.job)
        load.start()
        return request.job

    def submit_put(
        self, blocks: Sequence[BlockName], sources: Sequence[memoryview], *, domain: bytes | None = None
    ) -> int:
        """Store blocks, head first, in every tier; a job. Names that a tier is known to hold cost nothing there.
        `domain`: that of the names, if it is no longer the present one.

        `PutDone` comes when no source is read any more: OK when any tier stored the block now, EXISTS when it was there
        already, else what the first tier that refused it said."""
        self._check_open()
        self._kept_identity.renew()
        domain = domain or self._domain
        writes = [BlockWrite(n, self._part, self._sized(s), domain) for n, s in zip(blocks, sources, strict=True)]
        self.book.note(Use.PUT, tuple(blocks), domain)
        job = PutJob(self._take_number(), len(writes), len(self._ports), self._report, self._clock)
        for index, (port, queue) in enumerate(zip(self._ports, self._queues, strict=True)):
            second = self._second_touch.get(index)
            new: list[QueuedPut] = []
            there: list[bytes] = []
            for i, write in enumerate(writes):
                if port.has(write.address) and not queue.is_condemned(write.address):
                    there.append(write.name.key)
                    job.settle(i, BlockStatus.EXISTS)
                elif second is not None and second.turns_away(write.name):
                    job.settle(i, BlockStatus.DROPPED)
                else:
                    new.append(QueuedPut(write, job, i))
            queue.forget_drop(there)
            queue.offer(new)
        return job.job

    def is_stored(self, block: BlockName) -> bool:
        """Whether every tier is known, without I/O, to hold it: then a put need not even be prepared."""
        address = Address(block.key, self._part)
        return bool(self._ports) and all(port.has(address) for port in self._ports)

    def touch(self, blocks: Sequence[BlockName], served_by: str | None = None) -> None:
        """A request used this chain, given head first: renew it in every tier, soon and best effort. served_by: the
        tier that was read past the store."""
        self._check_open()
        self._kept_identity.renew()
        names = tuple(blocks)
        self.book.note(Use.HIT, names, self._domain, () if served_by is None else (served_by,) * len(names))
        for port in self._ports:
            port.submit_touch(names, self._part)
        for index, second in self._second_touch.items():
            if due := second.take_due(names, self._queues[index].promotion_room // self._payload_bytes):
                self._copy_from_others(index, due)

    def quarantine(self, blocks: Sequence[BlockName]) -> None:
        """Take blocks that were found wrong out of every tier, soon. Whoever puts them from now on stores them anew."""
        self._check_open()
        for queue in self._queues:
            queue.condemn([Address(block.key, self._part) for block in blocks])

    def release(self, ticket: int) -> None:
        """Give up a ticket, once. An unfinished lookup ends unseen; loads end as usual and keep the pins till then."""
        lookup = self._tickets.pop(ticket)
        self._asking.pop(ticket, None)
        lookup.is_released = True
        if not lookup.loads:
            lookup.close()

    def poll(self) -> list[Completion]:
        """Everything that finished since the last call, in the order in which it did."""
        if not self._is_closed:
            for executor in self._executors:
                executor.pump()
            self._expire()
        finished: list[Completion] = []
        while self._done:
            completion = self._done.popleft()
            if self._account(completion):
                finished.append(completion)
        return finished

    # -- beside the verbs ----------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Per tier `blocks bytes capacity_bytes evictions errors corrupt breaker`, as in `GET /stats`. No I/O.

        The breaker of a tier without its medium is open, as is that of one that could not be built."""
        absent = tier_stats(TierCounters(), BreakerState.OPEN)
        named = {port.name: port.stats() for port in self._ports}
        for port, queue in zip(self._ports, self._queues, strict=True):
            named[port.name] |= {"queued_put_bytes": queue.queued_bytes, "dropped_puts": queue.num_dropped}
            named[port.name] |= {"warmed_blocks": port.num_warmed, "residency": self.book.residency(port.name)}
        return named | {name: dict(absent) for name in self._left_out}

    def counters(self) -> dict[str, int]:
        """The store's own account: what is under way, and what was dropped, promoted through a queue, or not read
        because another load had it."""
        return {
            "tickets": len(self._tickets),
            "loads": len(self._loads),
            "queued_put_bytes": sum(queue.queued_bytes for queue in self._queues),
            "dropped_puts": sum(queue.num_dropped for queue in self._queues),
            "queued_promotions": sum(queue.num_promoted for queue in self._queues),
            "shared_reads": self._flights.num_shared,
        }

    @property
    def num_returns(self) -> int:
        """Times a tier came back or was purged. What was put before may be missing there: it was dropped meanwhile, or
        lost."""
        return self._num_purges + sum(port.num_returns for port in self._ports)

    @property
    def is_degraded(self) -> bool:
        """Whether some tier's breaker is not closed."""
        return bool(self._left_out) or any(port.state is not BreakerState.CLOSED for port in self._ports)

    @property
    def has_work(self) -> bool:
        """Whether a later `poll` will answer something."""
        return bool(self._done or self._asking or self._loads or not all(queue.is_idle for queue in self._queues))

    @property
    def limits(self) -> StoreLimits:
        """What it may have under way."""
        return self._limits

    @property
    def domain(self) -> bytes | None:
        """Of what is put and looked up now; None: the tiers' own."""
        return self._domain

    def set_identity(self, identity: CacheIdentity) -> None:
        """From now on lookups and puts are `identity`'s, and it is kept in every tier, later and best effort.

        What was begun goes on under the former one: puts that wait or are being written land there, loads read there.
        Its blocks are not removed: nothing names them any more, so they are the first to be evicted, or expire."""
        self._check_open()
        self._domain, encoded = identity.domain(), identity.encode()
        for port in self._ports:
            port.tier.set_domain(self._domain)
        self.put_identity(self._domain, encoded)

    def put_identity(self, domain: bytes, encoded: bytes) -> None:
        """Keep the encoded CacheIdentity in every tier, later and best effort."""
        self._check_open()
        self._kept_identity.put(domain, encoded)

    def warm_up(
        self, max_bytes: int, file: HotFile | None = None, is_needed: Callable[[], bool] | None = None
    ) -> Warmup | None:
        """The one warm-up of this store's host tier, to be started; None where there is no host tier to be filled.

        file: says what is hottest, and is written anew when the store closes. is_needed: whether the tiers are, where
        others use them too."""
        index, domain = warmed_port(self._ports), self._domain
        if index is None:
            return None
        is_needed = is_needed or (lambda: self.has_work)
        plan = WarmupPlan(domain, max_bytes, () if file is None else file.read())
        copier = TierCopier(self._ports, self._part, self._payload_bytes, self._clock)
        self._hot_file = file
        self.warmup = Warmup(copier, index, plan, lambda: None if self._domain != domain else not is_needed())
        return self.warmup

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued puts were written or refused; whether that was so in time. Blocks: for shutdown."""
        deadline_s = time.monotonic() + timeout_s
        while not all(queue.is_idle for queue in self._queues):
            if time.monotonic() >= deadline_s:
                return False
            for executor in self._executors:
                executor.pump()
            time.sleep(FLUSH_POLL_S)
        return True

    def check(self) -> None:
        """Raise AssertionError when an invariant of the store or of a tier is broken."""
        for port, queue in zip(self._ports, self._queues, strict=True):
            queue.check()
            port.tier.check()
        for ticket, lookup in self._tickets.items():
            assert not lookup.is_released, f"ticket {ticket} is released and still known"
        for job, (_, lookup) in self._loads.items():
            assert job in lookup.loads, f"load {job} is not of ticket {lookup.ticket}"
        assert self._loads or not self._flights, f"{len(self._flights)} blocks are led by loads that are over"

    def close(self) -> None:
        """Drop what is queued, wait for bytes under way, end the threads, close the tiers. Idempotent. `poll` still
        hands out what finished."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.warmup is not None:
            self.warmup.close()
        if self._hot_file is not None:
            self._hot_file.write(hot_order(self.book.entries(self._domain)))
        self.admin.close()
        for queue in self._queues:
            queue.close()
        for lookup in self._asking.values():
            lookup.answer()
        for load, _ in self._loads.values():
            load.expire()
        deadline_s = time.monotonic() + self._limits.close_s
        for executor in self._executors:
            if not executor.close(max(0.0, deadline_s - time.monotonic())):
                logger.warning(
                    "a KV tier still moves bytes after %.0f s; its thread is left behind", self._limits.close_s
                )
        for lookup in [*self._tickets.values(), *(lookup for _, lookup in self._loads.values())]:
            lookup.close()
        for port in self._ports:
            port.tier.close()
        self._resources.close()

    def __enter__(self) -> TieredStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _piece_blocks(self, num_blocks: int) -> int:
        """Blocks of one read in a load of that many: every lane takes its second piece while others read theirs."""
        least, most = self._limits.piece_bytes, max(self._limits.piece_bytes, self._limits.large_piece_bytes)
        nbytes = -(-num_blocks // (2 * NUM_READ_THREADS)) * self._payload_bytes
        return max(1, min(max(nbytes, least), most) // max(1, self._payload_bytes))

    def _floor_s(self, num_blocks: int) -> float:
        """What the slowest medium worth waiting for takes for that many blocks."""
        return num_blocks * self._payload_bytes / self._limits.floor_bytes_per_s

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the KV store is closed")

    def _report(self, completion: Completion) -> None:
        self._done.append(completion)
        if self.wake is not None:
            self.wake()

    def _count_purge(self) -> None:
        """On any thread; a count lost to a race would be no more than a purge counted once for two."""
        self._num_purges += 1

    def _take_number(self) -> int:
        self._next += 1
        return self._next - 1

    def _sized(self, view: memoryview) -> memoryview:
        assert view.nbytes == self._payload_bytes, f"a block of {view.nbytes} bytes, not {self._payload_bytes}"
        return view

    def _promote(self, job: int, index: int, reads: Sequence[BlockRead]) -> None:
        """On a read thread, before the load answers: put blocks that came from tier `index` into faster tiers too.

        Only where the index says at once that they are missing. Memory takes them now; others through their queue when
        the load is over, if half of it is free, as copies: the destinations may be reused by then."""
        self._give_loaded(job, index, reads)
        for i, (port, queue) in enumerate(zip(self._ports[:index], self._queues[:index], strict=True)):
            if not port.at_once or not port.writes.would_allow() or i in self._second_touch:
                continue
            missing = [BlockWrite(r.name, r.part, r.destination, r.domain) for r in reads if not port.has(r.address)]
            if not missing:
                continue
            if port.pinning is not None:
                port.put(missing, self._clock() + self._limits.put_budget_s)
            elif queue.has_room(self._payload_bytes * len(missing)):
                copies = [replace(write, source=copy_of(write.source)) for write in missing]
                queue.hold(job, [QueuedPut(copy, None, 0) for copy in copies])

    def _copy_from_others(self, index: int, names: Sequence[BlockName]) -> None:
        """Give tier `index` blocks that another one is known to hold, later and best effort."""
        others = [port for i, port in enumerate(self._ports) if i != index]
        step = self._piece_blocks(1)
        for first in range(0, len(names), step):
            piece = names[first : first + step]
            source = next((port for port in others if port.has(Address(piece[0].key, self._part))), None)
            if source is None:
                self._second_touch[index].give_back(piece)
            else:
                copy = functools.partial(self._copy_piece, index, source, piece, self._domain)
                source.read_executor.submit(copy)

    def _copy_piece(self, index: int, source: TierPort, names: Sequence[BlockName], domain: bytes | None) -> None:
        buffers = [memoryview(bytearray(self._payload_bytes)) for _ in names]
        reads = [BlockRead(name, self._part, buffer, domain) for name, buffer in zip(names, buffers, strict=True)]
        statuses = source.get(reads, self._clock() + self._budget_s + self._floor_s(len(reads)))
        found = [read for read, status in zip(reads, statuses, strict=True) if status is BlockStatus.OK]
        writes = [BlockWrite(read.name, read.part, read.destination, read.domain) for read in found]
        self._queues[index].offer([QueuedPut(write, None, 0) for write in writes])

    def _give_loaded(self, job: int, index: int, reads: Sequence[BlockRead]) -> None:
        """On a read thread: what came from tier `index` was used before, so tiers of `second-touch` are given it."""
        for other, second in self._second_touch.items():
            queue = self._queues[other]
            if other == index or not queue.has_room(self._payload_bytes * len(reads)):
                continue
            due = {name.key for name in second.take_loaded([read.name for read in reads])}
            writes = [BlockWrite(r.name, r.part, copy_of(r.destination), r.domain) for r in reads if r.name.key in due]
            queue.hold(job, [QueuedPut(write, None, 0) for write in writes])

    def _expire(self) -> None:
        now_s = self._clock()
        for lookup in self._asking.values():
            if now_s >= lookup.deadline_s:
                lookup.answer()
        for load, _ in self._loads.values():
            if now_s >= load.request.deadline_s:
                load.expire()

    def _account(self, completion: Completion) -> bool:
        """Note what ended; whether the caller is to see it."""
        if isinstance(completion, LookupDone):
            self._asking.pop(completion.ticket, None)
            return completion.ticket in self._tickets
        if isinstance(completion, LoadDone):
            load, lookup = self._loads[completion.job]
            free_s = self._floor_s(len(completion.statuses))
            lookup.charge(load.begun_s, load.ended_s, free_s)
            served = zip(load.request.names, completion.tiers, strict=True)
            hits = [(name, tier) for name, tier in served if tier is not None]
            names, tiers = tuple(name for name, _ in hits), tuple(tier for _, tier in hits)
            self.book.note(Use.HIT, names, load.request.domain, tiers)
            if completion.quiesced:
                self._end_load(completion.job)
        elif isinstance(completion, LoadQuiesced):
            self._end_load(completion.job)
        return True

    def _end_load(self, job: int) -> None:
        _, lookup = self._loads.pop(job)
        for queue in self._queues:
            queue.let_go(job)
        lookup.loads.discard(job)
        if lookup.is_released and not lookup.loads:
            lookup.close()


def _find(lookup: Lookup, usable: list[int]) -> None:
    """On a lookup thread: ask the tiers that need I/O."""
    lookup.extend(usable)
    lookup.answer()


def open_store(
    config: StoreConfig,
    identity: CacheIdentity,
    part: Part,
    payload_bytes: int,
    divisions: Sequence[Division] = (),
) -> TieredStore:
    """Build the tiers that `config` names and the store over them; the identity is put beside the records.

    divisions: how ranks of other TP and PP degrees divide blocks (`parts.divide`): what they stored is read, too.

    A tier that fails to start for reasons of its medium is left out with a warning: the store serves without it. Raises
    ConfigError for what can never work, and leaves nothing open then. Close the store to close the tiers, and to leave
    the embedded Valkey.
    """
    domain, encoded = identity.domain(), identity.encode()
    layout = PartLayout.of(identity.groups[part.group], part, payload_bytes) if divisions else None
    with ExitStack() as tidy, ExitStack() as resources:
        tiers, left_out = open_tiers(config, domain, resources)
        if layout is not None:  # the host tier is this process's own
            tiers = [t if t.name == "host" else AssemblingTier(t, part, layout, divisions) for t in tiers]
        for tier in tiers:
            tidy.callback(tier.close)
        store = TieredStore(
            tiers,
            part=part,
            payload_bytes=payload_bytes,
            domain=domain,
            load_budget_s=config.load_budget_s,
            limits=config.limits,
            resources=resources.pop_all(),
            left_out=left_out,
            second_touch=config.second_touch,
        )
        tidy.pop_all()
    store.put_identity(domain, encoded)
    store.admin.keep_pins(PinFile(config.pins_path or places.pins_path()))
    if config.warmup and (warmup := store.warm_up(config.warmup, HotFile(places.hot_dir(), domain))) is not None:
        warmup.start()
    return store
