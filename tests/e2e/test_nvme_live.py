"""A `pagetier serve` process over an NVMe folder that everything happens to (tests/e2e/live.py says what must hold).

A real file system, mounted for the test, since a full or a read-only one cannot be had otherwise; the server runs
without root's right to pass by modes. Slow: some minutes; skipped where nothing may be mounted. The quick part, over a
disk whose faults are simulated, is in test_faults.py.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.live import FLAGS, NUM_PROMPTS, ask_all, assert_unharmed, clients, comes_back
from tests.engine.server.real_server import real_server
from tests.kvstore.valkey import short_dir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

Mend = Callable[[], object]
NUM_NEW = 4  # prompts that only come while a fault lasts: what is new has to be written
WITHOUT_RIGHTS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def cache() -> Iterator[Path]:
    folder = short_dir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The root of a file system of its own."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    try:
        run(*WITHOUT_RIGHTS, "true")
        run("mount", "-t", "tmpfs", "-o", "size=768m,mode=0700", "none", str(mounted))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs setpriv and the right to mount")
    yield mounted
    run("umount", "-l", str(mounted))


def fill(disk: Path) -> Mend:
    """Not a block is left."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 20)):
                pass
        except OSError:
            pass
    return filler.unlink


def make_read_only(disk: Path) -> Mend:
    """What is opened from now on; descriptors that are open stay good, as on a disk that is found to be failing."""
    nvme = str(disk / "nvme")
    run("mount", "--bind", nvme, nvme)
    run("mount", "-o", "remount,bind,ro", nvme)
    return lambda: run("umount", "-l", nvme)


def delete(disk: Path) -> Mend:
    shutil.rmtree(disk / "nvme")
    return lambda: None


def delete_for_long(disk: Path) -> Mend:
    """And nothing can be made in its place."""
    shutil.rmtree(disk / "nvme")
    (disk / "nvme").write_text("a file")
    return (disk / "nvme").unlink


def forbid(disk: Path) -> Mend:
    """chmod 000, of the folder and all that is in it."""
    paths = [disk / "nvme", *sorted((disk / "nvme").rglob("*"))]
    modes = [path.stat().st_mode for path in paths]
    for path in reversed(paths):
        path.chmod(0)

    def allow() -> None:
        for path, mode in zip(paths, modes, strict=True):
            if path.exists():
                path.chmod(mode)

    return allow


STRIKES = (fill, make_read_only, delete, delete_for_long, forbid)
LASTING = (make_read_only, delete_for_long, forbid)  # a full disk shrinks the tier, what is deleted is made anew


def test_whatever_befalls_the_disk_every_request_is_answered(cache: Path, disk: Path) -> None:
    with clients() as client_of:
        with real_server(cache, *FLAGS, "--no-enable-prefix-caching") as server:
            reference = ask_all(client_of(server), range(NUM_PROMPTS + NUM_NEW * len(STRIKES)), num_rounds=1)
            assert not reference.failed
            assert server.stop() == 0
        place = ("--kv-nvme-path", str(disk / "nvme"), "--kv-nvme-allow-unsafe", "--kv-nvme-size", "640MiB")
        with real_server(cache, *FLAGS, "--kv-tier", "nvme", *place, wrapper=WITHOUT_RIGHTS) as server:
            client = client_of(server)
            comes_back(client, "nvme")
            for i, strike in enumerate(STRIKES):
                first_new = NUM_PROMPTS + NUM_NEW * i
                mend = strike(disk)
                replies = ask_all(client, [*range(NUM_PROMPTS), *range(first_new, first_new + NUM_NEW)])
                health = client.get("/health").json()["status"]
                mend()
                assert_unharmed(replies, reference, strike.__name__)
                assert health == "degraded" or strike not in LASTING, (strike.__name__, health)
                comes_back(client, "nvme")
            assert server.stop() == 0
        assert (disk / "nvme").is_dir()
