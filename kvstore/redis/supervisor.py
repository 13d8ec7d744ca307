"""The detached process that owns an embedded Valkey: `python -m pagetier.kvstore.redis.supervisor --help`.

It starts the server, restarts it when it dies, and ends both when no user has held `users.lock` for the linger time or
on SIGTERM. It never reads from the server and knows nothing of records. Single-threaded; while nothing happens it wakes
up once per look at the lock (5 s at most). The server dies with it, whatever it dies of (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagetier.kvstore.redis.rendezvous import STOPPED, LockFile, Rendezvous, trim_log

log = logging.getLogger("pagetier.kvstore.redis.supervisor")

EXIT_OTHER_RUNS = 3
LOCK_TIMEOUT_S = 1.0  # others test the supervisor's lock by taking it for some microseconds
LOOK_INTERVAL_MAX_S = 5.0
STOP_TIMEOUT_S = 2.0  # it has nothing to save
QUICK_DEATH_S = 1.0
RESTART_DELAY_S = 0.05  # doubled at each quick death in a row
RESTART_DELAY_MAX_S = 5.0
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

_SIGNALS = frozenset((signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """What to run. `max_bytes` is Valkey's maxmemory; `linger_s` the seconds without a user until the end."""

    directory: Path
    server: Path
    max_bytes: int
    linger_s: float

    def arguments(self) -> list[str]:
        """The command line of this module."""
        return [
            *("--directory", os.fspath(self.directory)),
            *("--server", os.fspath(self.server)),
            *("--max-bytes", str(self.max_bytes)),
            *("--linger-s", repr(self.linger_s)),
        ]

    def server_command(self) -> list[str]:
        """The server's command line: no port, no persistence, nothing written outside the folder."""
        place = Rendezvous(self.directory)
        options = {
            "port": "0",
            "unixsocket": os.fspath(place.socket_path),
            "unixsocketperm": "700",
            "dir": os.fspath(self.directory),
            "logfile": os.fspath(place.server_log),
            "loglevel": "warning",
            "daemonize": "no",
            "save": "",
            "appendonly": "no",
            "maxmemory": str(self.max_bytes),
            "maxmemory-policy": "allkeys-lru",
        }
        return [os.fspath(self.server), *(word for name, value in options.items() for word in (f"--{name}", value))]


class Supervisor:
    """Owns one server process. `run` returns when the supervisor should end, with the server gone.

    The caller holds `lock` (supervisor.lock) exclusively. `users` stays locked by whoever decided to end, so that a
    joiner waits until the end is complete and then starts a server of its own.
    """

    def __init__(self, spec: ServerSpec, lock: LockFile) -> None:
        self._spec = spec
        self._place = Rendezvous(spec.directory)
        self._lock = lock
        self._users = LockFile(self._place.users_lock)
        self._server: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._start_at_s = 0.0  # monotonic; when the next start is due
        self._num_quick_deaths = 0
        self._free_since_s: float | None = None
        self._last_use_ns = self._users.last_use_ns()
        self._libc = ctypes.CDLL(None)

    def run(self) -> None:
        """Supervise until it is time to end."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._lock.write(str(os.getpid()))
        look_interval_s = min(LOOK_INTERVAL_MAX_S, max(self._spec.linger_s / 20, 0.02))
        next_look_s = time.monotonic()
        note = ""
        try:
            while True:
                self._keep_server()
                if time.monotonic() >= next_look_s:
                    if self._lingered():
                        log.info("no user for %g s, ending", self._spec.linger_s)
                        return
                    next_look_s = time.monotonic() + look_interval_s
                wake_at_s = next_look_s if self._server else min(next_look_s, self._start_at_s)
                caught = signal.sigtimedwait(_SIGNALS, max(wake_at_s - time.monotonic(), 0.0))
                if caught and caught.si_signo in (signal.SIGTERM, signal.SIGINT):
                    log.info("told to stop")
                    note = STOPPED
                    return
        finally:
            self._stop_server()
            self._lock.write(note)
            self._lock.close()
            self._users.close()

    def _keep_server(self) -> None:
        """Notice the server's death; start it when a start is due."""
        now_s = time.monotonic()
        if self._server is not None and self._server.poll() is not None:
            quick = now_s - self._started_s < QUICK_DEATH_S
            self._num_quick_deaths = self._num_quick_deaths + 1 if quick else 0
            delay_s = min(RESTART_DELAY_S * 2**self._num_quick_deaths, RESTART_DELAY_MAX_S) if quick else 0.0
            self._start_at_s = now_s + delay_s
            log.warning(
                "Valkey (pid %d) ended with %d; its cache is lost; next start in %.2f s",
                self._server.pid,
                self._server.returncode,
                delay_s,
            )
            self._server = None
        if self._server is None and now_s >= self._start_at_s:
            self._start_server()

    def _start_server(self) -> None:
        trim_log(self._place.server_log)
        parent = os.getpid()

        def prepare() -> None:
            self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

        self._started_s = time.monotonic()
        try:
            self._server = subprocess.Popen(
                self._spec.server_command(),
                stdin=subprocess.DEVNULL,
                cwd=self._spec.directory,
                preexec_fn=prepare,  # single-threaded, so safe
            )
        except OSError as error:
            self._num_quick_deaths += 1
            self._start_at_s = time.monotonic() + RESTART_DELAY_MAX_S
            log.error("cannot start %s: %s", self._spec.server, error)

    def _stop_server(self) -> None:
        server = self._server
        if server is not None and server.poll() is None:
            server.terminate()
            try:
                server.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        try:
            self._place.socket_path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s stays: %s", self._place.socket_path, error)

    def _lingered(self) -> bool:
        """Whether nobody used the server for the linger time. If so `users.lock` stays locked: nobody joins now."""
        now_s = time.monotonic()
        if not self._users.try_exclusive():
            self._free_since_s = None
            return False
        last_use_ns = self._users.last_use_ns()
        if self._free_since_s is None or last_use_ns != self._last_use_ns:
            self._free_since_s, self._last_use_ns = now_s, last_use_ns
        if now_s - self._free_since_s >= self._spec.linger_s:
            return True
        self._users.unlock()
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the supervisor's lock, detach, supervise. Returns 0 in the starter as soon as the lock is held."""
    parser = argparse.ArgumentParser(prog="python -m pagetier.kvstore.redis.supervisor", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="folder of the socket, locks and logs")
    parser.add_argument("--server", type=Path, required=True, help="valkey-server binary")
    parser.add_argument("--max-bytes", type=int, required=True, help="the server's maxmemory")
    parser.add_argument("--linger-s", type=float, required=True, help="end after this long without a user")
    given = parser.parse_args(arguments)
    spec = ServerSpec(given.directory, given.server, given.max_bytes, given.linger_s)
    lock = LockFile(Rendezvous(spec.directory).supervisor_lock)
    give_up_s = time.monotonic() + LOCK_TIMEOUT_S
    while not lock.try_exclusive():
        if time.monotonic() > give_up_s:
            return EXIT_OTHER_RUNS
        time.sleep(0.005)
    lock.write("")  # a dead supervisor's pid may be somebody else's by now
    if os.fork():  # the child shares the lock's open file; nobody is left who would have to reap it
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    Supervisor(spec, lock).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
