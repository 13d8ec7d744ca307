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
        load = RedisRates(server.socket_path, VALUE_BYTES, NUM_KEYS)
        written = load.set(seconds)
        return RedisLimits(load.get(seconds), written, load.how)


class RedisRates:
    """What the server behind `socket_path` takes and gives, measured anew by each call. `how`: the tool it is
    measured by. `get` after `set`, which overwrites values: what was never set is answered at once.
    """

    def __init__(self, socket_path: Path, value_bytes: int, num_keys: int) -> None:
        self._socket_path, self._value_bytes, self._num_keys = socket_path, value_bytes, num_keys
        self._tool = shutil.which("redis-benchmark") or shutil.which("valkey-benchmark")
        self.how = Path(self._tool).name if self._tool else "a Python loop over one connection"

    def set(self, seconds: float) -> float:
        """Bytes of values per second."""
        return (
            self._by_loop(seconds, "set")
            if self._tool is None
            else self._by_tool(self._tool, self._num_requests(seconds), self._num_keys, "set")
        )

    def set_new(self, num_values: int) -> float:
        """As `set`, of values that were not there, for which the server needs memory."""
        if self._tool is None:
            fresh = RedisRates(self._socket_path, self._value_bytes, -(-num_values // PIPELINE) * PIPELINE)
            return fresh._by_loop(0.0, "set")
        return self._by_tool(self._tool, num_values, 10**9, "set")

    def get(self, seconds: float) -> float:
        """As `set`."""
        return (
            self._by_loop(seconds, "get")
            if self._tool is None
            else self._by_tool(self._tool, self._num_requests(seconds), self._num_keys, "get")
        )

    def _num_requests(self, seconds: float) -> int:
        return max(
            8 * self._num_keys, int(seconds * 4000 * VALUE_BYTES / self._value_bytes)
        )  # so that all keys are set

    def _by_tool(self, tool: str, num_requests: int, num_keys: int, test: str) -> float:
        options = ["-s", str(self._socket_path), "-t", test, "-d", str(self._value_bytes), "-n", str(num_requests)]
        options += ["-c", str(PIPELINE), "-r", str(num_keys), "--csv"]
        done = subprocess.run([tool, *options], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise PagetierError(f"{tool}: {done.stderr.strip()[:200]}")
        (row,) = csv.DictReader(io.StringIO(done.stdout))
        return float(row["rps"]) * self._value_bytes

    def _by_loop(self, seconds: float, test: str) -> float:
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(str(self._socket_path))
            loop = RedisLoop(connection, self._value_bytes, self._num_keys)
            return loop.rate(loop.set_some if test == "set" else loop.get_some, seconds)


class RedisLoop:
    """SET and GET of values, `PIPELINE` at a time; `sendmsg` and `recv_into`, no copies of our own.

    num_keys: a multiple of `PIPELINE`.
    """

    def __init__(self, connection: socket.socket, value_bytes: int = VALUE_BYTES, num_keys: int = NUM_KEYS) -> None:
        self._connection, self._value_bytes, self._num_keys = connection, value_bytes, num_keys
        self._value = bytes(range(256)) * (value_bytes // 256)
        self._reply = bytearray(PIPELINE * (len(f"${value_bytes}\r\n") + value_bytes + 2))
        self._next = 0

    def rate(self, some: Callable[[], None], seconds: float) -> float:
        """Bytes of values per second of `some`, called for at least `seconds`."""
        start_s = time.perf_counter()
        rounds = 0
        while rounds == 0 or time.perf_counter() - start_s < seconds:
            some()
            rounds += 1
        return rounds * PIPELINE * self._value_bytes / (time.perf_counter() - start_s)

    def set_some(self) -> None:
        parts: list[bytes] = []
        for key in self._keys():
            parts += [
                b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, self._value_bytes),
                self._value,
                b"\r\n",
            ]
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
        self._receive(len(self._reply), b"$%d\r\n" % self._value_bytes)

    def _keys(self) -> list[bytes]:
        first, self._next = self._next, (self._next + PIPELINE) % self._num_keys
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
