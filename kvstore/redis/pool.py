"""Connections to one Redis server: how they are made, lent and given up.

AUTH and SELECT run over our own RESP so that they keep the caller's deadline. Knows no topology: a pool is given what
makes its connections, and there is one per server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pagetier.kvstore.errors import ProtocolError
from pagetier.kvstore.redis.resp import ErrorReply, RespConnection, encode_command
from pagetier.kvstore.redis.sockets import Endpoint, Sockets
from pagetier.kvstore.redis.url import Login


class RefusedError(Exception):
    """The server answered AUTH or SELECT with an error, or is not ready to serve this connection."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(str(reply))
        self.reply = reply


class Dialer:
    """Makes connections that introduce themselves with one login."""

    def __init__(self, login: Login, connect_timeout_s: float, sockets: Sockets) -> None:
        self._login, self._connect_timeout_s, self._sockets = login, connect_timeout_s, sockets

    def dial(self, endpoint: Endpoint, deadline_s: float) -> RespConnection:
        """A connection, introduced. Raises TimeoutError, ConnectionError, ProtocolError or RefusedError."""
        deadline_s = min(deadline_s, self._sockets.now_s() + self._connect_timeout_s)
        connection = RespConnection(self._sockets.connect(endpoint, deadline_s))
        try:
            self._introduce(connection, deadline_s)
        except BaseException:
            connection.close()
            raise
        return connection

    def _introduce(self, connection: RespConnection, deadline_s: float) -> None:
        commands, login = [], self._login
        if login.password is not None or login.username is not None:
            credentials = [word.encode() for word in (login.username, login.password or "") if word is not None]
            commands.append(encode_command(b"AUTH", *credentials))
        if login.db:
            commands.append(encode_command(b"SELECT", b"%d" % login.db))
        if not commands:
            return
        connection.send(commands, len(commands), deadline_s)
        for _ in commands:
            reply = connection.read_reply(deadline_s)
            if isinstance(reply, ErrorReply):
                raise RefusedError(reply)
            if reply != b"OK":
                raise ProtocolError(f"RESP: expected OK, got {str(reply)[:64]}")


class ConnectionPool:
    """Lends connections, at most `max_connections` at once. Thread-safe.

    Invariant: an idle connection is open and in step. One that comes back otherwise is closed and forgotten.
    """

    def __init__(
        self,
        dial: Callable[[float], RespConnection],
        max_connections: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`dial` makes a connection until a deadline."""
        self._dial, self._clock = dial, clock
        self._max_connections = max_connections
        self._changed = threading.Condition()
        self._idle: list[RespConnection] = []  # guarded by self._changed; the last one used is lent first
        self._lent: set[RespConnection] = set()  # guarded by self._changed
        self._stale: set[RespConnection] = set()  # guarded by self._changed; lent, and not to be lent again
        self._num_dialing = 0  # guarded by self._changed
        self._closed = False  # guarded by self._changed

    @contextmanager
    def lease(self, deadline_s: float) -> Iterator[RespConnection]:
        """A connection for the body. Raises what dialing raises, and TimeoutError when none came free in time."""
        connection = self._take(deadline_s)
        try:
            yield connection
        except BaseException:
            connection.close()  # its replies may be half read
            raise
        finally:
            self._give_back(connection)

    def renew(self) -> None:
        """From now on lend only connections that are dialed later: the server is not what it was."""
        with self._changed:
            idle, self._idle = self._idle, []
            self._stale |= self._lent
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Close every idle connection and wake those who wait on a lent one. Idempotent."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._lent:
                connection.abort()
            self._changed.notify_all()
        for connection in idle:
            connection.close()

    def check(self) -> None:
        """Raise AssertionError when an idle connection could hand out somebody else's reply, or the bound is passed."""
        with self._changed:
            for connection in self._idle:
                assert not connection.closed, "an idle connection is closed"
                assert connection.outstanding == 0, f"an idle connection awaits {connection.outstanding} replies"
            num_connections = len(self._idle) + len(self._lent) + self._num_dialing
            assert num_connections <= self._max_connections, f"{num_connections} connections"
            assert not (self._closed and self._idle), "closed with idle connections"
            assert self._stale <= self._lent, "a connection that nobody holds is stale"

    def _take(self, deadline_s: float) -> RespConnection:
        with self._changed:
            while True:
                if self._closed:
                    raise ConnectionAbortedError("closed")
                while self._idle:
                    connection = self._idle.pop()
                    if connection.is_reusable():
                        self._lent.add(connection)
                        return connection
                    connection.close()
                if len(self._lent) + self._num_dialing < self._max_connections:
                    self._num_dialing += 1
                    break
                remaining_s = deadline_s - self._clock()
                if remaining_s <= 0 or not self._changed.wait(remaining_s):
                    raise TimeoutError("no connection came free in time")
        return self._dial_counted(deadline_s)

    def _dial_counted(self, deadline_s: float) -> RespConnection:
        connection = None
        try:
            connection = self._dial(deadline_s)
        finally:
            with self._changed:
                self._num_dialing -= 1
                if connection is not None:
                    self._lent.add(connection)
                    if self._closed:
                        connection.abort()
                self._changed.notify()
        return connection

    def _give_back(self, connection: RespConnection) -> None:
        with self._changed:
            self._lent.discard(connection)
            is_fresh = connection not in self._stale
            self._stale.discard(connection)
            if is_fresh and not self._closed and not connection.closed and not connection.outstanding:
                self._idle.append(connection)
            else:
                connection.close()
            self._changed.notify()
