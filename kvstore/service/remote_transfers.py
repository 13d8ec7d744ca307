"""A client's half of the Load and Put streams: bytes between this process's buffers and the service. Loop thread only;
copies run on threads that it is given, by a copier that it is given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

import grpc
import xxhash

from pagetier.kvstore.block import BlockName, BlockStatus
from pagetier.kvstore.copier import Copier
from pagetier.kvstore.errors import ProtocolError
from pagetier.kvstore.service.leases import WINDOW_ARENA
from pagetier.kvstore.service.link import Attached
from pagetier.kvstore.service.messages import status_of, to_chains
from pagetier.kvstore.service.shared_memory import CHECKSUM_BYTES, SharedMemory, copy_all_in, copy_all_out
from pagetier.proto import kvstore_pb2 as pb

PIECE_BYTES = 1 << 20  # of a payload in one message
COPY_BLOCKS = 16  # of one thread at once: all of them end at about the same time
Metadata = tuple[tuple[str, str], ...]


class RemoteLoad:
    """One load. `damaged`: blocks whose bytes did not arrive as they were stored."""

    def __init__(
        self, names: Sequence[BlockName], destinations: Sequence[memoryview], copier: Copier, threads: Executor
    ) -> None:
        self._names, self._destinations, self._copier, self._threads = names, destinations, copier, threads
        self._statuses: list[BlockStatus | None] = [None] * len(names)
        self.tiers: list[str | None] = [None] * len(names)
        self.damaged: list[BlockName] = []
        self._filled = [0] * len(names)  # bytes that came over gRPC

    @property
    def final_statuses(self) -> tuple[BlockStatus, ...]:
        return tuple(status or BlockStatus.ERROR for status in self._statuses)

    def end(self, status: BlockStatus) -> None:
        """Whatever has no answer gets this one."""
        self._statuses = [one or status for one in self._statuses]

    async def run(self, attached: Attached, request: pb.LoadRequest, timeout_s: float, metadata: Metadata) -> None:
        """Until all is answered and copied. Raises AioRpcError and ProtocolError, with no copy under way."""
        memory = attached.memory
        if memory is not None and not memory.enter():
            return
        copies: list[asyncio.Future[None]] = []
        call: Any = attached.stub.Load(request, timeout=timeout_s, metadata=metadata)
        try:
            while isinstance(reply := await call.read(), pb.LoadReply):
                for block in reply.blocks:
                    self._take(block, is_shared=memory is not None)
                for lent in reply.lent:
                    if memory is None:
                        raise ProtocolError("blocks in shared memory that was not given")
                    copies += [asyncio.ensure_future(copy) for copy in self._copies(memory, lent)]
            if await call.code() is not grpc.StatusCode.OK:
                await _raise(call)
        finally:
            call.cancel()
            if copies:
                await asyncio.wait(copies)
            if memory is not None:
                memory.give_back(jobs=[request.job])
                memory.leave()
        for copy in copies:
            copy.result()

    def _copies(self, memory: SharedMemory, lent: pb.LentBlocks) -> Iterator[Coroutine[Any, Any, None]]:
        """Work for the threads, a few blocks each. Raises ProtocolError."""
        indices, leases, offsets = list(lent.index), list(lent.lease), list(lent.offset)
        if not len(indices) == len(leases) == len(offsets) or len(lent.checksums) != CHECKSUM_BYTES * len(indices):
            raise ProtocolError("lent blocks: lists of several lengths")
        if any(index >= len(self._names) for index in indices):
            raise ProtocolError("an answer for a block that was not asked for")
        for first in range(0, len(indices), COPY_BLOCKS):
            at = slice(first, first + COPY_BLOCKS)
            checksums = lent.checksums[first * CHECKSUM_BYTES : (first + COPY_BLOCKS) * CHECKSUM_BYTES]
            pieces = [
                (memory.view_at(lent.arena, offset, lent.nbytes), self._destinations[index])
                for index, offset in zip(indices[at], offsets[at], strict=True)
            ]
            # a slot of the window is waited for; blocks of the host tier are given back with the job
            returned = leases[at] if lent.arena == WINDOW_ARENA else []
            yield self._copy(memory, lent.tier, indices[at], returned, pieces, checksums)

    async def _copy(
        self,
        memory: SharedMemory,
        tier: str,
        indices: Sequence[int],
        leases: Sequence[int],
        pieces: Sequence[tuple[memoryview, memoryview]],
        checksums: bytes,
    ) -> None:
        """Blocks in slots: copy, verify, give these leases back."""
        loop = asyncio.get_running_loop()
        sound = await loop.run_in_executor(self._threads, copy_all_out, self._copier, pieces, checksums)
        if leases:
            memory.give_back(leases)
        for index, is_sound in zip(indices, sound, strict=True):
            self._settle(index, BlockStatus.OK, tier, is_sound=is_sound)

    def _take(self, block: pb.LoadedBlock, *, is_shared: bool) -> None:
        """A status, or a piece of a payload."""
        if block.index >= len(self._names):
            raise ProtocolError("an answer for a block that was not asked for")
        if is_shared:
            if block.status == pb.OK:
                raise ProtocolError("a block without its place in shared memory")
            self._settle(block.index, status_of(block.status), "")
            return
        destination, at = self._destinations[block.index], self._filled[block.index]
        end = at + len(block.data)
        if end > destination.nbytes:
            raise ProtocolError(f"more than {destination.nbytes} bytes of a block")
        destination[at:end] = block.data
        self._filled[block.index] = end
        if block.status != pb.STATUS_UNSPECIFIED:
            whole = block.status != pb.OK or (
                end == destination.nbytes and xxhash.xxh3_128_digest(destination) == block.checksum
            )
            self._settle(block.index, status_of(block.status), block.tier, is_sound=whole)

    def _settle(self, index: int, status: BlockStatus, tier: str, *, is_sound: bool = True) -> None:
        if status is BlockStatus.OK and not is_sound:
            status = BlockStatus.CORRUPT
            self.damaged.append(self._names[index])
        self._statuses[index] = status
        self.tiers[index] = tier if status is BlockStatus.OK else None


class RemotePut:
    """One put: an offer, then the bytes of what is wanted."""

    def __init__(
        self, names: Sequence[BlockName], sources: Sequence[memoryview], copier: Copier, threads: Executor
    ) -> None:
        self._names, self._sources, self._copier, self._threads = names, sources, copier, threads
        self._statuses: list[BlockStatus | None] = [None] * len(names)

    @property
    def final_statuses(self) -> tuple[BlockStatus, ...]:
        return tuple(status or BlockStatus.ERROR for status in self._statuses)

    def end(self, status: BlockStatus) -> None:
        """Whatever has no answer gets this one."""
        self._statuses = [one or status for one in self._statuses]

    async def run(self, attached: Attached, job: int, timeout_s: float, metadata: Metadata) -> None:
        """Until all has a status. Raises AioRpcError and ProtocolError, with no source read any more."""
        memory = attached.memory
        if memory is not None and not memory.enter():
            return
        call: Any = attached.stub.Put(timeout=timeout_s, metadata=metadata)
        try:
            offer = to_chains(self._names)
            await call.write(pb.PutRequest(session=attached.session, offer=offer, shared=memory is not None, job=job))
            while isinstance(reply := await call.read(), pb.PutReply):
                wanted = []
                for block in reply.blocks:
                    if block.index >= len(self._names):
                        raise ProtocolError("an answer for a block that was not offered")
                    if block.status == pb.WANTED:
                        wanted.append(block)
                    else:
                        self._statuses[block.index] = status_of(block.status)
                if wanted and memory is not None:
                    await self._fill(call, memory, wanted)
                else:
                    await self._send(call, wanted)
            if await call.code() is not grpc.StatusCode.OK:
                await _raise(call)
        except asyncio.InvalidStateError:  # a write to a call that has ended
            await _raise(call)
        finally:
            call.cancel()
            if memory is not None:
                memory.give_back(jobs=[job])
                memory.leave()

    async def _fill(self, call: Any, memory: SharedMemory, wanted: Sequence[pb.PutStatus]) -> None:
        views = [(self._sources[block.index], memory.view(block.slot)) for block in wanted]
        loop = asyncio.get_running_loop()
        filling = loop.run_in_executor(self._threads, copy_all_in, self._copier, views)
        try:
            checksums = await asyncio.shield(filling)
        except asyncio.CancelledError:
            await asyncio.wait((filling,))
            raise
        filled = [pb.PutBlock(index=b.index, checksum=c) for b, c in zip(wanted, checksums, strict=True)]
        await call.write(pb.PutRequest(blocks=filled))

    async def _send(self, call: Any, wanted: Sequence[pb.PutStatus]) -> None:
        for block in wanted:
            source = self._sources[block.index]
            checksum = xxhash.xxh3_128_digest(source)
            for first in range(0, source.nbytes, PIECE_BYTES):
                piece = pb.PutBlock(index=block.index, data=bytes(source[first : first + PIECE_BYTES]))
                if first + PIECE_BYTES >= source.nbytes:
                    piece.checksum = checksum
                await call.write(pb.PutRequest(blocks=[piece]))


async def _raise(call: Any) -> None:
    """Raise what a call that did not end well ended with."""
    raise grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )
