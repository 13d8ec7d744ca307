"""Blocks on their way between a client and the store: the Load and Put streams. Loop thread only.

Bytes travel in slots of the window, whoever fills or empties them, so what is under way is bounded by it: a stream that
finds no slot waits, and its client with it. Blocks of the host tier are lent where they lie.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass

import xxhash

from pagetier.kvstore.arena import Slot
from pagetier.kvstore.block import BlockName, BlockStatus
from pagetier.kvstore.errors import ProtocolError
from pagetier.kvstore.host import HostTier
from pagetier.kvstore.service.leases import HOST_ARENA, WINDOW_ARENA, Window
from pagetier.kvstore.service.messages import STATUSES, from_chains
from pagetier.kvstore.service.sessions import Session, Ticket
from pagetier.proto import kvstore_pb2 as pb

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20  # of a payload in one message
FIRST_LENT_BLOCKS, LENT_BLOCKS = 16, 512  # in a message: the client is to begin soon, and not to be told often
GRANTED_BLOCKS = 8
MAX_ANSWERS = 8  # that wait to be sent; of 1 MiB when they carry bytes
CHECKSUM_BYTES = 16


class Background:
    """Work that must come to its end whatever becomes of the call it belongs to."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Awaitable[None]) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work
            except asyncio.CancelledError:
                raise
            except Exception:
                logger.exception("a transfer of the store service failed; its blocks count as failed")

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self) -> None:
        """Wait for all of it."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))


@dataclass(slots=True)
class Staged:
    """A block in a slot of the window."""

    slot: Slot
    view: memoryview


class _Lending:
    """Blocks of one arena on their way to a client, by tier: lists, since an object for each block costs more than its
    bytes do."""

    def __init__(self, arena: int, nbytes: int) -> None:
        self._arena, self._nbytes = arena, nbytes
        self._by_tier: dict[str, tuple[pb.LentBlocks, list[bytes]]] = {}

    def add(self, tier: str, index: int, lease: int, offset: int, checksum: bytes) -> None:
        found = self._by_tier.get(tier)
        if found is None:
            lent = pb.LentBlocks(tier=tier, arena=self._arena, nbytes=self._nbytes)
            found = self._by_tier[tier] = (lent, [])
        lent, checksums = found
        lent.index.append(index)
        lent.lease.append(lease)
        lent.offset.append(offset)
        checksums.append(checksum)

    @property
    def is_any(self) -> bool:
        return bool(self._by_tier)

    def lent(self) -> list[pb.LentBlocks]:
        """All of them."""
        for lent, checksums in self._by_tier.values():
            lent.checksums = b"".join(checksums)
        return [lent for lent, _ in self._by_tier.values()]


class LoadStream:
    """One Load. Answers come as blocks arrive; a cancelled call leaves no slot behind."""

    def __init__(self, session: Session, ticket: Ticket, number: int, window: Window, background: Background) -> None:
        self._session, self._ticket, self._number = session, ticket, number
        self._window, self._background = window, background
        self._answers: asyncio.Queue[pb.LoadReply | None] = asyncio.Queue(MAX_ANSWERS)
        self._is_cancelled = False
        self._job = 0

    async def run(self, request: pb.LoadRequest, host: HostTier | None) -> AsyncIterator[pb.LoadReply]:
        """All replies. Raises ProtocolError for a request that cannot be."""
        indices = list(request.blocks)
        if not all(i < len(self._ticket.names) for i in indices) or len(set(indices)) != len(indices):
            raise ProtocolError(f"blocks: allowed: below {len(self._ticket.names)}, the ticket's hit, each once")
        if request.shared and not self._session.has_socket:
            raise ProtocolError("shared: the session has no lease socket open")
        self._job = request.job
        names = [self._ticket.names[i] for i in indices]
        rest = list(range(len(names)))
        if request.shared and host is not None:
            async for reply in self._lend(names, rest, host):
                yield reply
        if not rest:
            return
        self._ticket.num_loads += 1
        self._background.run(self._read(names, rest, shared=request.shared))
        try:
            while (answer := await self._answers.get()) is not None:
                yield answer
        finally:
            self._is_cancelled = True
            while not self._answers.empty():  # whoever waits to answer goes on, and sees that nobody listens
                self._answers.get_nowait()

    async def _lend(self, names: Sequence[BlockName], rest: list[int], host: HostTier) -> AsyncIterator[pb.LoadReply]:
        """Blocks that lie in the host tier, a few at a time, so that the client copies while the next are looked up;
        they are taken out of `rest`."""
        space, holder = self._session.space, self._session.holder
        served: list[int] = []
        try:
            first, count = 0, FIRST_LENT_BLOCKS
            while first < len(names):
                if holder.has_ended(self._job) or not self._session.has_socket:
                    rest.clear()  # nobody is left to give it back
                    return
                lending = _Lending(HOST_ARENA, space.payload_bytes)
                for i, loan in enumerate(host.lend(names[first : first + count], space.part), first):
                    if loan is not None and loan.nbytes == space.payload_bytes:
                        lease = holder.lend_block(loan, self._job)
                        lending.add(host.name, i, lease, loan.offset, loan.checksum)
                        served.append(i)
                    elif loan is not None:
                        host.give_back(loan)
                if lending.is_any:
                    yield pb.LoadReply(lent=lending.lent())
                first, count = first + count, LENT_BLOCKS
        finally:  # what was lent is used, whether or not the client waits for the rest
            taken = set(served)
            rest[:] = [i for i in rest if i not in taken]
            hits = [names[i] for i in served]
            space.count_hits(hits, [host.name] * len(hits))
            space.store.touch(hits, host.name)

    async def _read(self, names: Sequence[BlockName], rest: Sequence[int], *, shared: bool) -> None:
        """Through the window, a piece at a time, the next one read while the one before is sent."""
        space = self._session.space
        limits = space.store.limits
        step = max(1, min(limits.piece_bytes, self._window.share_bytes // 2) // space.payload_bytes)
        try:
            pieces = [rest[first : first + step] for first in range(0, len(rest), step)]
            reading: list[asyncio.Task[None]] = []
            for piece in pieces:
                if self._is_cancelled:
                    break
                staged = [Staged(slot, self._window.arena.view(slot)) for slot in await self._slots(len(piece))]
                reading.append(self._background.run(self._read_piece(names, piece, staged, shared=shared)))
                if len(reading) > 1:
                    await asyncio.wait((reading.pop(0),))
            if reading:
                await asyncio.wait(reading)
        finally:
            self._ticket.num_loads -= 1
            if not self._is_cancelled:
                await self._answers.put(None)

    async def _slots(self, count: int) -> list[Slot]:
        holder, nbytes = self._session.holder, self._session.space.payload_bytes
        return [await self._window.take(nbytes, holder) for _ in range(count)]

    async def _read_piece(
        self, names: Sequence[BlockName], piece: Sequence[int], staged: Sequence[Staged], *, shared: bool
    ) -> None:
        session, left = self._session, list(staged)
        try:
            tiers: Sequence[str | None] = [None] * len(piece)
            if self._number not in session.tickets:
                statuses, quiesced = [BlockStatus.MISS] * len(piece), None
            else:
                done, quiesced = await session.space.load(
                    self._number, [names[i] for i in piece], [one.view for one in staged]
                )
                statuses, tiers = list(done.statuses), done.tiers
            reply, lending = pb.LoadReply(), _Lending(WINDOW_ARENA, session.space.payload_bytes)
            for i, status, tier, one in zip(piece, statuses, tiers, staged, strict=True):
                block = pb.LoadedBlock(index=i, status=STATUSES[status], tier=tier or "")
                if status is BlockStatus.OK and not self._is_cancelled:
                    checksum = xxhash.xxh3_128_digest(one.view)
                    if shared and session.has_socket and not session.holder.has_ended(self._job):
                        left.remove(one)
                        one.view.release()
                        lease = session.holder.lend_slot(one.slot, self._job)
                        lending.add(block.tier, i, lease, one.slot.offset, checksum)
                        continue
                    if not shared:
                        block.checksum = checksum
                        await self._send_bytes(block, one.view)
                        continue
                    block.status = pb.ERROR
                reply.blocks.append(block)
            reply.lent.extend(lending.lent())
            if (reply.blocks or reply.lent) and not self._is_cancelled:
                await self._answers.put(reply)
            if quiesced is not None:
                await quiesced
        finally:
            for one in left:
                one.view.release()
                self._window.free(one.slot, session.holder)

    async def _send_bytes(self, block: pb.LoadedBlock, view: memoryview) -> None:
        for first in range(0, view.nbytes, PIECE_BYTES):
            if self._is_cancelled:
                return
            data, is_last = bytes(view[first : first + PIECE_BYTES]), first + PIECE_BYTES >= view.nbytes
            piece = pb.LoadedBlock(index=block.index, data=data)
            if is_last:
                piece.status, piece.tier, piece.checksum = block.status, block.tier, block.checksum
            await self._answers.put(pb.LoadReply(blocks=[piece]))


@dataclass(slots=True)
class _Incoming:
    """A block of a Put that is being filled: by us, through `view`, or by the client, who has it on `lease`."""

    slot: Slot
    view: memoryview | None
    lease: int = 0
    at: int = 0


class PutStream:
    """One Put: an offer, slots for what is wanted, bytes, statuses."""

    def __init__(self, session: Session, window: Window, background: Background) -> None:
        self._session, self._window, self._background = session, window, background
        self._replies: asyncio.Queue[pb.PutReply | None] = asyncio.Queue()
        self._names: list[BlockName] = []
        self._open: set[int] = set()  # blocks without a final status
        self._incoming: dict[int, _Incoming] = {}
        self._storing: set[int] = set()
        self._is_shared, self._job = False, 0
        self._error: ProtocolError | None = None

    async def run(self, first: pb.PutRequest, requests: AsyncIterator[pb.PutRequest]) -> AsyncIterator[pb.PutReply]:
        """All replies. Raises ProtocolError for what the protocol does not allow."""
        if first.shared and not self._session.has_socket:
            raise ProtocolError("shared: the session has no lease socket open")
        self._names, self._is_shared, self._job = from_chains(first.offer), first.shared, first.job
        self._open = set(range(len(self._names)))
        store = self._session.space.store
        known = [i for i, name in enumerate(self._names) if store.is_stored(name)]
        self._settle(known, [BlockStatus.EXISTS] * len(known))
        granting = asyncio.create_task(self._grant(sorted(self._open)))
        reading = asyncio.create_task(self._read(requests))
        try:
            while self._open or not self._replies.empty():
                reply = await self._replies.get()
                if reply is not None:
                    yield reply
                elif self._error is not None:
                    raise self._error
                else:
                    granting.cancel()
                    self._give_up()
        finally:
            reading.cancel()
            granting.cancel()
            await asyncio.wait((reading, granting))
            self._give_up()

    async def _grant(self, wanted: Sequence[int]) -> None:
        """Ask for blocks as slots come free, a few in one message."""
        space, holder = self._session.space, self._session.holder
        for first in range(0, len(wanted), GRANTED_BLOCKS):
            reply = pb.PutReply()
            for i in wanted[first : first + GRANTED_BLOCKS]:
                if reply.blocks and not self._window.has_room(space.payload_bytes, holder):
                    self._replies.put_nowait(reply)
                    reply = pb.PutReply()
                slot = await self._window.take(space.payload_bytes, holder)
                if self._is_shared and (holder.has_ended(self._job) or not self._session.has_socket):
                    self._window.free(slot, holder)
                    return
                reply.blocks.append(self._granted(i, slot))
            self._replies.put_nowait(reply)

    def _granted(self, i: int, slot: Slot) -> pb.PutStatus:
        status = pb.PutStatus(index=i, status=pb.WANTED)
        if self._is_shared:
            lease = self._session.holder.lend_slot(slot, self._job)
            self._incoming[i] = _Incoming(slot, None, lease)
            status.slot.CopyFrom(pb.Slot(lease=lease, arena=WINDOW_ARENA, offset=slot.offset, nbytes=slot.nbytes))
        else:
            self._incoming[i] = _Incoming(slot, self._window.arena.view(slot))
        return status

    async def _read(self, requests: AsyncIterator[pb.PutRequest]) -> None:
        """Take in requests to their end, then say so."""
        try:
            async for request in requests:
                ready: list[tuple[int, _Incoming]] = []
                for block in request.blocks:
                    if block.withdrawn:
                        self._withdraw([block.index])
                    elif (incoming := self._filled(block)) is not None:
                        ready.append((block.index, incoming))
                if ready:
                    self._storing.update(i for i, _ in ready)
                    self._background.run(self._store(ready))
        except ProtocolError as error:
            self._error = error
        finally:
            self._replies.put_nowait(None)

    def _filled(self, block: pb.PutBlock) -> _Incoming | None:
        """Take in what a request says of a block; the block when it is complete."""
        incoming = self._incoming.get(block.index)
        if incoming is None:
            raise ProtocolError(f"blocks: {block.index} was not asked for, or is complete already")
        if self._is_shared:
            if block.data or len(block.checksum) != CHECKSUM_BYTES:
                raise ProtocolError(f"blocks: shared ones come as a checksum of {CHECKSUM_BYTES} bytes and no data")
            if not self._session.holder.keep(incoming.lease):
                raise ProtocolError(f"blocks: the slot of {block.index} was given back")
            incoming.view, incoming.lease = self._window.arena.view(incoming.slot), 0
        elif not self._is_filled(block, incoming):
            return None
        del self._incoming[block.index]
        assert incoming.view is not None, "what is filled is ours"
        if xxhash.xxh3_128_digest(incoming.view) == block.checksum:
            return incoming
        self._free(incoming)
        self._settle([block.index], [BlockStatus.CORRUPT])
        return None

    def _is_filled(self, block: pb.PutBlock, incoming: _Incoming) -> bool:
        """Take in a piece of a payload; whether it was the last one."""
        assert incoming.view is not None, "not shared, so ours"
        nbytes, end = incoming.view.nbytes, incoming.at + len(block.data)
        if end > nbytes or (block.checksum and end != nbytes):
            raise ProtocolError(f"blocks: {end} bytes for {block.index}; allowed: {nbytes}")
        incoming.view[incoming.at : end] = block.data
        incoming.at = end
        return bool(block.checksum)

    async def _store(self, ready: Sequence[tuple[int, _Incoming]]) -> None:
        indices = [i for i, _ in ready]
        statuses: Sequence[BlockStatus] = [BlockStatus.ERROR] * len(ready)
        try:
            views = [incoming.view for _, incoming in ready if incoming.view is not None]
            statuses = await self._session.space.put([self._names[i] for i in indices], views)
        finally:
            for _, incoming in ready:
                self._free(incoming)
            self._storing.difference_update(indices)
            self._settle(indices, statuses)

    def _free(self, incoming: _Incoming) -> None:
        if incoming.view is not None:
            incoming.view.release()
        self._window.free(incoming.slot, self._session.holder)

    def _give_up(self) -> None:
        """No more bytes will come: what is not being stored is dropped."""
        self._withdraw(list(self._incoming))
        left = sorted(self._open - self._storing)
        self._settle(left, [BlockStatus.DROPPED] * len(left))

    def _withdraw(self, indices: Sequence[int]) -> None:
        """These will not come. A slot that the client may write to is its own to return."""
        for i in indices:
            incoming = self._incoming.pop(i, None)
            if incoming is not None:
                if not incoming.lease:
                    self._free(incoming)
                self._settle([i], [BlockStatus.DROPPED])

    def _settle(self, indices: Sequence[int], statuses: Sequence[BlockStatus]) -> None:
        self._open.difference_update(indices)
        if indices:
            answers = [
                pb.PutStatus(index=i, status=STATUSES[status]) for i, status in zip(indices, statuses, strict=True)
            ]
            self._replies.put_nowait(pb.PutReply(blocks=answers))
