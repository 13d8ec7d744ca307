"""Killed at any moment while it writes: what is found after is right, and the disk use stays under the cap.

A hundred rounds by default; `-m slow` runs a thousand.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagetier.kvstore.block import BlockStatus
from pagetier.kvstore.nvme.striped import StripedTier
from pagetier.kvstore.nvme.tier import NvmeTier
from tests.kvstore.nvme_writer import CAPACITY, CHAIN_BLOCKS, opened
from tests.kvstore.tier_contract import addresses, chain, get, payload_of, soon

ROUNDS = 100
LONGEST_S = 0.05  # from the first chain that is stored to the kill; a segment takes about 0.01 s
KEPT = 40  # chains of earlier rounds that are looked at in each


class Nursery:
    """The process that forks writers (tests/kvstore/nvme_writer.py)."""

    def __init__(self, path: Path, num_folders: int) -> None:
        self.path, self.num_folders = path, num_folders
        command = [sys.executable, "-m", "tests.kvstore.nvme_writer", str(path), str(num_folders)]
        self.process = subprocess.Popen(
            command, cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout

    def round(self, first: int, life_s: float) -> list[int]:
        """Let a writer live that long past its first chain, then kill it; the chains that it said were stored."""
        self._stdin.write(b"%d\n" % first)
        self._stdin.flush()
        pid, stored = 0, list[int]()
        while (line := self._stdout.readline()) != b"dead\n":
            assert line, "the nursery died"
            if line.startswith(b"pid"):
                pid = int(line.split()[1])
                continue
            stored.append(int(line))
            if len(stored) == 1:
                time.sleep(life_s)
                assert disk_bytes(self.path) <= CAPACITY, "while it writes"
                os.kill(pid, signal.SIGKILL)
        return stored

    def close(self) -> None:
        self._stdin.close()
        self.process.wait(20)
        self._stdout.close()


@pytest.fixture(params=[1, 2], ids=["one folder", "two folders"])
def nursery(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path / "nvme", request.param)
    yield nursery
    nursery.close()


def disk_bytes(path: Path) -> int:
    """What `du` says; files may vanish while it looks."""
    total = 0
    for folder, _, names in os.walk(path):
        for entry in (folder, *(os.path.join(folder, name) for name in names)):
            try:
                total += os.lstat(entry).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def check_recovery(tier: NvmeTier | StripedTier, chains: list[int], last: int) -> None:
    """Everything found is right; the last chain that was said to be stored is there in whole."""
    for number in chains:
        names = chain(CHAIN_BLOCKS, seed=number)
        statuses, buffers = get(tier, names)
        for name, status, buffer in zip(names, statuses, buffers, strict=True):
            assert status in (BlockStatus.OK, BlockStatus.MISS), f"chain {number}: {status}"
            assert status is BlockStatus.MISS or buffer == payload_of(name), f"chain {number}: wrong bytes"
    assert tier.lookup(addresses(chain(CHAIN_BLOCKS, seed=last)), soon()) == CHAIN_BLOCKS
    assert (tier.counters().corrupt, tier.counters().errors) == (0, 0)
    tier.check()


def kill_again_and_again(nursery: Nursery, num_rounds: int, seed: int) -> None:
    rng, seen, num_chains = random.Random(seed), list[int](), 0
    for round_ in range(num_rounds):
        stored = nursery.round(round_ * 1_000_000, rng.random() * LONGEST_S)
        num_chains += len(stored)
        assert disk_bytes(nursery.path) <= CAPACITY, f"seed {seed}, round {round_}: after the kill"
        with opened(nursery.path, nursery.num_folders) as tier:
            assert not isinstance(tier, NvmeTier) or tier._folder.writer == nursery.path / "00"
            check_recovery(tier, [*seen, *stored[-KEPT:], stored[-1] + 1], stored[-1])
        assert disk_bytes(nursery.path) <= CAPACITY, f"seed {seed}, round {round_}: after recovery"
        seen = rng.sample([*seen, *stored], min(KEPT, len(seen) + len(stored)))
    written = num_chains * CHAIN_BLOCKS * 12_288
    assert written > 2 * CAPACITY, "segments went while it was killed"


@pytest.mark.timeout(300)
def test_kill_9_while_it_writes(nursery: Nursery) -> None:
    kill_again_and_again(nursery, ROUNDS // nursery.num_folders, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kill_9_a_thousand_times(nursery: Nursery) -> None:
    kill_again_and_again(nursery, 10 * ROUNDS, seed=2)
