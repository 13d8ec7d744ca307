"""A client's end of the lease socket: the service's arenas mapped here, and leases sent back.

Whoever copies from or to a slot does so between `enter` and `leave`; the socket is closed, which gives all leases back,
only after the last one has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from pagetier.kvstore.copier import Copier, Copy
from pagetier.kvstore.errors import ProtocolError
from pagetier.proto import kvstore_pb2 as pb

MAX_PACKET_BYTES = 64 << 10
MAX_ARENAS = 2
CHECKSUM_BYTES = 16
CONNECT_TIMEOUT_S = 5.0
MAX_RETURNED = 4096  # leases in one packet
SEND_RETRY_S = 0.001


class _Slabs:
    """One arena's memory, mapped slab by slab as slots of it are met. Thread-safe."""

    def __init__(self, fd: int, slab_bytes: int, access: int) -> None:
        self._fd, self._slab_bytes, self._access = fd, slab_bytes, access
        self._lock = threading.Lock()
        self._maps: dict[int, mmap.mmap] = {}  # guarded by self._lock

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A slot's bytes. Raises ProtocolError for a place that no slot has."""
        number, start = divmod(offset, self._slab_bytes)
        if not nbytes or start + nbytes > self._slab_bytes:
            raise ProtocolError(f"a slot at {offset} of {nbytes} bytes crosses slabs")
        with self._lock:
            mapped = self._maps.get(number)
            if mapped is None:
                end = (number + 1) * self._slab_bytes
                if os.fstat(self._fd).st_size < end:
                    raise ProtocolError(f"a slot at {offset} lies outside of the arena")
                mapped = mmap.mmap(self._fd, self._slab_bytes, offset=number * self._slab_bytes, prot=self._access)
                self._maps[number] = mapped
        return memoryview(mapped)[start : start + nbytes]

    def close(self) -> None:
        with self._lock:
            for mapped in self._maps.values():
                with contextlib.suppress(BufferError):  # a view is left; it goes with its owner
                    mapped.close()
            self._maps.clear()
            os.close(self._fd)


class SharedMemory:
    """Connected for one session. `view` from any thread, the rest on the loop thread."""

    def __init__(self, connection: socket.socket, arenas: Sequence[_Slabs]) -> None:
        self._connection, self._arenas = connection, tuple(arenas)
        self._num_inside = 0
        self._unsent = pb.LeaseMessage()
        self._sending: asyncio.Task[None] | None = None
        self._closing = False

    @classmethod
    async def connect(cls, path: str, session: bytes) -> SharedMemory:
        """Raises OSError or ProtocolError when the service does not give its memory."""
        loop = asyncio.get_running_loop()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        connection.setblocking(False)
        fds: list[int] = []
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.sock_connect(connection, path)
                await loop.sock_sendall(connection, pb.LeaseMessage(hello=session).SerializeToString())
                await _readable(connection)
                packet, fds, _, _ = socket.recv_fds(connection, MAX_PACKET_BYTES, MAX_ARENAS)
            slabs = list(pb.LeaseWelcome.FromString(packet).slab_bytes)
            if not packet or not fds or len(slabs) != len(fds) or not all(slabs):
                raise ProtocolError("the store's lease socket gave no memory")
            access = [mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ]
            arenas = [_Slabs(fd, size, how) for fd, size, how in zip(fds, slabs, access, strict=False)]
        except BaseException as error:
            connection.close()
            for fd in fds:
                os.close(fd)
            if isinstance(error, DecodeError | TimeoutError):
                raise ProtocolError("the store's lease socket does not answer as it should") from None
            raise
        return cls(connection, arenas)

    def view(self, slot: pb.Slot) -> memoryview:
        """The bytes of a slot that is on loan. Raises ProtocolError."""
        return self.view_at(slot.arena, slot.offset, slot.nbytes)

    def view_at(self, arena: int, offset: int, nbytes: int) -> memoryview:
        """The same of its parts."""
        if arena >= len(self._arenas):
            raise ProtocolError(f"a slot of arena {arena}; there are {len(self._arenas)}")
        return self._arenas[arena].view(offset, nbytes)

    def enter(self) -> bool:
        """Begin to use slots; False when it is too late for that."""
        if self._closing:
            return False
        self._num_inside += 1
        return True

    def leave(self) -> None:
        self._num_inside -= 1
        if self._closing and not self._num_inside:
            self._close()

    def give_back(self, leases: Sequence[int] = (), jobs: Sequence[int] = ()) -> None:
        """These leases, or all of these jobs, are not used any more."""
        self._unsent.returned.extend(leases)
        self._unsent.ended_jobs.extend(jobs)
        if self._sending is None and not self._closing:
            self._send()

    def _send(self) -> None:
        """Send what is unsent; what the socket does not take now is sent a little later."""
        while self._unsent.returned or self._unsent.ended_jobs:
            packet = pb.LeaseMessage(
                returned=self._unsent.returned[:MAX_RETURNED], ended_jobs=self._unsent.ended_jobs[:MAX_RETURNED]
            )
            try:
                self._connection.send(packet.SerializeToString())
            except BlockingIOError:
                self._sending = asyncio.create_task(self._send_later())
                return
            except OSError:
                return  # the service is gone, and its memory with it
            del self._unsent.returned[:MAX_RETURNED]
            del self._unsent.ended_jobs[:MAX_RETURNED]

    async def _send_later(self) -> None:
        await asyncio.sleep(SEND_RETRY_S)
        self._sending = None
        if not self._closing:
            self._send()

    async def wait_closed(self) -> None:
        """Return when the service closed its end."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while await loop.sock_recv(self._connection, MAX_PACKET_BYTES):
                continue

    def close(self) -> None:
        """Close as soon as nobody uses a slot. Idempotent."""
        if not self._closing:
            self._closing = True
            if not self._num_inside:
                self._close()

    def _close(self) -> None:
        self._connection.close()
        for arena in self._arenas:
            arena.close()


async def _readable(connection: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)


def copy_all_out(copier: Copier, pieces: Sequence[Copy], checksums: bytes) -> list[bool]:
    """Copy slots, each to its destination; whether each copy is what was stored."""
    fitting = [i for i, (source, destination) in enumerate(pieces) if source.nbytes == destination.nbytes]
    sound = [False] * len(pieces)
    for i, digest in zip(fitting, copier.copy([pieces[i] for i in fitting]), strict=True):
        sound[i] = digest == checksums[i * CHECKSUM_BYTES : (i + 1) * CHECKSUM_BYTES]
    return sound


def copy_all_in(copier: Copier, pieces: Sequence[Copy]) -> list[bytes]:
    """Copy blocks, each into its slot; their checksums. Raises ProtocolError, before any copy, if one does not fit."""
    for source, destination in pieces:
        if source.nbytes != destination.nbytes:
            raise ProtocolError(f"a slot of {destination.nbytes} bytes for a block of {source.nbytes}")
    return copier.copy(pieces)
