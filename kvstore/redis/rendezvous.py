"""Where the users of an embedded Valkey and its supervisor meet: one folder of locks, a socket and logs.

Every lock is a flock, which the kernel drops on any death of its holder. None of the files is ever removed, except the
socket by the server that binds it.

    users.lock        shared by every user; the supervisor ends when it could take it exclusively for the linger time
    start.lock        exclusive while somebody makes sure that a supervisor runs
    supervisor.lock   exclusive for the supervisor's life; holds its pid, or "stopped" after a deliberate end
"""

from __future__ import annotations

import fcntl
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

STOPPED = "stopped"
MAX_LOG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The folder's files."""

    directory: Path

    @property
    def socket_path(self) -> Path:
        return self.directory / "valkey.sock"

    @property
    def url(self) -> str:
        """Of the server, whether or not it runs."""
        return f"unix://{quote(str(self.socket_path))}"

    @property
    def users_lock(self) -> Path:
        return self.directory / "users.lock"

    @property
    def start_lock(self) -> Path:
        return self.directory / "start.lock"

    @property
    def supervisor_lock(self) -> Path:
        return self.directory / "supervisor.lock"

    @property
    def server_log(self) -> Path:
        return self.directory / "valkey.log"

    @property
    def supervisor_log(self) -> Path:
        return self.directory / "supervisor.log"

    def supervisor_runs(self) -> bool:
        """Whether a supervisor holds its lock."""
        lock = LockFile(self.supervisor_lock)
        try:
            return not lock.try_shared()
        finally:
            lock.close()

    def supervisor_note(self) -> str:
        """What the last supervisor wrote: its pid, STOPPED, or nothing."""
        try:
            return self.supervisor_lock.read_text().partition("\n")[0]
        except FileNotFoundError:
            return ""

    def server_answers(self, timeout_s: float = 0.2) -> bool:
        """Whether the server on the socket answers a PING in time."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            try:
                sock.connect(os.fspath(self.socket_path))
                sock.sendall(b"PING\r\n")
                return sock.recv(16).startswith(b"+PONG")
            except OSError:
                return False


class LockFile:
    """A flock on a file that is made when missing (mode 0600). Held until `unlock`, `close`, or the process dies."""

    def __init__(self, path: Path) -> None:
        """Opens only. Raises OSError."""
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def try_shared(self) -> bool:
        return self._try(fcntl.LOCK_SH)

    def try_exclusive(self) -> bool:
        return self._try(fcntl.LOCK_EX)

    def unlock(self) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def write(self, text: str) -> None:
        """Replace the file's content with a line. Its first line is right at any moment."""
        line = f"{text}\n".encode()
        os.pwrite(self.fd, line, 0)
        os.ftruncate(self.fd, len(line))

    def mark_use(self) -> None:
        """Advance the modification time, which tells a poller that the lock was taken between two looks."""
        os.utime(self.fd)

    def last_use_ns(self) -> int:
        return os.fstat(self.fd).st_mtime_ns

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self.fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def trim_log(path: Path) -> None:
    """Empty a log that has grown past MAX_LOG_BYTES."""
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        path.write_bytes(b"")
