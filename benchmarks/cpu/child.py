"""An engine in a process of its own: how long from its start to the first token, and how much memory it takes.

`python -m pagetier.benchmarks.cpu.child DTYPE [POOL_BYTES]`. Prints one JSON line as soon as it has a first token; with
POOL_BYTES it then uses every block of a pool of that size and prints a second line about memory.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 300.0


class ChildError(Exception):
    """The engine's process failed; its last line."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes resident in the process once it has answered and, at most, at any time before."""

    resident_bytes: int
    peak_bytes: int


def first_token_s(dtype: str) -> float:
    """Seconds from the start of a new process to its first token. Raises ChildError."""
    command = [sys.executable, "-m", __name__, dtype]
    start_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        line = child.stdout.readline()
        elapsed_s = time.perf_counter() - start_s
        if not line:
            raise ChildError(_last_line(child.stderr.read()))
        child.communicate(timeout=TIMEOUT_S)
    return elapsed_s


def footprint(dtype: str, pool_bytes: int) -> Footprint:
    """Of an engine that has used every block of its pool. Raises ChildError."""
    command = [sys.executable, "-m", __name__, dtype, str(pool_bytes)]
    done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise ChildError(_last_line(done.stderr))
    found = json.loads(done.stdout.splitlines()[1])
    return Footprint(found["resident_bytes"], found["peak_bytes"])


def _last_line(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "the engine's process ended without a word"


def status_bytes(field: str) -> int:
    """A field of /proc/self/status that is given in kB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def main(dtype: str, pool_bytes: int | None) -> None:
    from pagetier.engine.llm import LLM
    from pagetier.engine.sampling_params import SamplingParams

    options: dict[str, Any] = {} if pool_bytes is None else {"kv_cache_memory": pool_bytes}
    with LLM("smollm2", dtype=dtype, **options) as llm:
        llm.generate([[100, 200, 300, 400]], SamplingParams(temperature=0.0, max_tokens=1))
        _print({"first_token": True})
        if pool_bytes is None:
            os._exit(0)  # what is being timed has been; nothing is to be saved
        ids, params = random.Random(0), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        num_blocks = llm.stats()["tiers"]["device"]["capacity_blocks"]
        prompts = [[ids.randrange(100, 49_152) for _ in range(500)] for _ in range(-(-num_blocks * 16 * 2 // 500))]
        llm.generate(prompts, params)  # twice the pool: every block was written
        _print({"resident_bytes": status_bytes("VmRSS"), "peak_bytes": status_bytes("VmHWM")})


def _print(values: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
