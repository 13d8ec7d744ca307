"""LMCache's store beside ours, like for like: its adapters `fs` and `fs_native` against the NVMe tier through the page
cache, `resp` against the Redis tier over the same TCP port.

LMCache is asked by its own command, `lmcache bench l2`, which stores, loads and compares all bytes; ours does the same
through the store as `serve` makes it. Both move as many values of 360 KiB a round, into an empty place. What is unfair:
its rounds of one run share a process that is warm after the first (its own warm-up round, not counted), while each of
ours opens a new store, and our loads include the lookup and the checksum of every byte.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from pagetier.benchmarks.pairing import Pairs, percentile
from pagetier.benchmarks.peer import PeerError, find_environment
from pagetier.benchmarks.report import Row
from pagetier.benchmarks.tiers.blocks import DOMAIN, PAYLOADS, Blocks, load_rate, put_rate, store_over
from pagetier.kvstore.errors import PagetierError
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.places import cache_dir
from pagetier.kvstore.redis.embedded import find_server
from pagetier.kvstore.redis.tier import RedisTier
from pagetier.kvstore.tier import Tier

NUM_KEYS = 256
PAYLOAD_BYTES = PAYLOADS["360KiB"]
ROUNDS = 3
TIMEOUT_S = 300.0
START_S = 10.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes of values per second."""

    put: float
    load: float


def run(num_pairs: int, say: Callable[[str], None], note: str) -> list[Row]:
    """Rows for the three adapters; without values where LMCache is not installed."""
    rows: list[Row] = []
    for adapter in ("fs", "fs_native", "resp"):
        say(f"LMCache {adapter}: {num_pairs} pairs of {ROUNDS} x {NUM_KEYS} values of 360 KiB")
        rows += adapter_rows(adapter, num_pairs, note)
    return rows


def adapter_rows(adapter: str, num_pairs: int, note: str) -> list[Row]:
    names = [f"{word}_vs_lmcache_{adapter}" for word in ("put", "load")]
    blocks = Blocks.random(PAYLOAD_BYTES, NUM_KEYS * PAYLOAD_BYTES)
    ours: list[Rates] = []
    theirs: list[Rates] = []
    try:
        python = lmcache_python()
        with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="lmcache-") as folder, place(adapter) as port:
            for turn in range(num_pairs):
                ours.append(our_rates(adapter, Path(folder) / "ours", blocks, port, turn * ROUNDS))
                theirs.append(their_rates(python, adapter, Path(folder) / "theirs", port))
    except (PeerError, PagetierError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        return [Row(name, None, "ratio", "> 1", note=str(error)) for name in names]
    how = "buffered" if adapter != "resp" else "TCP on loopback, one Valkey"
    noted = f"{how}; 360 KiB values, all bytes verified on both sides{'; ' if note else ''}{note}"
    rows: list[Row] = []
    for name, pairs in (
        (names[0], Pairs(tuple(rates.put for rates in ours), tuple(rates.put for rates in theirs))),
        (names[1], Pairs(tuple(rates.load for rates in ours), tuple(rates.load for rates in theirs))),
    ):
        spread = percentile(pairs.ratios, 0.5), percentile(pairs.ratios, 0.99)
        rows.append(Row(name, pairs.ratio, "ratio", "> 1", *spread, len(pairs.ours), noted))
        for side, rates in (("pagetier", pairs.ours), ("lmcache", pairs.theirs)):
            side_name = name.replace("_vs_lmcache", f"_{side}")
            rows.append(Row(side_name, percentile(rates, 0.5) / 1e9, "GB/s", runs=len(rates), note=noted))
    return rows


def lmcache_python() -> Path:
    """The interpreter that has LMCache. Raises PeerError, naming the command that installs it."""
    python = find_environment("vllm")
    if not any((python.parents[1] / "lib").glob("python3*/site-packages/lmcache")):
        raise PeerError("lmcache is not installed: benchmarks/peers/setup.sh vllm lmcache")
    return python


@contextmanager
def place(adapter: str) -> Iterator[int]:
    """For `resp` a Valkey on a free loopback port, which is given; else 0."""
    if adapter != "resp":
        yield 0
        return
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="pgt-", dir="/tmp") as folder:
        options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", "", "--appendonly", "no"]
        server = subprocess.Popen([find_server(), *options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            _await_server(port)
            yield port
        finally:
            server.kill()
            server.wait()


def _await_server(port: int) -> None:
    give_up_s = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            if time.monotonic() >= give_up_s:
                raise
            time.sleep(0.02)


def our_rates(adapter: str, path: Path, blocks: Blocks, port: int, seed: int) -> Rates:
    """The median round, each into an empty place."""
    puts, loads = [], []
    for number in range(ROUNDS):
        fresh = blocks.renamed(seed + number)
        shutil.rmtree(path, ignore_errors=True)
        if port:
            _flush(port)
        with store_over(_tier(adapter, path, blocks, port), PAYLOAD_BYTES) as store:
            puts.append(put_rate(store, fresh))
        with store_over(_tier(adapter, path, blocks, port), PAYLOAD_BYTES) as store:
            loads.append(load_rate(store, fresh))
    return Rates(percentile(puts, 0.5), percentile(loads, 0.5))


def _tier(adapter: str, path: Path, blocks: Blocks, port: int) -> Tier:
    if adapter == "resp":
        return RedisTier(f"redis://127.0.0.1:{port}", DOMAIN)
    return NvmeTier(path, 8 * blocks.nbytes + (1 << 30), DOMAIN, io="buffered")


def their_rates(python: Path, adapter: str, path: Path, port: int) -> Rates:
    """The median round of one run of `lmcache bench l2`. Raises PeerError when a value was lost or is another."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    if port:
        _flush(port)
        spec = {"type": "resp", "host": "127.0.0.1", "port": port}
    else:
        spec = {"type": adapter, "base_path": str(path)}
    answer = path.with_suffix(".json")
    command = [str(python), "-m", "lmcache.cli.main", "bench", "l2", "--l2-adapter", json.dumps(spec)]
    command += ["--num-keys", str(NUM_KEYS), "--data-size-kb", str(PAYLOAD_BYTES >> 10), "--rounds", str(ROUNDS)]
    command += ["--no-l1-use-hugepages", "--no-skip-verify", "--flamegraph", "off", "--output", str(answer)]
    command += ["--format", "json"]
    env = {**os.environ, "LMCACHE_TRACK_USAGE": "false"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=env)
    if done.returncode != 0 or not answer.is_file():
        raise PeerError(f"lmcache bench l2 ended with {done.returncode}: {done.stderr.strip()[-200:]}")
    found = json.loads(answer.read_text())["metrics"]
    nbytes = NUM_KEYS * PAYLOAD_BYTES
    rates = {}
    for one in (value for key, value in found.items() if key.startswith("op_")):
        if one["operation"] in ("Store", "Load"):
            if one["total_success"] != one["total_keys"]:
                raise PeerError(f"lmcache {adapter}: {one['total_success']} of {one['total_keys']} values")
            rates[one["operation"]] = nbytes / (one["duration_p50_ms"] / 1e3)
    return Rates(rates["Store"], rates["Load"])


def _flush(port: int) -> None:
    with redis.Redis("127.0.0.1", port) as client:
        client.flushall()
