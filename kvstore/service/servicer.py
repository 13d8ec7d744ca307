"""The rpcs of `KVStore`: requests checked, sessions found, answers made. Loop thread only.

What is wrong with a request is raised, and becomes a gRPC status elsewhere (refusals.py); what a tier does is part of
the answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc

from pagetier.kvstore.errors import ProtocolError
from pagetier.kvstore.service.leases import Holder, Window, refuse_large
from pagetier.kvstore.service.messages import (
    MAX_BLOCKS,
    TooLarge,
    from_chain,
    from_chains,
    from_part,
    key_field,
    to_event,
    to_pins,
    to_prefixes,
    to_stored_block,
)
from pagetier.kvstore.service.refusals import UnknownNumber
from pagetier.kvstore.service.sessions import Session, Sessions
from pagetier.kvstore.service.tiers import Space, TierSet
from pagetier.kvstore.service.transfers import Background, LoadStream, PutStream
from pagetier.proto import kvstore_pb2 as pb
from pagetier.proto.kvstore_pb2_grpc import KVStoreServicer

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"

REPORT_S = 1.0  # between two reports of an Attach stream
MAX_PAYLOAD_BYTES = 64 << 20
MAX_CLIENT_CHARS = 128
MAX_IDENTITY_BYTES = 1 << 20
MAX_TOP = 1000
EVENTS_BATCH = 64
KNOWN_BLOCKS = 1024


class StoreServicer(KVStoreServicer):
    """Over one set of tiers. `lease_socket`: the path that shared memory is offered on, empty for none."""

    def __init__(self, tiers: TierSet, window: Window, sessions: Sessions, lease_socket: str) -> None:
        self._tiers, self._window, self._sessions, self._lease_socket = tiers, window, sessions, lease_socket
        self.background = Background()
        self.is_closing = asyncio.Event()

    # -- sessions ------------------------------------------------------------------------------------------------------

    async def Attach(self, request: pb.AttachRequest, context: Context) -> AsyncIterator[pb.AttachReply]:
        session = self._new_session(request)
        try:
            shared = bool(request.shared and self._lease_socket)
            reply = self._report(session.space)
            reply.session, reply.tiers[:] = session.secret, list(session.space.store.stats())
            reply.lease_socket, reply.window_bytes = self._lease_socket if shared else "", self._window.share_bytes
            yield reply
            told = (reply.num_returns, reply.tiers_json)
            while not self.is_closing.is_set():
                try:
                    async with asyncio.timeout(REPORT_S):
                        await self.is_closing.wait()
                except TimeoutError:
                    reply = self._report(session.space)
                    if told != (reply.num_returns, reply.tiers_json):
                        told = (reply.num_returns, reply.tiers_json)
                        yield reply
        finally:
            self._sessions.detach(session)

    def _new_session(self, request: pb.AttachRequest) -> Session:
        if not 0 < request.payload_bytes <= MAX_PAYLOAD_BYTES:
            raise ProtocolError(f"payload_bytes: got {request.payload_bytes}; allowed: 1 to {MAX_PAYLOAD_BYTES}")
        if len(request.identity) > MAX_IDENTITY_BYTES:
            raise TooLarge(f"identity: got {len(request.identity)} bytes; allowed: {MAX_IDENTITY_BYTES}")
        refuse_large(request.payload_bytes, self._window)
        space = self._tiers.space(request.identity, from_part(request.part), request.payload_bytes)
        client = "".join(char for char in request.client[:MAX_CLIENT_CHARS] if char.isprintable())
        session = Session(space, Holder(self._window, self._tiers.host), client)
        self._sessions.add(session)
        return session

    def _report(self, space: Space) -> pb.AttachReply:
        tiers = json.dumps(space.store.stats(), separators=(",", ":"))
        return pb.AttachReply(num_returns=space.store.num_returns, tiers_json=tiers)

    def _session(self, secret: bytes) -> Session:
        session = self._sessions.find(secret)
        if session is None:
            raise UnknownNumber("no such session; attach anew")
        return session

    # -- the engine's verbs --------------------------------------------------------------------------------------------

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupReply:
        session, names = self._session(request.session), from_chain(request.chain)
        done = await session.space.lookup(names)
        session.enter(done.ticket, names[: len(done.tiers)], done.tiers)
        reply = pb.LookupReply(ticket=done.ticket)
        for tier in done.tiers:
            if reply.runs and reply.runs[-1].tier == tier:
                reply.runs[-1].num_blocks += 1
            else:
                reply.runs.append(pb.TierRun(tier=tier, num_blocks=1))
        return reply

    async def Load(self, request: pb.LoadRequest, context: Context) -> AsyncIterator[pb.LoadReply]:
        session = self._session(request.session)
        ticket = session.tickets.get(request.ticket)
        if ticket is None:
            raise UnknownNumber(f"no ticket {request.ticket}")
        stream = LoadStream(session, ticket, request.ticket, self._window, self.background)
        async for reply in stream.run(request, self._tiers.host):
            yield reply

    async def Put(self, request_iterator: AsyncIterator[pb.PutRequest], context: Context) -> AsyncIterator[pb.PutReply]:
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        if first is None:
            raise ProtocolError("a Put begins with an offer")
        stream = PutStream(self._session(first.session), self._window, self.background)
        async for reply in stream.run(first, requests):
            yield reply

    async def Touch(self, request: pb.TouchRequest, context: Context) -> pb.TouchReply:
        self._session(request.session).space.store.touch(from_chain(request.chain))
        return pb.TouchReply()

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:
        session = self._session(request.session)
        for ticket in request.tickets:
            session.release(ticket)
        return pb.ReleaseReply()

    async def Quarantine(self, request: pb.QuarantineRequest, context: Context) -> pb.QuarantineReply:
        self._session(request.session).space.store.quarantine(from_chains(request.chains))
        return pb.QuarantineReply()

    # -- people's questions --------------------------------------------------------------------------------------------

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinReply:
        space, names = await self._space(request.domain), from_chain(request.chain)
        admin, ttl_s = space.store.admin, request.ttl_s or None
        info = await asyncio.to_thread(admin.pin, names, ttl_s, list(request.tiers))
        return to_pins([info])

    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.PinReply:
        admin = (await self._space(request.domain)).store.admin
        if request.pins or request.all:
            wanted = None if request.all else list(request.pins)
            infos = await asyncio.to_thread(admin.unpin, wanted)
        else:
            infos = await asyncio.to_thread(admin.pins)
        return to_pins(infos)

    async def Purge(self, request: pb.PurgeRequest, context: Context) -> pb.PurgeReply:
        keys = [key_field(key, "keys") for key in request.keys] or None
        root = key_field(request.root, "root") if request.root else None
        if (keys is None and root is None) != request.all:
            raise ProtocolError("purge: give keys or a root, or else all")
        admin = (await self._space(request.domain)).store.admin
        tiers = list(request.tiers) or None
        result = await asyncio.to_thread(lambda: admin.purge(keys=keys, root=root, tiers=tiers))
        return pb.PurgeReply(removed=result.removed, errors=result.errors)

    async def Query(self, request: pb.QueryRequest, context: Context) -> pb.QueryReply:
        if len(request.keys) > MAX_BLOCKS:
            raise TooLarge(f"keys: got {len(request.keys)}; allowed: {MAX_BLOCKS}")
        keys = [key_field(key, "keys") for key in request.keys]
        space = await self._space(request.domain)
        infos = await asyncio.to_thread(space.store.admin.query, keys)
        return pb.QueryReply(domain=space.domain, blocks=[to_stored_block(info) for info in infos])

    async def Known(self, request: pb.KnownRequest, context: Context) -> AsyncIterator[pb.QueryReply]:
        space = await self._space(request.domain)
        infos = await asyncio.to_thread(space.store.admin.known)
        for first in range(0, len(infos), KNOWN_BLOCKS):
            blocks = [to_stored_block(info) for info in infos[first : first + KNOWN_BLOCKS]]
            yield pb.QueryReply(domain=space.domain, blocks=blocks)

    async def Top(self, request: pb.TopRequest, context: Context) -> pb.TopReply:
        if not 1 <= request.limit <= MAX_TOP:
            raise ProtocolError(f"limit: got {request.limit}; allowed: 1 to {MAX_TOP}")
        space = await self._space(request.domain)
        forest = await asyncio.to_thread(space.store.admin.top, request.limit)
        return pb.TopReply(domain=space.domain, prefixes=to_prefixes(forest))

    async def Measure(self, request: pb.MeasureRequest, context: Context) -> pb.MeasureReply:
        measure = (await self._space(request.domain)).store.admin.measure if request.domain else self._tiers.measure
        speeds = await asyncio.to_thread(measure)
        fields = {name: speed.as_dict() for name, speed in speeds.items()}
        return pb.MeasureReply(speeds_json=json.dumps(fields))

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsReply:
        return pb.StatsReply(stats_json=json.dumps(self.stats()))

    async def Identities(self, request: pb.IdentitiesRequest, context: Context) -> pb.IdentitiesReply:
        found = await asyncio.to_thread(self._tiers.identities)
        return pb.IdentitiesReply(identities=[found[domain] for domain in sorted(found)])

    async def Events(self, request: pb.EventsRequest, context: Context) -> AsyncIterator[pb.Event]:
        log, loop, news = self._tiers.watch.events, asyncio.get_running_loop(), asyncio.Event()
        seq = log.next_seq if request.from_now else request.from_seq

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(news.set)

        stop = log.listen(wake)
        try:
            while not self.is_closing.is_set():
                tail = log.since(seq, EVENTS_BATCH)
                for event in tail.events:
                    yield to_event(event)
                seq = tail.next_seq
                if not tail.events:
                    news.clear()
                    try:
                        async with asyncio.timeout(REPORT_S):
                            await news.wait()
                    except TimeoutError:
                        continue  # look whether the service ends
        finally:
            stop()

    def stats(self) -> dict[str, object]:
        """`GET /stats` of a store, and what the service itself has under way."""
        service = {
            "sessions": len(self._sessions),
            "tickets": self._sessions.num_tickets,
            "leases": self._sessions.num_leases,
            "lost_leases": self._sessions.num_lost_leases,
            "window_bytes": self._window.held_bytes,
            "window_capacity_bytes": self._window.arena.capacity_bytes,
        }
        return {**self._tiers.stats(), "service": service}

    async def _space(self, domain: bytes) -> Space:
        return await self._tiers.find(domain)
