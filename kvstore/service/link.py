"""A client's connection to a store service for one cache identity: attaches, notices its end, attaches again.

All methods run on one event loop; `attached`, `report` and the counters may be read from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from pagetier.kvstore.block import Part
from pagetier.kvstore.errors import PagetierError, ProtocolError
from pagetier.kvstore.service.address import StoreAddress
from pagetier.kvstore.service.messages import to_part
from pagetier.kvstore.service.shared_memory import SharedMemory
from pagetier.proto import kvstore_pb2 as pb
from pagetier.proto.kvstore_pb2_grpc import KVStoreStub

if TYPE_CHECKING:
    from pagetier.proto.kvstore_pb2_grpc import KVStoreAsyncStub

logger = logging.getLogger(__name__)

FIRST_RETRY_S, LAST_RETRY_S = 0.1, 2.0
ATTACH_TIMEOUT_S = 5.0


class LinkClosed(PagetierError):
    """The channel was closed while a call was under way, since its session was lost."""


@contextlib.contextmanager
def calling() -> Iterator[None]:
    """Around a call: gRPC ends those of a channel that is closed as if their task had been cancelled. Raises LinkClosed
    instead, unless it was."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise LinkClosed("the connection to the store was closed") from None


@dataclass(eq=False, slots=True)
class Attached:
    """One life of a session. `memory`: None where bytes travel over gRPC."""

    stub: KVStoreAsyncStub
    session: bytes
    memory: SharedMemory | None
    tiers: tuple[str, ...]
    window_bytes: int
    lost: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a link asks for."""

    identity: bytes
    part: Part
    payload_bytes: int
    client: str


class Link:
    """Keeps a session alive until `close`."""

    def __init__(self, address: StoreAddress, terms: Terms, changed: Callable[[], None]) -> None:
        """`changed`: called on the loop when the state or the report is new."""
        self.address, self.terms, self._changed = address, terms, changed
        self.attached: Attached | None = None
        self.tiers: dict[str, Any] = {}  # as last reported
        self.num_returns = 0  # of tiers, and of the service itself
        self.num_jobs = 0  # that use it; owner: RemoteStore
        self._reported_returns: int | None = None
        self._is_closing = False
        self._task = asyncio.create_task(self._run())
        self._trouble = ""

    async def close(self) -> None:
        """End the session. Idempotent."""
        self._is_closing = True
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._is_closing:
            channel = self.address.aio_channel()
            try:
                if await self._attach(channel):
                    retry_s = FIRST_RETRY_S
            except (grpc.aio.AioRpcError, OSError, ProtocolError) as error:
                self._complain(error)
            finally:
                await channel.close()
            await asyncio.sleep(retry_s)
            retry_s = min(retry_s * 2, LAST_RETRY_S)

    async def _attach(self, channel: grpc.aio.Channel) -> bool:
        """One session from its beginning to its end; whether there was one."""
        stub: Any = KVStoreStub(channel)  # async over an async channel
        request = pb.AttachRequest(
            identity=self.terms.identity,
            part=to_part(self.terms.part),
            payload_bytes=self.terms.payload_bytes,
            client=self.terms.client,
            shared=self.address.is_local,
        )
        call = stub.Attach(request, metadata=self.address.metadata)
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                first = await call.read()
            if not isinstance(first, pb.AttachReply) or not first.session:
                await self._raise_status(call)
                return False
            memory = await SharedMemory.connect(first.lease_socket, first.session) if first.lease_socket else None
            attached = Attached(stub, first.session, memory, tuple(first.tiers), first.window_bytes)
            self._begin(attached, first)
            watching = [asyncio.create_task(self._follow(call)), asyncio.create_task(attached.lost.wait())]
            if memory is not None:
                watching.append(asyncio.create_task(memory.wait_closed()))
            try:
                await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in watching:
                    task.cancel()
                await asyncio.wait(watching)
                self._end(attached)
            return True
        except TimeoutError:
            raise ProtocolError("it does not answer in time") from None
        finally:
            call.cancel()

    async def _raise_status(self, call: Any) -> None:
        code, details = await call.code(), await call.details()
        raise ProtocolError(f"it refused: {details} ({code.name})")

    async def _follow(self, call: Any) -> None:
        """Take in reports until the stream ends."""
        while isinstance(report := await call.read(), pb.AttachReply):
            self._take_report(report)

    def _begin(self, attached: Attached, first: pb.AttachReply) -> None:
        if self._trouble:
            logger.warning("the store at %s is in use again", self.address.text)
        self._trouble = ""
        if self._reported_returns is not None:
            self.num_returns += 1
        self._reported_returns = first.num_returns
        self.attached = attached
        self._take_report(first)

    def _end(self, attached: Attached) -> None:
        self.attached = None
        attached.lost.set()
        if attached.memory is not None:
            attached.memory.close()
        if not self._is_closing:
            self._complain(ProtocolError("the connection ended"))
        self._changed()

    def _take_report(self, report: pb.AttachReply) -> None:
        if self._reported_returns is not None and report.num_returns > self._reported_returns:
            self.num_returns += report.num_returns - self._reported_returns
        self._reported_returns = report.num_returns
        try:
            tiers = json.loads(report.tiers_json)
        except ValueError:
            tiers = None
        if isinstance(tiers, dict) and all(isinstance(tier, dict) for tier in tiers.values()):
            self.tiers = tiers
        self._changed()

    def _complain(self, error: Exception) -> None:
        """One log line for each new trouble."""
        trouble = str(error)
        if isinstance(error, grpc.aio.AioRpcError):
            trouble = "; ".join(self.address.explain(error.details() or error.code().name))
        if not self._trouble and not self._is_closing:
            logger.warning(
                "the store at %s is not reached (%s); hits end at the device, and it is tried again",
                self.address.text,
                trouble,
            )
        self._trouble = trouble or "unknown"
