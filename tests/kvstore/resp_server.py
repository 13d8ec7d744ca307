"""A scripted RESP server: answers each command as a test says, byte by byte if need be."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from pagetier.kvstore.redis.sockets import Endpoint, Sockets, Stream
from tests.kvstore.valkey import short_dir

PATIENCE_S = 10.0

Command = list[bytes]
Answer = Callable[[Command], bytes | None]  # bytes to send; None closes the connection


class RespServer:
    """Listens on a Unix socket, or with `tls` on TCP, and answers with `answer`, which may be replaced at any time."""

    def __init__(self, answer: Answer, tls: ssl.SSLContext | None = None) -> None:
        self.answer = answer
        self.commands: list[Command] = []
        self.num_connections = 0
        self.piece_bytes = 0  # replies are sent in pieces of this size; 0: whole
        self.pause_s = 0.0  # between pieces
        self._directory = short_dir()
        self.socket_path: Path = self._directory / "s"
        self._tls = tls
        if tls is None:
            self.url = f"unix://{self.socket_path}"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(os.fspath(self.socket_path))
        else:
            self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._listener.bind(("127.0.0.1", 0))
            self.url = f"rediss://127.0.0.1:{self._listener.getsockname()[1]}"
        self._listener.listen()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> RespServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for connection in self._open:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads[1:]:
            thread.join()
        shutil.rmtree(self._directory)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            if self._tls is not None:
                try:
                    connection = self._tls.wrap_socket(connection, server_side=True)
                except OSError:  # a client that does not trust us
                    connection.close()
                    continue
            self._open.append(connection)
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            try:
                while line := stream.readline():
                    command = []
                    for _ in range(int(line[1:])):
                        length = int(stream.readline()[1:])
                        command.append(stream.read(length + 2)[:-2])
                    self.commands.append(command)
                    reply = self.answer(command)
                    if reply is None:
                        return
                    for first in range(0, len(reply), self.piece_bytes or len(reply)):
                        connection.sendall(reply[first : first + (self.piece_bytes or len(reply))])
                        time.sleep(self.pause_s)
            except (OSError, ValueError):
                return


class KeptSockets(Sockets):
    """Real sockets that are remembered."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []

    def connect(self, endpoint: Endpoint, deadline_s: float) -> Stream:
        self.streams.append(super().connect(endpoint, deadline_s))
        return self.streams[-1]

    def wait_for_bytes(self) -> None:
        """Until something that nobody asked for has come on the last connection."""
        give_up_s = time.monotonic() + PATIENCE_S
        while self.streams[-1].is_quiet():
            assert time.monotonic() < give_up_s, "nothing comes"
            time.sleep(0.001)
