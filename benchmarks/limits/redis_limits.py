"""What an embedded Valkey gives and takes: by redis-benchmark where it is installed, else by a plain Python loop."""

from __future__ import annotations

import csv
import io
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pagetier.kvstore.errors import PagetierError
from pagetier.kvstore.redis.embedded import join_embedded

VALUE_BYTES = 360 << 10  # a block of the default model in bf16
NUM_KEYS = 64
PIPELINE = 8
SERVER_BYTES = 256 << 20
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class RedisLimits:
    """Bytes of values per second over a Unix socket. how: the tool they come from."""

    get: float
    set: float
    how: str


def measure_redis(seconds: float) -> RedisLimits:
    """Start a server of our own, measure, end it. Raises PagetierError or OSError when there is none to be had."""
    with (
        tempfile.TemporaryDirectory(prefix="pgt-", dir="/tmp") as folder,  # short: socket paths have a limit
        join_embedded(Path(folder), SERVER_BYTES, linger_s=0.0) as server,
    ):
        tool = shutil.which("redis-benchmark") or shutil.which("valkey-benchmark")
        if tool is not None:
            return _by_tool(tool, server.socket_path, seconds)
        return _by_loop(server.socket_path, seconds)


def _by_tool(tool: str, socket_path: Path, seconds: float) -> RedisLimits:
    num_requests = max(200, int(seconds * 4000))
    options = ["-s", str(socket_path), "-t", "set,get", "-d", str(VALUE_BYTES), "-n", str(num_requests)]
    options += ["-c", str(PIPELINE), "-r", str(NUM_KEYS), "--csv"]
    done = subprocess.run([tool, *options], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise PagetierError(f"{tool}: {done.stderr.strip()[:200]}")
    rates = {row["test"]: float(row["rps"]) * VALUE_BYTES for row in csv.DictReader(io.StringIO(done.stdout))}
    return RedisLimits(rates["GET"], rates["SET"], Path(tool).name)


def _by_loop(socket_path: Path, seconds: float) -> RedisLimits:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(str(socket_path))
        loop = RedisLoop(connection)
        written = loop.rate(loop.set_some, seconds)
        return RedisLimits(loop.rate(loop.get_some, seconds), written, "a Python loop over one connection")


class RedisLoop:
    """SET and GET of `VALUE_BYTES` values, `PIPELINE` at a time; `sendmsg` and `recv_into`, no copies of our own."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._value = bytes(range(256)) * (VALUE_BYTES // 256)
        self._reply = bytearray(PIPELINE * (len(f"${VALUE_BYTES}\r\n") + VALUE_BYTES + 2))
        self._next = 0

    def rate(self, some: Callable[[], None], seconds: float) -> float:
        """Bytes of values per second of `some`, called for at least `seconds`."""
        start_s = time.perf_counter()
        rounds = 0
        while rounds == 0 or time.perf_counter() - start_s < seconds:
            some()
            rounds += 1
        return rounds * PIPELINE * VALUE_BYTES / (time.perf_counter() - start_s)

    def set_some(self) -> None:
        parts: list[bytes] = []
        for key in self._keys():
            parts += [b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, VALUE_BYTES), self._value, b"\r\n"]
        views = [memoryview(part) for part in parts]
        while views:
            sent = self._connection.sendmsg(views)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]
        self._receive(PIPELINE * len(b"+OK\r\n"), b"+OK\r\n")

    def get_some(self) -> None:
        commands = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in self._keys()]
        self._connection.sendall(b"".join(commands))
        self._receive(len(self._reply), b"$%d\r\n" % VALUE_BYTES)

    def _keys(self) -> list[bytes]:
        first, self._next = self._next, (self._next + PIPELINE) % NUM_KEYS
        return [b"limits-%d" % index for index in range(first, first + PIPELINE)]

    def _receive(self, num_bytes: int, start: bytes) -> None:
        view = memoryview(self._reply)[:num_bytes]
        while view:
            got = self._connection.recv_into(view)
            if not got:
                raise PagetierError("the Valkey under measurement closed the connection")
            view = view[got:]
        if not self._reply.startswith(start):
            raise PagetierError(f"the Valkey under measurement answered {bytes(self._reply[:60])!r}")
