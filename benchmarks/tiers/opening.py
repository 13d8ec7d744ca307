"""A folder of many small records, and a process that opens it: `python -m pagetier.benchmarks.tiers.opening FOLDER N`.

Prints one JSON line: seconds from the call that opens the tier to a complete index, and bytes of memory it then takes.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pagetier.benchmarks.tiers.blocks import DOMAIN, PART, names_of
from pagetier.kvstore.block import BlockStatus
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.tier import BlockWrite

PAYLOAD_BYTES = 4096
CAPACITY_BYTES = 8 << 30
PUT_RECORDS = 1024  # 4 MiB, as the store's pieces
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Opened:
    seconds: float
    resident_bytes: int


def fill(path: Path, num_records: int, *, kill: bool) -> None:
    """Put that many records into `path`, by a process that then closes the tier or ends without a word."""
    writer = multiprocessing.get_context("spawn").Process(target=_fill, args=(path, num_records, kill))
    writer.start()
    writer.join(TIMEOUT_S)
    if writer.exitcode != 0:
        writer.kill()
        raise RuntimeError(f"filling {path} ended with {writer.exitcode}")


def _fill(path: Path, num_records: int, kill: bool) -> None:
    payload, names = memoryview(bytes(PAYLOAD_BYTES)), names_of(num_records, seed=0)
    tier = NvmeTier(path, CAPACITY_BYTES, DOMAIN, fsync="none")
    for first in range(0, len(names), PUT_RECORDS):
        writes = [BlockWrite(name, PART, payload) for name in names[first : first + PUT_RECORDS]]
        if set(tier.put(writes, time.monotonic() + TIMEOUT_S)) != {BlockStatus.OK}:
            raise RuntimeError("a record was not stored")
    if kill:
        os._exit(0)
    tier.close()


def opened(path: Path, num_records: int) -> Opened:
    """Open `path`, which holds that many, in a new process. Raises CalledProcessError, TimeoutExpired or OSError."""
    command = [sys.executable, "-m", __name__, str(path), str(num_records)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    found = json.loads(done.stdout)
    return Opened(found["seconds"], found["resident_bytes"])


def main(path: Path, num_records: int) -> None:
    gc.collect()
    before, start_s = _resident_bytes(), time.perf_counter()
    tier = NvmeTier(path, CAPACITY_BYTES, DOMAIN)
    seconds = time.perf_counter() - start_s
    taken = _resident_bytes() - before
    if tier.counters().blocks != num_records:
        raise RuntimeError(f"{tier.counters().blocks} of {num_records} records found")
    sys.stdout.write(json.dumps({"seconds": seconds, "resident_bytes": taken}) + "\n")
    tier.close()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
