"""A process that writes to an NVMe tier until it is killed: `python -m tests.kvstore.nvme_writer PATH`.

The nursery waits for a line with a number on stdin, forks a child that puts chain after chain from that number on, and
says the child's pid, then each chain that was stored. Forking spares each round the start of an interpreter. Loads no
torch: this is the store alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pagetier.kvstore.block import BlockStatus
from pagetier.kvstore.nvme.tier import NvmeTier
from tests.kvstore.tier_contract import DOMAIN, chain, put

CAPACITY = 4 << 20
SEGMENT_BYTES = 512 << 10
CHAIN_BLOCKS = 6


def opened(path: Path) -> NvmeTier:
    return NvmeTier(path, CAPACITY, DOMAIN, fsync="none", segment_bytes=SEGMENT_BYTES, refresh_s=0)


def write_until_killed(path: Path, first: int) -> None:
    """The child: put chain after chain, and say the number of each that was stored."""
    tier = opened(path)
    for number in range(first, first + 1_000_000):
        if set(put(tier, chain(CHAIN_BLOCKS, seed=number))) <= {BlockStatus.OK, BlockStatus.EXISTS}:
            os.write(1, b"%d\n" % number)


def main(path: Path) -> None:
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            write_until_killed(path, int(line))
        os.write(1, b"pid %d\n" % pid)
        os.waitpid(pid, 0)
        os.write(1, b"dead\n")


if __name__ == "__main__":
    assert "torch" not in sys.modules
    main(Path(sys.argv[1]))
