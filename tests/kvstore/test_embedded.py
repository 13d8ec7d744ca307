"""The embedded Valkey: one server for all users, whoever dies, and none when nobody is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import redis

from pagetier.kvstore.block import BlockStatus
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.redis.embedded import EmbeddedValkey, find_server, join_embedded, stop_embedded
from pagetier.kvstore.redis.rendezvous import LockFile, Rendezvous
from pagetier.kvstore.redis.tier import RedisTier
from tests.kvstore.tier_contract import DOMAIN, assert_readable, chain, put
from tests.kvstore.valkey import short_dir

MAX_BYTES = 64 << 20
LINGER_S = 0.2
PATIENCE_S = 10.0

USER = """
import sys, time
from pathlib import Path
from pagetier.kvstore.redis.embedded import join_embedded
with join_embedded(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])) as joined:
    print(joined.url, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """A folder for an embedded Valkey. Afterwards its supervisor has ended and the folder is gone."""
    folder = short_dir()
    yield folder
    stop_embedded(folder)
    eventually(lambda: not processes_of(folder))
    shutil.rmtree(folder)


def join(directory: Path, linger_s: float = LINGER_S) -> EmbeddedValkey:
    return join_embedded(directory, MAX_BYTES, linger_s, watch_interval_s=0.05)


def start_user(directory: Path, linger_s: float = LINGER_S) -> subprocess.Popen[str]:
    """Another process that joins and stays until its stdin is closed."""
    command = [sys.executable, "-c", USER, str(directory), str(MAX_BYTES), str(linger_s)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def end_user(user: subprocess.Popen[str]) -> None:
    user.communicate("")
    assert user.returncode == 0


def eventually(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s, "it did not come about"
        time.sleep(0.005)


def processes_of(directory: Path) -> list[int]:
    """Pids of all processes whose command line names the folder, users aside."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(directory) in words and b"join_embedded" not in words:
                found.append(int(entry.name))
    return found


def info(directory: Path, section: str) -> dict[str, str | int]:
    client = redis.Redis(unix_socket_path=str(Rendezvous(directory).socket_path))
    try:
        return dict(client.info(section))
    finally:
        client.close()


def server_pid(directory: Path) -> int:
    return int(info(directory, "server")["process_id"])


def supervisor_pid(directory: Path) -> int:
    """Waits for it to be known: a supervisor that starts holds its lock for a moment before it writes its pid."""
    eventually(lambda: Rendezvous(directory).supervisor_note().isdigit())
    return int(Rendezvous(directory).supervisor_note())


def test_the_first_starts_it_and_the_next_shares_it(directory: Path) -> None:
    with join(directory) as first:
        assert info(directory, "memory")["maxmemory"] == MAX_BYTES
        assert info(directory, "memory")["maxmemory_policy"] == "allkeys-lru"
        pid = server_pid(directory)
        with join(directory) as second:
            assert second.url == first.url
            assert server_pid(directory) == pid
        tier = RedisTier(first.url, DOMAIN)
        put(tier, chain(3))
        assert_readable(tier, chain(3))
        tier.close()
        assert os.getsid(supervisor_pid(directory)) not in (os.getsid(0), os.getpid()), "it is detached"
        assert os.getsid(pid) == os.getsid(supervisor_pid(directory))


def test_it_writes_nothing_but_its_socket_locks_and_logs(directory: Path) -> None:
    with join(directory) as joined:
        tier = RedisTier(joined.url, DOMAIN)
        put(tier, chain(50))
        tier.close()
        names = {"users.lock", "start.lock", "supervisor.lock", "supervisor.log", "valkey.log"}
        assert {path.name for path in directory.iterdir()} == names | {"valkey.sock"}
        assert Path(f"/proc/{server_pid(directory)}/cwd").resolve() == directory
        assert (directory / "valkey.sock").stat().st_mode & 0o777 == 0o700
    eventually(lambda: not processes_of(directory))
    assert {path.name for path in directory.iterdir()} == names


def test_it_ends_after_the_linger_time_and_not_before(directory: Path) -> None:
    with join(directory, linger_s=0.3):
        pid = server_pid(directory)
        time.sleep(0.4)
        assert server_pid(directory) == pid, "a user holds it longer than the linger time"
    left_s = time.monotonic()
    assert server_pid(directory) == pid
    eventually(lambda: not processes_of(directory))
    assert time.monotonic() - left_s >= 0.25
    assert not Rendezvous(directory).supervisor_runs()


def test_who_comes_back_in_time_finds_the_same_server(directory: Path) -> None:
    with join(directory, linger_s=30.0):
        pid = server_pid(directory)
    for _ in range(3):
        with join(directory):
            assert server_pid(directory) == pid


def test_a_short_visit_between_two_looks_starts_the_linger_time_anew(directory: Path) -> None:
    with join(directory, linger_s=0.4):  # looks every 20 ms
        pid = server_pid(directory)
    started_s = time.monotonic()
    while time.monotonic() - started_s < 0.8:
        visit = LockFile(Rendezvous(directory).users_lock)
        if visit.try_shared():
            visit.mark_use()
        visit.close()
        time.sleep(0.05)
    assert server_pid(directory) == pid
    eventually(lambda: not processes_of(directory))


def test_six_concurrent_starters_get_one_server(directory: Path) -> None:
    users = [start_user(directory) for _ in range(6)]
    urls = {user.stdout.readline().strip() for user in users if user.stdout}
    assert urls == {f"unix://{directory}/valkey.sock"}
    assert len(processes_of(directory)) == 2, "one supervisor, one server"
    for user in users:
        end_user(user)


def test_a_killed_starter_leaves_the_server_to_the_others(directory: Path) -> None:
    starter = start_user(directory)
    assert starter.stdout and starter.stdout.readline()
    pid = server_pid(directory)
    with join(directory):
        starter.kill()
        starter.communicate()
        time.sleep(LINGER_S)
        assert server_pid(directory) == pid
    eventually(lambda: not processes_of(directory))


def test_a_killed_user_is_no_user(directory: Path) -> None:
    user = start_user(directory)
    assert user.stdout and user.stdout.readline()
    user.kill()
    user.communicate()
    eventually(lambda: not processes_of(directory))


def test_a_killed_server_is_started_again(directory: Path) -> None:
    with join(directory) as joined:
        tier = RedisTier(joined.url, DOMAIN)
        put(tier, chain(3))
        for _ in range(2):
            pid = server_pid(directory)
            os.kill(pid, signal.SIGKILL)
            eventually(partial(_answers_as_other_than, directory, pid))
            put(tier, chain(3))
            assert_readable(tier, chain(3))
        tier.close()
    assert "its cache is lost" in Rendezvous(directory).supervisor_log.read_text()


def test_a_killed_supervisor_takes_its_server_along_and_a_user_starts_another(directory: Path) -> None:
    with join(directory) as joined:
        tier = RedisTier(joined.url, DOMAIN)
        dead = server_pid(directory)
        os.kill(supervisor_pid(directory), signal.SIGKILL)
        eventually(lambda: _answers_as_other_than(directory, dead))
        assert dead not in processes_of(directory)
        put(tier, chain(3))
        assert_readable(tier, chain(3))
        tier.close()
    eventually(lambda: not processes_of(directory))


def test_a_joiner_after_a_killed_supervisor_starts_another(directory: Path) -> None:
    with join(directory, linger_s=60.0):
        dead = supervisor_pid(directory)
    os.kill(dead, signal.SIGKILL)
    with join(directory):  # may still meet the dying one, and then sees it die
        eventually(lambda: supervisor_pid(directory) != dead and _answers_as_other_than(directory, 0))


def test_stop_ends_it_for_good_until_somebody_joins(directory: Path) -> None:
    assert not stop_embedded(directory)
    with join(directory):
        assert stop_embedded(directory)
        eventually(lambda: not processes_of(directory))
        time.sleep(0.2)  # four looks of the user's watcher
        assert not processes_of(directory), "a user brought it back against the operator's will"
        with join(directory):
            assert server_pid(directory)


def test_leaving_twice_is_leaving(directory: Path) -> None:
    joined = join(directory)
    joined.close()
    joined.close()


def test_a_server_that_cannot_start_is_a_tier_that_is_down_until_it_can(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    obstacle = Rendezvous(directory).socket_path
    obstacle.mkdir()  # nobody can bind there
    with join_embedded(directory, MAX_BYTES, LINGER_S, start_timeout_s=0.3, watch_interval_s=0.05) as joined:
        assert "starting without the embedded Valkey" in caplog.text
        tier = RedisTier(joined.url, DOMAIN)
        assert set(put(tier, chain(2))) == {BlockStatus.ERROR}
        obstacle.rmdir()
        eventually(lambda: put(tier, chain(2)) == [BlockStatus.OK] * 2)
        tier.close()


def test_what_cannot_work_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="107"):
        join_embedded(tmp_path / ("x" * 100), MAX_BYTES, LINGER_S)
    with pytest.raises(ConfigError, match="--kv-redis-size"):
        join_embedded(tmp_path, 0, LINGER_S)
    with pytest.raises(ConfigError, match="--kv-redis-linger"):
        join_embedded(tmp_path, MAX_BYTES, -1.0)
    assert not list(tmp_path.iterdir())


def test_the_server_is_the_wheels() -> None:
    done = subprocess.run([find_server(), "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Valkey server v=")


def _answers_as_other_than(directory: Path, pid: int) -> bool:
    try:
        return server_pid(directory) != pid
    except redis.RedisError:
        return False
