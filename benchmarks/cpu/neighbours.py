"""The row on neighbours: a Python thread of this process that never rests, and a Valkey under load beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pagetier.benchmarks.limits.redis_limits import SERVER_BYTES
from pagetier.benchmarks.pairing import measure_pairs, percentile
from pagetier.benchmarks.report import Row
from pagetier.benchmarks.rig import Rig
from pagetier.benchmarks.workload import decode
from pagetier.kvstore.errors import PagetierError
from pagetier.kvstore.redis.embedded import join_embedded

WARM_TOKENS = 8


def neighbours_row(rig: Rig, num_pairs: int, num_new: int, note: str) -> Row:
    """Inter-token p99 of one greedy request with the neighbours over the same without, pair by pair."""
    name, gaps_ms = "neighbours_inter_token_p99", {"alone": [0.0], "beside": [0.0]}

    def p99(kind: str) -> float:
        gaps = inter_token_s(rig, num_new)
        gaps_ms[kind] += [1e3 * gap for gap in gaps]
        return percentile(gaps, 0.99)

    def beside() -> float:
        with busy_thread(), loaded_valkey(socket_path):
            return p99("beside")

    try:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pgt-", dir="/tmp"))
            socket_path = stack.enter_context(join_embedded(Path(folder), SERVER_BYTES, linger_s=0.0)).socket_path
            pairs = measure_pairs(beside, lambda: p99("alone"), num_pairs)
    except (PagetierError, OSError) as error:
        return Row(name, None, "ratio", "<= 1.5", note=f"no Valkey to load: {error}")
    how = (
        f"p99 {percentile(gaps_ms['beside'], 0.99):.1f} ms beside them, {percentile(gaps_ms['alone'], 0.99):.1f} alone"
    )
    return Row(name, pairs.ratio, "ratio", "<= 1.5", runs=num_pairs, note=f"{how}; {note}" if note else how)


def inter_token_s(rig: Rig, num_new: int) -> list[float]:
    """Seconds between the tokens of one request, the first few left out."""
    outputs = rig.add(decode(1, num_new).requests(seed=1))
    at: list[float] = []
    while rig.core.has_work():
        if rig.take_step(outputs):
            at.append(time.perf_counter())
    return [after - before for before, after in zip(at[WARM_TOKENS:], at[WARM_TOKENS + 1 :], strict=False)]


@contextmanager
def busy_thread() -> Iterator[None]:
    """A thread of pure Python that wants the interpreter all the time."""
    stop = False

    def spin() -> None:
        while not stop:
            sum(range(100))

    thread = threading.Thread(target=spin, name="busy-neighbour")
    thread.start()
    try:
        yield
    finally:
        stop = True
        thread.join()


@contextmanager
def loaded_valkey(socket_path: Path) -> Iterator[None]:
    """A process that writes and reads values of 360 KiB, as fast as one connection goes."""
    command = [sys.executable, "-m", "pagetier.benchmarks.limits.redis_load", os.fspath(socket_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as load:
        assert load.stdin is not None and load.stdout is not None
        try:
            if not load.stdout.readline():
                raise PagetierError("the load on Valkey did not start")
            yield
        finally:
            load.terminate()
