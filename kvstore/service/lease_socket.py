"""The second socket of a service: hands the arenas' descriptors to clients of the same user, takes leases back, and
notices when a client is gone. Loop thread only.

Unix, SOCK_SEQPACKET, one protobuf message a packet. The service never closes a connection that holds leases by itself
without waiting for the other end: until that has closed, it may still write to its slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
from pathlib import Path

from google.protobuf.message import DecodeError

from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.host import HostTier
from pagetier.kvstore.places import check_socket_path
from pagetier.kvstore.service.leases import Window
from pagetier.kvstore.service.sessions import Session, Sessions
from pagetier.proto import kvstore_pb2 as pb

logger = logging.getLogger(__name__)

MAX_PACKET_BYTES = 64 << 10
HELLO_TIMEOUT_S = 5.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED


class LeaseServer:
    """Listens until `close`."""

    def __init__(self, path: Path, sessions: Sessions, window: Window, host: HostTier | None) -> None:
        self._path, self._sessions = path, sessions
        self._fds = [window.arena.fd]
        self._slabs = [window.arena.slab_bytes]
        self._own_fds: list[int] = []
        if host is not None:  # a second, read-only view of the same memory: clients cannot damage the tier
            read_only = os.open(f"/proc/self/fd/{host.arena_fd}", os.O_RDONLY | os.O_CLOEXEC)
            self._own_fds.append(read_only)
            self._fds.append(read_only)
            self._slabs.append(host.slab_bytes)
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._talking: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Raises ConfigError when the path cannot be had."""
        self._listener = bind_private(self._path, socket.SOCK_SEQPACKET)
        self._listener.listen(64)
        self._accepting = asyncio.create_task(self._accept(self._listener))

    async def close(self) -> None:
        """Idempotent. Connections are cut; what clients had is for the end of the process to take back."""
        for task in [*([self._accepting] if self._accepting else []), *self._talking]:
            task.cancel()
        if self._talking:
            await asyncio.wait(set(self._talking))
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            with contextlib.suppress(OSError):
                self._path.unlink()
        for fd in self._own_fds:
            os.close(fd)
        self._own_fds.clear()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors: those that there are still serve
                logger.warning("the store's lease socket cannot accept (%s)", error)
                await asyncio.sleep(0.1)
                continue
            connection.setblocking(False)
            task = asyncio.create_task(self._talk(connection))
            self._talking.add(task)
            task.add_done_callback(self._talking.discard)

    async def _talk(self, connection: socket.socket) -> None:
        with connection:
            session = await self._greet(connection)
            if session is None:
                return
            try:
                await self._take_leases(connection, session)
            finally:
                self._sessions.socket_closed(session)

    async def _greet(self, connection: socket.socket) -> Session | None:
        """Who it is; None for nobody who may have the memory."""
        loop = asyncio.get_running_loop()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] not in (os.geteuid(), 0):
            return None
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                packet = await loop.sock_recv(connection, MAX_PACKET_BYTES)
            session = self._sessions.find(pb.LeaseMessage.FromString(packet).hello)
        except (TimeoutError, OSError, DecodeError):
            return None
        if session is None or session.has_socket:
            return None
        welcome = pb.LeaseWelcome(slab_bytes=self._slabs).SerializeToString()
        try:
            socket.send_fds(connection, [welcome], self._fds)
        except OSError:
            return None
        session.has_socket = True
        return session

    async def _take_leases(self, connection: socket.socket, session: Session) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                packet = await loop.sock_recv(connection, MAX_PACKET_BYTES)
            except OSError:
                return
            if not packet:
                return
            try:
                message = pb.LeaseMessage.FromString(packet)
            except DecodeError:
                logger.warning("client %s sent what is no lease message; it is cut off", session.client)
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)  # it closes its end, which ends its leases
                continue
            for lease in message.returned:
                session.holder.take_back(lease)
            for job in message.ended_jobs:
                session.holder.end_job(job)


def bind_private(path: Path, kind: int) -> socket.socket:
    """A Unix socket at `path` that only this user can connect to. A socket file that nobody answers on is replaced.

    Raises ConfigError when somebody does, or the path cannot be had.
    """
    check_socket_path(path)
    try:
        if path.exists():
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise ConfigError(f"--socket: {path} is there and is no socket; choose another path")
            if is_answered(path, kind):
                raise ConfigError(f"--socket: a store answers at {path} already; use it, or choose another --socket")
            path.unlink()
        listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
        listener.setblocking(False)
        before = os.umask(0o177)  # no moment at which others could connect
        try:
            listener.bind(os.fspath(path))
        finally:
            os.umask(before)
    except OSError as error:
        raise ConfigError(f"--socket: cannot listen at {path} ({error.strerror}); choose another --socket") from None
    return listener


def is_answered(path: Path, kind: int) -> bool:
    """Whether somebody listens at a Unix socket."""
    with socket.socket(socket.AF_UNIX, kind) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
        return True
