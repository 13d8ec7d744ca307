"""A process that writes to an NVMe tier until it is killed: `python -m tests.kvstore.nvme_writer PATH FOLDERS`.

The nursery waits for a line with a number on stdin, forks a child that puts chain after chain from that number on, and
says the child's pid, then each chain that was stored. Forking spares each round the start of an interpreter. Loads no
torch: this is the store alone.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from pagetier.kvstore.block import BlockStatus
from pagetier.kvstore.nvme.striped import StripedTier
from pagetier.kvstore.nvme.tier import NvmeTier
from tests.kvstore.tier_contract import DOMAIN, chain, put

CAPACITY = 4 << 20
SEGMENT_BYTES = 512 << 10
CHAIN_BLOCKS = 6


def opened(path: Path, num_folders: int = 1) -> NvmeTier | StripedTier:
    """A tier over one folder, or over several below `path` that share the capacity."""
    size, segment = CAPACITY // num_folders, SEGMENT_BYTES // num_folders
    paths = [path] if num_folders == 1 else [path / f"{i}" for i in range(num_folders)]
    tiers = [NvmeTier(one, size, DOMAIN, fsync="none", segment_bytes=segment, refresh_s=0) for one in paths]
    return tiers[0] if num_folders == 1 else StripedTier(tiers, time.monotonic)


def write_until_killed(path: Path, num_folders: int, first: int) -> None:
    """The child: put chain after chain, and say the number of each that was stored."""
    tier = opened(path, num_folders)
    for number in range(first, first + 1_000_000):
        if set(put(tier, chain(CHAIN_BLOCKS, seed=number))) <= {BlockStatus.OK, BlockStatus.EXISTS}:
            os.write(1, b"%d\n" % number)


def main(path: Path, num_folders: int) -> None:
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            write_until_killed(path, num_folders, int(line))
        os.write(1, b"pid %d\n" % pid)
        os.waitpid(pid, 0)
        os.write(1, b"dead\n")


if __name__ == "__main__":
    assert "torch" not in sys.modules
    main(Path(sys.argv[1]), int(sys.argv[2]))
