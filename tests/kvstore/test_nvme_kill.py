"""Killed at any moment while it writes: what is found after is right, and the disk use stays under the cap."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pagetier.kvstore.block import BlockStatus
from pagetier.kvstore.nvme.tier import NvmeTier
from tests.kvstore.tier_contract import DOMAIN, addresses, chain, get, payload_of, put, soon

CAPACITY = 4 << 20
ROUNDS = 8
CHAIN_BLOCKS = 12


def write_until_killed(path: Path, first_seed: int) -> None:
    """The child: put chain after chain, and say the seed of each that was stored."""
    tier = NvmeTier(path, CAPACITY, DOMAIN, segment_bytes=512 << 10, refresh_s=0)
    for seed in range(first_seed, first_seed + 100_000):
        statuses = put(tier, chain(CHAIN_BLOCKS, seed=seed))
        if set(statuses) == {BlockStatus.OK}:
            os.write(1, b"%d\n" % seed)


def disk_bytes(path: Path) -> int:
    return sum(entry.lstat().st_blocks * 512 for entry in [path, *path.rglob("*")])


def check_recovery(path: Path, seeds: list[int], last: int) -> None:
    """Everything found is right; the last chain that was reported stored is there in whole."""
    assert disk_bytes(path) <= CAPACITY
    with NvmeTier(path, CAPACITY, DOMAIN, segment_bytes=512 << 10, refresh_s=0) as tier:
        assert tier._folder.writer == path / "00"
        assert tier.counters().blocks > 0
        for seed in seeds:
            names = chain(CHAIN_BLOCKS, seed=seed)
            statuses, buffers = get(tier, names)
            for name, status, buffer in zip(names, statuses, buffers, strict=True):
                assert status in (BlockStatus.OK, BlockStatus.MISS), f"chain {seed}: {status}"
                assert status is BlockStatus.MISS or buffer == payload_of(name), f"chain {seed}: wrong bytes"
        assert tier.lookup(addresses(chain(CHAIN_BLOCKS, seed=last)), soon()) == CHAIN_BLOCKS
        assert tier.counters().corrupt == 0
        assert tier.counters().errors == 0
        tier.check()
    assert disk_bytes(path) <= CAPACITY


def test_kill_9_while_it_writes(tmp_path: Path) -> None:
    path, seeds = tmp_path / "nvme", list[int]()
    for round_ in range(ROUNDS):
        command = [sys.executable, "-m", "tests.kvstore.test_nvme_kill", str(path), str(round_ * 1_000_000)]
        with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            said = child.stdout.readline()
            assert said, "the child stored nothing"
            time.sleep(0.02 + 0.017 * round_)
            child.kill()
            said += child.stdout.read()
        assert child.returncode == -signal.SIGKILL
        done = [int(line) for line in said.splitlines(keepends=True) if line.endswith(b"\n")]
        seeds = (seeds + done)[-80:]
        check_recovery(path, [*seeds, done[-1] + 1], done[-1])


if __name__ == "__main__":
    write_until_killed(Path(sys.argv[1]), int(sys.argv[2]))
