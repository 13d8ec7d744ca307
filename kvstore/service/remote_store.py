"""A store that is a service, behind the verbs of `TieredStore`: the same answers to the same calls, from elsewhere.

The engine's thread only leaves work for one loop thread and takes answers from a queue; bytes are copied by a few
threads of their own. When the service is gone or slow, hits get shorter, puts are dropped, and the link is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from pagetier.kvstore.admin import Admin
from pagetier.kvstore.block import BlockName, BlockStatus, Part
from pagetier.kvstore.breaker import Breaker, BreakerState, Outcome
from pagetier.kvstore.config import StoreLimits
from pagetier.kvstore.copier import Copier, PlainCopier
from pagetier.kvstore.errors import ClosedError, ProtocolError
from pagetier.kvstore.events import EventLog, StoreEvent
from pagetier.kvstore.identity import CacheIdentity
from pagetier.kvstore.job import Completion, LoadDone, LookupDone, PutDone
from pagetier.kvstore.service.address import StoreAddress
from pagetier.kvstore.service.client import StoreClient
from pagetier.kvstore.service.link import Attached, Link, LinkClosed, Terms, calling
from pagetier.kvstore.service.messages import from_event, to_chains
from pagetier.kvstore.service.remote_transfers import RemoteLoad, RemotePut
from pagetier.proto import kvstore_pb2 as pb

logger = logging.getLogger(__name__)

NUM_COPY_THREADS = 2
MAX_TOUCHES = 32
MAX_PUTS = 4  # streams at once
HOUSEKEEPING_S = 2.0
START_WAIT_S = 3.0
CLOSE_S = 5.0
EVENTS_RETRY_S = 0.5


@dataclass(eq=False, slots=True)
class _Ticket:
    """owner: the loop thread. remote: its number there, in one life of the session."""

    names: tuple[BlockName, ...]
    link: Link
    attached: Attached | None = None
    remote: int = 0
    positions: dict[bytes, int] = field(default_factory=dict)
    begun_s: float = 0.0
    spent_s: float = 0.0
    num_loads: int = 0
    is_answered: bool = False
    is_released: bool = False


class RemoteStore:
    """Implements what connectors need of a `TieredStore`. Methods are for one thread, the engine's; none blocks but
    `flush`, `close` and making it, which waits a moment for the service.

    A load is always quiesced when it is answered: bytes reach a destination by this process's own copies only.
    """

    def __init__(
        self,
        address: StoreAddress,
        identity: CacheIdentity,
        part: Part,
        payload_bytes: int,
        *,
        load_budget_s: float = 1.0,
        limits: StoreLimits | None = None,
        copier: Copier | None = None,
        start_wait_s: float = START_WAIT_S,
    ) -> None:
        """copier: what moves blocks between this process's buffers and shared memory; None: numpy."""
        self._address, self._part, self._payload_bytes = address, part, payload_bytes
        self._budget_s, self._limits = load_budget_s, limits or StoreLimits()
        self._breaker = Breaker("store service", "hits end at the device, the rest is recomputed")
        self._done: deque[Completion] = deque()  # appended to by the loop thread
        self._next = 1  # owner: the caller's thread, as the one below
        self._is_closed = False
        self._domain = identity.domain()  # owner: the caller's thread
        self._tickets: dict[int, _Ticket] = {}  # owner: the loop thread, as all below
        self._links: dict[bytes, Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._put_bytes = self._num_touches = 0
        self._num_open = 0  # jobs and lookups that are not answered
        self._dropped_puts = 0
        self._news = threading.Event()
        self._admin: StoreClient | None = None
        self.events = EventLog(on_follow=self._follow_events)  # of the service's tiers, while somebody follows
        self._relaying: asyncio.Task[None] | None = None
        self._copier = copier or PlainCopier()
        self._copy_threads = ThreadPoolExecutor(NUM_COPY_THREADS, "kv-store-copy")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kv-store-link", daemon=True)
        self._thread.start()
        self._current = self._call(self._open_link(identity))
        deadline_s = time.monotonic() + start_wait_s
        while self._current.attached is None and time.monotonic() < deadline_s:
            self._news.wait(max(0.0, min(0.1, deadline_s - time.monotonic())))

    # -- the verbs -----------------------------------------------------------------------------------------------------

    def submit_lookup(self, blocks: Sequence[BlockName]) -> int:
        number, names = self._take_number(), tuple(blocks)
        self._post(self._lookup(number, _Ticket(names, self._current, begun_s=time.monotonic())))
        return number

    def submit_load(self, ticket: int, blocks: Sequence[BlockName], destinations: Sequence[memoryview]) -> int:
        number = self._take_number()
        assert len(blocks) == len(destinations), f"{len(blocks)} names for {len(destinations)} destinations"
        self._post(self._load(number, ticket, tuple(blocks), tuple(destinations)))
        return number

    def submit_put(
        self, blocks: Sequence[BlockName], sources: Sequence[memoryview], *, domain: bytes | None = None
    ) -> int:
        number = self._take_number()
        self._post(self._put(number, tuple(blocks), tuple(sources), domain or self._domain))
        return number

    def is_stored(self, block: BlockName) -> bool:
        """Nobody here knows; an offer costs little."""
        return False

    def touch(self, blocks: Sequence[BlockName]) -> None:
        if self._num_touches < MAX_TOUCHES and blocks:  # read on another thread: a few more do no harm
            self._post(self._touch(self._current, tuple(blocks)))

    def quarantine(self, blocks: Sequence[BlockName]) -> None:
        self._post(self._quarantine(self._current, tuple(blocks)))

    def release(self, ticket: int) -> None:
        self._post(self._release(ticket))

    def poll(self) -> list[Completion]:
        finished = []
        while self._done:
            finished.append(self._done.popleft())
        return finished

    # -- beside the verbs ----------------------------------------------------------------------------------------------

    def set_identity(self, identity: CacheIdentity) -> None:
        """As for `TieredStore`: what was begun goes on in the former session."""
        self._check_open()
        self._domain = identity.domain()
        self._current = self._call(self._open_link(identity))

    @property
    def admin(self) -> Admin:
        """What people ask of the service, about this store's cache. Its methods wait for it: for another thread."""
        admin = self._admin
        if admin is None or admin.domain != self._domain:
            admin = self._admin = StoreClient(self._address, self._domain)
        return admin

    @property
    def domain(self) -> bytes:
        return self._domain

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Of the service, as far as it was ever reached."""
        return tuple(self._current.tiers)

    @property
    def num_returns(self) -> int:
        current: Link = self._current
        return current.num_returns + self._breaker.num_recoveries

    @property
    def is_attached(self) -> bool:
        """Whether the service is reached now."""
        return self._current.attached is not None

    @property
    def has_work(self) -> bool:
        return bool(self._done or self._num_open)

    def stats(self) -> dict[str, Any]:
        """The service's tiers as it last reported them; open while it is not reached."""
        tiers = {name: dict(tier) for name, tier in self._current.tiers.items()}
        is_down = not self.is_attached or self._breaker.state is BreakerState.OPEN
        for tier in tiers.values():
            tier["breaker"] = str(BreakerState.OPEN) if is_down else tier.get("breaker")
        return tiers

    def counters(self) -> dict[str, int]:
        """What is under way, and what was dropped."""
        return {
            "tickets": len(self._tickets),
            "loads": sum(ticket.num_loads for ticket in list(self._tickets.values())),
            "queued_put_bytes": self._put_bytes,
            "dropped_puts": self._dropped_puts,
            "open": self._num_open,
        }

    def flush(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while self._put_bytes:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(0.001)
        return True

    def check(self) -> None:
        """Raise AssertionError when the account of what is under way is wrong."""
        assert self._put_bytes >= 0 and self._num_open >= 0, f"{self._put_bytes} bytes, {self._num_open} open"

    def close(self) -> None:
        """Answer what is open with what there is, end the session. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._admin is not None:
            self._admin.close()
        self._call(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._copy_threads.shutdown()

    # -- on the loop thread --------------------------------------------------------------------------------------------

    async def _open_link(self, identity: CacheIdentity) -> Link:
        domain = identity.domain()
        for old in list(self._links.values()):
            if not old.num_jobs and old.terms.identity != identity.encode():
                self._links.pop(next(key for key, link in self._links.items() if link is old))
                self._start(old.close())
        link = self._links.get(domain)
        if link is None:
            terms = Terms(identity.encode(), self._part, self._payload_bytes, f"pid {os.getpid()}")
            link = self._links[domain] = Link(self._address, terms, self._news.set)
        return link

    async def _shut_down(self) -> None:
        await self._set_relay(False)
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=CLOSE_S / 2)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        for link in self._links.values():
            await link.close()
        if ending := asyncio.all_tasks() - {asyncio.current_task()}:  # gRPC's own, of calls that were cancelled
            await asyncio.wait(ending, timeout=CLOSE_S / 10)
        await self._loop.shutdown_asyncgens()

    async def _lookup(self, number: int, ticket: _Ticket) -> None:
        self._tickets[number] = ticket
        self._num_open += 1
        tiers: list[str] = []
        attached, permit = ticket.link.attached, None
        if attached is not None and ticket.names:
            permit = self._breaker.acquire()
        if attached is not None and permit is not None:
            outcome, reason = Outcome.FAILED, ""
            try:
                request = pb.LookupRequest(session=attached.session, chain=to_chains(ticket.names)[0])
                budget_s = self._budget_s * self._limits.lookup_share
                reply = await self._rpc(attached.stub.Lookup, request, budget_s)
                for run in reply.runs:
                    tiers += [run.tier] * min(run.num_blocks, len(ticket.names) - len(tiers))
                ticket.attached, ticket.remote = attached, reply.ticket
                outcome = Outcome.GOOD
            except (grpc.aio.AioRpcError, LinkClosed) as error:
                outcome, reason = self._judge(attached, error)
            except ProtocolError as error:
                outcome, reason = Outcome.NEUTRAL, str(error)
            finally:
                self._breaker.record(permit, outcome, reason)
        ticket.spent_s, ticket.is_answered = time.monotonic() - ticket.begun_s, True
        ticket.positions = {name.key: i for i, name in enumerate(ticket.names[: len(tiers)])}
        self._num_open -= 1
        if ticket.is_released:
            self._forget(number, ticket)
        else:
            self._done.append(LookupDone(number, tuple(tiers)))

    async def _load(
        self, job: int, number: int, names: tuple[BlockName, ...], destinations: tuple[memoryview, ...]
    ) -> None:
        ticket = self._tickets[number]
        ticket.num_loads += 1
        self._num_open += 1
        ticket.link.num_jobs += 1
        begun_s = time.monotonic()
        floor_s = len(names) * self._payload_bytes / self._limits.floor_bytes_per_s
        timeout_s = max(0.0, self._budget_s - ticket.spent_s) + floor_s
        load = RemoteLoad(names, destinations, self._copier, self._copy_threads)
        attached = ticket.attached
        positions = [ticket.positions.get(name.key) for name in names]
        permit = self._breaker.acquire() if attached is not None and None not in positions else None
        if attached is None or permit is None or attached.lost.is_set():
            load.end(BlockStatus.MISS if attached is None else BlockStatus.ERROR)
        else:
            known = [position for position in positions if position is not None]
            request = pb.LoadRequest(
                session=attached.session,
                ticket=ticket.remote,
                blocks=known,
                shared=attached.memory is not None,
                job=job,
            )
            outcome, reason = Outcome.GOOD, ""
            try:
                with calling():
                    await load.run(attached, request, timeout_s, self._address.metadata)
            except (grpc.aio.AioRpcError, LinkClosed) as error:
                outcome, reason = self._judge(attached, error)
                is_late = isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                load.end(BlockStatus.TIMEOUT if is_late else BlockStatus.ERROR)
            except ProtocolError as error:
                outcome, reason = Outcome.FAILED, str(error)
                load.end(BlockStatus.ERROR)
            finally:
                load.end(BlockStatus.ERROR)
                self._breaker.record(permit, outcome, reason)
        ticket.spent_s += max(0.0, time.monotonic() - begun_s - floor_s)
        self._done.append(LoadDone(job, load.final_statuses, tuple(load.tiers), True, time.monotonic()))
        if load.damaged:
            self._start(self._quarantine(ticket.link, tuple(load.damaged)))
        self._num_open -= 1
        ticket.link.num_jobs -= 1
        ticket.num_loads -= 1
        if ticket.is_released and not ticket.num_loads:
            self._forget(number, ticket)

    async def _put(
        self, job: int, names: tuple[BlockName, ...], sources: tuple[memoryview, ...], domain: bytes
    ) -> None:
        nbytes = len(names) * self._payload_bytes
        link, put = self._links.get(domain), RemotePut(names, sources, self._copier, self._copy_threads)
        attached = None if link is None else link.attached
        fits = self._put_bytes + nbytes <= self._limits.put_queue_bytes or not self._put_bytes
        if attached is None or link is None or not fits or not self._breaker.would_allow():
            put.end(BlockStatus.DROPPED)
            self._dropped_puts += len(names)
            self._done.append(PutDone(job, put.final_statuses))
            return
        self._put_bytes += nbytes
        self._num_open += 1
        link.num_jobs += 1
        try:
            timeout_s = self._limits.put_budget_s + self._put_bytes / self._limits.floor_bytes_per_s
            with calling():
                await put.run(attached, job, timeout_s, self._address.metadata)
        except (grpc.aio.AioRpcError, LinkClosed) as error:
            self._judge(attached, error)
            logger.debug("a put to the store service failed: %s", error)
        except ProtocolError as error:
            logger.warning("the store service broke the protocol: %s; its blocks are not stored", error)
        finally:
            put.end(BlockStatus.ERROR)
            self._put_bytes -= nbytes
            self._num_open -= 1
            link.num_jobs -= 1
            self._done.append(PutDone(job, put.final_statuses, time.monotonic()))

    async def _touch(self, link: Link, names: tuple[BlockName, ...]) -> None:
        attached = link.attached
        if attached is None or not self._breaker.would_allow():
            return
        self._num_touches += 1
        try:
            for chain in to_chains(names):
                await self._rpc(attached.stub.Touch, pb.TouchRequest(session=attached.session, chain=chain))
        except (grpc.aio.AioRpcError, LinkClosed) as error:
            self._judge(attached, error)
        finally:
            self._num_touches -= 1

    async def _quarantine(self, link: Link, names: tuple[BlockName, ...]) -> None:
        attached = link.attached
        if attached is None:
            return
        try:
            request = pb.QuarantineRequest(session=attached.session, chains=to_chains(names))
            await self._rpc(attached.stub.Quarantine, request)
        except (grpc.aio.AioRpcError, LinkClosed) as error:
            logger.warning("%d wrong blocks could not be reported to the store: %s", len(names), error)

    def _follow_events(self, wanted: bool) -> None:
        if not self._is_closed:
            self._post(self._set_relay(wanted))

    async def _set_relay(self, wanted: bool) -> None:
        if self._relaying is not None:
            self._relaying.cancel()
            self._relaying = None
        if wanted:
            self._relaying = self._loop.create_task(self._relay())

    async def _relay(self) -> None:
        """The service's events into our log, from now on. What happens while it is not reached is not told."""
        while True:
            attached = self._current.attached
            if attached is not None:
                call: Any = attached.stub.Events(pb.EventsRequest(from_now=True), metadata=self._address.metadata)
                try:
                    with calling():
                        while isinstance(event := await call.read(), pb.Event):
                            self._enter_event(from_event(event))
                except (grpc.aio.AioRpcError, LinkClosed, ProtocolError) as error:
                    logger.debug("the store service's events ended: %s", error)
                finally:
                    call.cancel()
            await asyncio.sleep(EVENTS_RETRY_S)

    def _enter_event(self, event: StoreEvent) -> None:
        """Removals do not say whose: they are told to all."""
        if event.domain in (None, self._domain):
            self.events.append(event.kind, event.medium, event.keys, event.names, event.domain)

    async def _release(self, number: int) -> None:
        ticket = self._tickets[number]
        ticket.is_released = True
        if ticket.is_answered and not ticket.num_loads:
            self._forget(number, ticket)

    def _forget(self, number: int, ticket: _Ticket) -> None:
        del self._tickets[number]
        attached = ticket.attached
        if attached is not None and not attached.lost.is_set():
            self._start(self._release_remote(attached, ticket.remote))

    async def _release_remote(self, attached: Attached, remote: int) -> None:
        try:
            await self._rpc(attached.stub.Release, pb.ReleaseRequest(session=attached.session, tickets=[remote]))
        except (grpc.aio.AioRpcError, LinkClosed) as error:
            self._judge(attached, error)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _judge(self, attached: Attached, error: grpc.aio.AioRpcError | LinkClosed) -> tuple[Outcome, str]:
        """What a failed call says of the service; a lost session is attached anew."""
        if isinstance(error, LinkClosed):
            return Outcome.NEUTRAL, str(error)
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND):
            attached.lost.set()
            return Outcome.NEUTRAL, error.details() or ""
        if error.code() is grpc.StatusCode.CANCELLED:
            return Outcome.NEUTRAL, "cancelled"
        return Outcome.FAILED, error.details() or error.code().name

    async def _rpc(self, method: Any, request: Any, timeout_s: float = HOUSEKEEPING_S) -> Any:
        with calling():
            return await method(request, timeout=timeout_s, metadata=self._address.metadata)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except asyncio.CancelledError:
                raise
            except Exception:
                logger.exception("work for the store service failed; its blocks count as misses")

        task = self._loop.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _post(self, work: Coroutine[Any, Any, None]) -> None:
        """Leave work for the loop thread, in order."""
        if self._is_closed:
            work.close()
            raise ClosedError("the KV store is closed")
        self._loop.call_soon_threadsafe(self._start, work)

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run work on the loop thread and wait for it: for what is done at once."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the KV store is closed")

    def _take_number(self) -> int:
        self._check_open()
        self._next += 1
        return self._next - 1
