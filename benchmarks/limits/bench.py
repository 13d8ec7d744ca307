"""`pagetier bench limits`: what this machine can do at most. Ceilings, so no row has a target.

Memory and multiply-adds come from the project's own C program; the disk from fio where it is installed, else from the
same program; Redis from redis-benchmark where it is installed, else from a Python loop. `value` is the best run and
`p50` the middle one: on a machine with neighbours the best run is nearest to the hardware's limit.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from pagetier.benchmarks.limits.program import Clock, DiskLimits, LimitsError, LimitsProgram, PeakLimits
from pagetier.benchmarks.limits.redis_limits import measure_redis
from pagetier.benchmarks.pairing import wait_until_idle
from pagetier.benchmarks.report import Row, num_cores
from pagetier.kvstore.errors import PagetierError
from pagetier.kvstore.places import cache_dir, kernels_dir

DISK_DEPTH = 8
DISK_BLOCK_BYTES = 1 << 20  # what a chain's neighbours travel in


def run(full: bool, say: Callable[[str], None]) -> list[Row]:
    """Quick: two runs of half a second. Full: five of two seconds."""
    note = wait_until_idle(300.0 if full else 0.0)
    seconds, runs = (2.0, 5) if full else (0.5, 2)
    rows: list[Row] = []
    try:
        program = LimitsProgram(kernels_dir())
    except LimitsError as error:
        return [Row(name, None, unit, note=str(error)) for name, unit in (("memory", "GB/s"), ("peak", "GFLOP/s"))]
    for threads in sorted({1, num_cores()}):
        say(f"memory and multiply-adds, {threads} threads")
        for pinned in (False, True) if full else (False,):
            clock = Clock(threads, seconds, runs, pinned)
            suffix = f"threads_{threads}{'_pinned' if pinned else ''}"
            rows.append(best(f"memory_read_{suffix}", program.read(clock), 1e9, "GB/s", note))
            copied = _joined("each byte counted once", note)
            rows.append(best(f"memory_copy_{suffix}", program.copy(clock), 1e9, "GB/s", copied))
            rows += peak_rows(suffix, program.peak(clock), note)
    say("disk and Redis")
    return [*rows, *disk_rows(program, seconds, runs, note), *redis_rows(seconds, note)]


def best(name: str, values: Sequence[float], scale: float, unit: str, note: str) -> Row:
    """A ceiling: the best run, and the middle one as p50."""
    scaled = [value / scale for value in values]
    return Row(name, max(scaled), unit, p50=statistics.median(scaled), runs=len(scaled), note=note)


def peak_rows(suffix: str, found: PeakLimits, note: str) -> list[Row]:
    rows = []
    for dtype, values, path in (("bf16", found.bf16, found.bf16_path), ("fp32", found.f32, found.f32_path)):
        name = f"peak_{dtype}_{suffix}"
        if values:
            rows.append(best(name, values, 1e9, "GFLOP/s", _joined(f"by {path}, fed from L2", note)))
        else:
            rows.append(Row(name, None, "GFLOP/s", note="the program has no path for this CPU"))
    return rows


def disk_rows(program: LimitsProgram, seconds: float, runs: int, note: str) -> list[Row]:
    """On the file system of the NVMe tier's default folder, 512 MiB, depth 8, 1 MiB a request."""
    file_bytes = 512 << 20
    try:
        with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="limits-") as folder:
            path = Path(folder) / "file"
            fio = shutil.which("fio")
            clock = Clock(DISK_DEPTH, seconds, runs)
            if fio is None:
                found = program.disk(path, clock, file_bytes, DISK_BLOCK_BYTES)
            else:
                found = fio_disk(fio, path, clock, file_bytes, DISK_BLOCK_BYTES)
    except (LimitsError, OSError) as error:
        return [Row(name, None, "GB/s", note=str(error)) for name in ("disk_read", "disk_write")]
    how = f"O_DIRECT, depth {DISK_DEPTH}, 1 MiB, by {'fio' if fio else 'threads of our own program'}"
    return [
        best("disk_read", found.read, 1e9, "GB/s", _joined(how, note)),
        best("disk_write", found.write, 1e9, "GB/s", _joined(how, note)),
    ]


def fio_disk(fio: str, path: Path, clock: Clock, file_bytes: int, block_bytes: int) -> DiskLimits:
    """The same by fio. Raises LimitsError with fio's own line."""
    rates: dict[str, list[float]] = {"read": [], "write": []}
    for kind in ("write", "read") * clock.runs:
        command = [fio, "--name=limits", f"--filename={path}", f"--size={file_bytes}", f"--rw={kind}"]
        command += [f"--bs={block_bytes}", f"--iodepth={clock.threads}", "--ioengine=libaio", "--direct=1"]
        command += ["--time_based", f"--runtime={max(1, round(clock.seconds))}", "--output-format=json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300.0, check=False)
        if done.returncode != 0:
            raise LimitsError(f"fio: {(done.stderr or done.stdout).strip()[:200]}")
        answer = done.stdout[done.stdout.index("{") :]  # fio puts its warnings in front
        rates[kind].append(float(json.loads(answer)["jobs"][0][kind]["bw_bytes"]))
    return DiskLimits(tuple(rates["read"]), tuple(rates["write"]))


def redis_rows(seconds: float, note: str) -> list[Row]:
    try:
        found = measure_redis(seconds)
    except (PagetierError, OSError, subprocess.TimeoutExpired) as error:
        return [Row(name, None, "GB/s", note=str(error)) for name in ("redis_get", "redis_set")]
    how = _joined(f"360 KiB values over a Unix socket, by {found.how}", note)
    return [Row("redis_get", found.get / 1e9, "GB/s", note=how), Row("redis_set", found.set / 1e9, "GB/s", note=how)]


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)
