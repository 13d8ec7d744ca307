"""The seam under the Redis tier: every connection, every byte and every look at a clock goes through `Sockets`.

Faults are put in here (faults.py), and a whole server in memory with a clock of its own (simulated.py).

Owns no state. Redis-py makes the sockets (TCP, TLS, Unix); nothing of its protocol is used.
"""

from __future__ import annotations

import dataclasses
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import redis
from redis.connection import SSLConnection, UnixDomainSocketConnection

MAX_VECTORS = 512  # iovec entries of one sendmsg; Linux allows 1,024
MIN_TIMEOUT_S = 1e-6  # SO_RCVTIMEO of zero means "for ever"
UNIX_SEND_BYTES = 4 << 20  # Linux gives 208 KiB, less than a value: then a server waits while the next is made


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is. `path`: of a Unix socket, instead of host and port. `tls`: redis-py's `ssl_*` options as
    pairs, None without TLS.
    """

    host: str = "localhost"
    port: int = 6379
    path: str = ""
    tls: tuple[tuple[str, Any], ...] | None = None
    keepalive: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.path or f"{host}:{self.port}"

    def at(self, host: str, port: int) -> Endpoint:
        """Another server, reached in the same way."""
        return dataclasses.replace(self, host=host, port=port, path="")


class Stream(Protocol):
    """One connection's bytes. Owner: one thread at a time; only `abort` may come from another one.

    Methods raise TimeoutError when the deadline (absolute, by `Sockets.now_s`) passes and other OSErrors when the peer
    is lost, nothing else. After that the stream is good for nothing but `close`.
    """

    def send(self, buffers: Sequence[memoryview], deadline_s: float) -> None:
        """Hand over all of `buffers`, one after the other. They are not copied, except by TLS."""

    def receive(self, destination: memoryview, deadline_s: float, *, whole: bool) -> int:
        """Bytes received into `destination`, at least one; 0 at the end of the stream. `whole`: wait for all of it if
        the medium can, so that a value costs one call."""

    def is_quiet(self) -> bool:
        """Whether the peer is there and has sent nothing that was not received."""

    def abort(self) -> None:
        """Wake whoever waits on this stream; it then sees a lost peer. From any thread."""

    def close(self) -> None:
        """Idempotent."""


class Sockets:
    """The real network and its clock."""

    def connect(self, endpoint: Endpoint, deadline_s: float) -> Stream:
        """A connected stream. Raises TimeoutError or ConnectionError, whose text names what is wrong in one line.

        Every address that the host name has may take the whole time once.
        """
        maker = maker_of(endpoint, remaining_s(deadline_s))
        try:
            maker.connect()
        except redis.TimeoutError as error:
            raise TimeoutError(f"no connection to {endpoint} in time") from error
        except redis.RedisError as error:
            raise ConnectionError(_why(endpoint, error)) from error
        taken: socket.socket = maker._sock
        maker._sock = None  # ours now: its destructor must not close it
        if taken.family == socket.AF_UNIX:  # TCP's grows by itself
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_SEND_BYTES)
        return TlsStream(taken) if isinstance(taken, ssl.SSLSocket) else PlainStream(taken)

    def now_s(self) -> float:
        """Seconds of the clock that deadlines are in."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class PlainStream:
    """TCP or a Unix socket. Implements `Stream`."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes over `sock`, which must be connected."""
        self._sock = sock
        sock.setblocking(True)

    def send(self, buffers: Sequence[memoryview], deadline_s: float) -> None:
        """sendmsg without waiting, then poll: SO_SNDTIMEO would count anew for every piece the kernel queues."""
        queue, first = list(buffers), 0
        while first < len(queue):
            try:
                sent = self._sock.sendmsg(queue[first : first + MAX_VECTORS], (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait_writable(deadline_s)
                continue
            while first < len(queue) and sent >= queue[first].nbytes:
                sent -= queue[first].nbytes
                first += 1
            if sent:
                queue[first] = queue[first][sent:]

    def _wait_writable(self, deadline_s: float) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        poll.poll(remaining_s(deadline_s) * 1e3)

    def receive(self, destination: memoryview, deadline_s: float, *, whole: bool) -> int:
        timeout_s = remaining_s(deadline_s)
        seconds = int(timeout_s)
        timeval = struct.pack("ll", seconds, max(int((timeout_s - seconds) * 1e6), 1))
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            # One call per value: the kernel waits for the rest, the GIL is taken once
            return self._sock.recv_into(destination, 0, socket.MSG_WAITALL if whole else 0)
        except BlockingIOError as error:
            raise TimeoutError("no answer in time") from error

    def is_quiet(self) -> bool:
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # end of stream, or bytes nobody asked for

    def abort(self) -> None:
        _shut_down(self._sock)

    def close(self) -> None:
        self._sock.close()


class TlsStream:
    """A TLS connection. Implements `Stream`."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        """Takes over `sock`, which must be connected."""
        self._sock = sock

    def send(self, buffers: Sequence[memoryview], deadline_s: float) -> None:
        for buffer in buffers:
            self._sock.settimeout(remaining_s(deadline_s))
            self._sock.sendall(buffer)

    def receive(self, destination: memoryview, deadline_s: float, *, whole: bool) -> int:
        self._sock.settimeout(remaining_s(deadline_s))
        return self._sock.recv_into(destination)

    def is_quiet(self) -> bool:
        try:
            self._sock.settimeout(0.0)
            self._sock.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False

    def abort(self) -> None:
        _shut_down(self._sock)

    def close(self) -> None:
        self._sock.close()


def maker_of(endpoint: Endpoint, timeout_s: float) -> Any:
    """A redis-py connection, not yet connected. Raises TypeError, ValueError or RedisError for options that it does not
    know. The hook replaces its handshake, so nothing is read by it."""
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "protocol": 2,
        "redis_connect_func": _no_handshake,
    }
    kind: Any = UnixDomainSocketConnection
    if endpoint.path:
        options["path"] = endpoint.path
    else:
        kind = redis.Connection if endpoint.tls is None else SSLConnection
        options |= {"host": endpoint.host, "port": endpoint.port, "socket_keepalive": endpoint.keepalive}
    return kind(**options, **dict(endpoint.tls or ()))


def remaining_s(deadline_s: float) -> float:
    """Seconds until `deadline_s`, above zero; raises TimeoutError when it has passed."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the deadline has passed")
    return max(left_s, MIN_TIMEOUT_S)


def _why(endpoint: Endpoint, error: redis.RedisError) -> str:
    """One line for a connection that was not made."""
    cause = error.__cause__ or error.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"the certificate of {endpoint} is not trusted: {cause.verify_message}; see ssl_ca_certs in the URL"
    if isinstance(cause, ssl.SSLError):
        return f"no TLS with {endpoint}: {cause.reason or cause}"
    return str(error)


def _shut_down(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # already gone: what was wanted


def _no_handshake(_connection: object) -> None:
    """Stands in for redis-py's own AUTH, SELECT and CLIENT SETINFO."""
