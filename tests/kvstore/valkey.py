"""A real Valkey for tests: `own_valkey` for one of your own, the fixture `valkey` for one that a session shares.

A test module asks for the fixtures by importing them:

    from tests.kvstore.valkey import Valkey, valkey, valkey_server  # noqa: F401

Each server lives on a Unix socket in a folder of its own with a short path, and is ended by its own pid.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from pagetier.kvstore.redis.embedded import find_server

START_TIMEOUT_S = 10.0


def short_dir() -> Path:
    """A new folder whose path leaves room for a socket's name. The caller removes it."""
    return Path(tempfile.mkdtemp(prefix="pgt-", dir="/tmp"))


class Valkey:
    """One server. `url` for the tier, `client()` for the test; `stop` ends it and removes its folder."""

    def __init__(self, **options: str) -> None:
        """Starts and waits until it answers. `options` are Valkey's, with `_` for `-`."""
        self.directory = short_dir()
        self.socket_path = self.directory / "s"
        self.url = f"unix://{self.socket_path}"
        self.options = {
            "port": "0",
            "unixsocket": os.fspath(self.socket_path),
            "dir": os.fspath(self.directory),
            "logfile": os.fspath(self.directory / "log"),
            "save": "",
            "appendonly": "no",
            **{name.replace("_", "-"): value for name, value in options.items()},
        }
        self._clients: list[redis.Redis] = []
        self.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Start the process (again). Returns when it answers."""
        words = [word for name, value in self.options.items() for word in (f"--{name}", value)]
        self._process = subprocess.Popen([find_server(), *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            assert self._process.poll() is None, (self.directory / "log").read_text()
            assert time.monotonic() < give_up_s, "Valkey does not answer"
            time.sleep(0.005)

    def kill(self) -> None:
        """kill -9; the folder stays, `start` brings it back empty."""
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP: up, but silent. All its threads have stopped when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.iterdir()):
            time.sleep(0.001)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def client(self, **options: Any) -> redis.Redis:
        """A redis-py client; closed by `stop`."""
        client = redis.Redis(unix_socket_path=os.fspath(self.socket_path), socket_timeout=5.0, **options)
        self._clients.append(client)
        return client

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        if self._process.poll() is None:
            self.thaw()
        self.kill()
        shutil.rmtree(self.directory)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(1.0)
            try:
                sock.connect(os.fspath(self.socket_path))
                sock.sendall(b"PING\r\n")
                return sock.recv(16).startswith((b"+PONG", b"-NOAUTH"))
            except OSError:
                return False


@contextmanager
def own_valkey(**options: str) -> Iterator[Valkey]:
    """A server for the body alone."""
    server = Valkey(**options)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[Valkey]:
    """The session's server, unbounded. Tests that stop, kill or fill a server start their own."""
    with own_valkey() as server:
        yield server


@pytest.fixture
def valkey(valkey_server: Valkey) -> Valkey:
    """The session's server, emptied."""
    client = redis.Redis(unix_socket_path=os.fspath(valkey_server.socket_path))
    client.flushall()
    client.close()
    return valkey_server
