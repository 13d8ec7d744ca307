"""The limits program: compiled on first use into the cache folder, run as a process of its own, answers as values."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagetier.kernels.cpu.build import COMPILERS

SOURCES = Path(__file__).parent
CFLAGS = ("-O3", "-std=c11", "-D_GNU_SOURCE")
TIMEOUT_S = 300.0
BUFFER_BYTES = 256 << 20  # a thread's; the largest L3 of one socket in wide use is 384 MiB, shared by 64 cores and more


class LimitsError(Exception):
    """A limit could not be measured; one line that says why."""


@dataclass(frozen=True, slots=True)
class Clock:
    """threads: that work at once. seconds: of each run. pinned: thread i to the i-th CPU this process may use."""

    threads: int
    seconds: float = 0.5
    runs: int = 1
    pinned: bool = False

    @property
    def words(self) -> list[str]:
        return [str(self.threads), str(int(self.pinned)), str(self.seconds), str(self.runs)]


@dataclass(frozen=True, slots=True)
class PeakLimits:
    """Floating-point operations per second, one value a run, and by which instructions. Empty where there are none."""

    bf16: tuple[float, ...]
    bf16_path: str | None
    f32: tuple[float, ...]
    f32_path: str | None


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """Bytes per second past the page cache, one value a run."""

    read: tuple[float, ...]
    write: tuple[float, ...]


class LimitsProgram:
    """Raises LimitsError from every call, with the program's own line, when something cannot be measured."""

    def __init__(self, folder: Path) -> None:
        """Compiles into `folder` unless these sources are compiled already (some 2 s)."""
        self.path = folder / f"limits-{source_digest()}"
        if not self.path.is_file():
            _compile(self.path)

    def read(self, clock: Clock, buffer_bytes: int = BUFFER_BYTES) -> tuple[float, ...]:
        """Bytes per second of streaming reads, each thread through a buffer of its own; one value a run."""
        return tuple(self._run("read", *clock.words, str(buffer_bytes))["bytes_per_s"])

    def copy(self, clock: Clock, buffer_bytes: int = BUFFER_BYTES) -> tuple[float, ...]:
        """As `read`, for copies from one buffer to another; each byte counts once."""
        return tuple(self._run("copy", *clock.words, str(buffer_bytes))["bytes_per_s"])

    def peak(self, clock: Clock) -> PeakLimits:
        """Multiply-adds fed from L2 in the machine's best bf16 path and in fp32."""
        found = self._run("peak", *clock.words)
        return PeakLimits(
            tuple(found["bf16_flop_per_s"]), found["bf16_path"], tuple(found["f32_flop_per_s"]), found["f32_path"]
        )

    def disk(self, path: Path, clock: Clock, file_bytes: int, block_bytes: int) -> DiskLimits:
        """O_DIRECT write and read of a new file `path`, `clock.threads` requests in flight. The file is removed."""
        words = [str(clock.threads), str(clock.seconds), str(clock.runs), str(file_bytes), str(block_bytes)]
        found = self._run("disk", *words, os.fspath(path))
        return DiskLimits(tuple(found["read_bytes_per_s"]), tuple(found["write_bytes_per_s"]))

    def _run(self, *words: str) -> dict[str, Any]:
        try:
            done = subprocess.run(
                [str(self.path), *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LimitsError(f"{self.path.name} {words[0]}: {error}") from error
        if done.returncode != 0:
            raise LimitsError(done.stderr.strip() or f"{self.path.name} {words[0]} ended with {done.returncode}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def source_digest() -> str:
    """Changes with every source, header or flag."""
    digest = hashlib.sha256(" ".join(CFLAGS).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".c", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(target: Path) -> None:
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise LimitsError(f"no C compiler found (looked for {', '.join(COMPILERS)})")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        sources = sorted(str(path) for path in SOURCES.glob("*.c"))
        command = [compiler, *CFLAGS, "-o", str(made), *sources, "-lpthread"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode != 0:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            raise LimitsError(f"{compiler} failed: {first}")
        os.replace(made, target)
