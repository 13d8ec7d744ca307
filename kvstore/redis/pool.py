"""Connections to one Redis server: how they are made, lent and given up.

redis-py reads the URL and makes the socket (TCP, TLS, Unix); AUTH and SELECT run over our own RESP so that they keep
the caller's deadline. A later Cluster or Sentinel tier needs nothing here but other dialers: one pool per node.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from pagetier.kvstore.errors import ConfigError, ProtocolError
from pagetier.kvstore.places import check_socket_path
from pagetier.kvstore.redis.resp import ErrorReply, RespConnection, encode_command
from redis.connection import UnixDomainSocketConnection, parse_url

URL_FORMS = "redis://[[user]:password@]host[:port][/db], rediss://…, unix:///path/to/socket[?db=n]"
# What a URL may say of how to connect. Time-outs and retries are the caller's deadlines, so they are not among these.
_ALLOWED_OPTIONS = frozenset(("db", "username", "password", "host", "port", "path", "socket_keepalive"))


class RefusedError(Exception):
    """The server answered AUTH or SELECT with an error, or is not ready to serve this connection."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(str(reply))
        self.reply = reply


class Dialer:
    """Makes connections to the server of one URL."""

    def __init__(self, url: str, connect_timeout_s: float) -> None:
        """Parses only. Raises ConfigError for a URL that can never work; a server that is down is no error here."""
        self.connect_timeout_s = connect_timeout_s
        try:
            options: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]
        except ValueError as error:
            raise ConfigError(f"--kv-redis-url: {error}; allowed: {URL_FORMS}") from error
        self._make: type[Any] = options.pop("connection_class", redis.Connection)
        for name in options:
            if name not in _ALLOWED_OPTIONS and not name.startswith("ssl_"):
                raise ConfigError.unknown_name("option in --kv-redis-url", name, _ALLOWED_OPTIONS)
        if self._make is UnixDomainSocketConnection:
            check_socket_path(Path(options.get("path", "")))
        self._username: str | None = options.pop("username", None)
        self._password: str | None = options.pop("password", None)
        self.db: int = options.pop("db", 0)
        self._options = options
        try:
            self._maker(connect_timeout_s)
        except (TypeError, ValueError, redis.RedisError) as error:
            raise ConfigError(f"--kv-redis-url: {error}; allowed: {URL_FORMS}") from error
        self.server = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"

    def dial(self, deadline_s: float) -> RespConnection:
        """A connected, authenticated connection. Raises TimeoutError, ConnectionError, ProtocolError or RefusedError.

        Every address that the host name has may take the connect time-out once.
        """
        deadline_s = min(deadline_s, time.monotonic() + self.connect_timeout_s)
        connection = RespConnection(self._socket(deadline_s))
        try:
            self._introduce(connection, deadline_s)
        except BaseException:
            connection.close()
            raise
        return connection

    def _socket(self, deadline_s: float) -> socket.socket:
        timeout_s = deadline_s - time.monotonic()
        if timeout_s <= 0:
            raise TimeoutError("the deadline has passed")
        maker = self._maker(timeout_s)
        try:
            maker.connect()
        except redis.TimeoutError as error:
            raise TimeoutError(str(error)) from error
        except redis.RedisError as error:
            raise ConnectionError(str(error)) from error
        taken: socket.socket = maker._sock
        maker._sock = None  # ours now: its destructor must not close it
        return taken

    def _maker(self, timeout_s: float) -> Any:
        """A redis-py connection, not yet connected. The hook replaces its handshake, so nothing is read by it."""
        return self._make(
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            protocol=2,
            redis_connect_func=_no_handshake,
            **self._options,
        )

    def _introduce(self, connection: RespConnection, deadline_s: float) -> None:
        commands = []
        if self._password is not None or self._username is not None:
            credentials = [word.encode() for word in (self._username, self._password or "") if word is not None]
            commands.append(encode_command(b"AUTH", *credentials))
        if self.db:
            commands.append(encode_command(b"SELECT", b"%d" % self.db))
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

    def __init__(self, dial: Callable[[float], RespConnection], max_connections: int) -> None:
        self._dial = dial
        self._max_connections = max_connections
        self._changed = threading.Condition()
        self._idle: list[RespConnection] = []  # guarded by self._changed; the last one used is lent first
        self._lent: set[RespConnection] = set()  # guarded by self._changed
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
                remaining_s = deadline_s - time.monotonic()
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
            if not self._closed and not connection.closed and not connection.outstanding:
                self._idle.append(connection)
            else:
                connection.close()
            self._changed.notify()


def _no_handshake(_connection: object) -> None:
    """Stands in for redis-py's own AUTH, SELECT and CLIENT SETINFO."""
