"""`pagetier bench service`: a store service beside a store in this process, and a crowd of clients of which some die.

Both sides load the same chain from a host tier and from NVMe, in turn. What is unfair: the service's side has a second
process to work in, which on an otherwise idle machine helps it; NVMe reads come from the page cache on both sides.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pagetier.benchmarks.pairing import measure_pairs, percentile, wait_until_idle
from pagetier.benchmarks.report import Row
from pagetier.benchmarks.service.program import StoreProcess, store_process
from pagetier.benchmarks.tiers.blocks import DOMAIN, Blocks, load_rate, put_rate, store_over
from pagetier.kernels.cpu.build import library_path
from pagetier.kernels.cpu.copying import StreamingCopier
from pagetier.kernels.cpu.library import Library
from pagetier.kvstore.host import HostTier
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.places import kernels_dir
from pagetier.kvstore.tier import Tier

PAYLOAD_BYTES = 360 << 10  # a block of the default model in bf16
TOTAL_BYTES = 45 << 20  # 2,000 tokens
NUM_CLIENTS, KILL_EVERY_S = 16, 10.0
PARTS = ("host", "nvme", "crowd")
GIB = 1 << 30

Say = Callable[[str], None]


def run(full: bool, say: Say) -> list[Row]:
    """Quick: two pairs and a crowd for a minute. Full: five pairs and ten minutes."""
    return [row for part in PARTS for row in run_part(part, full, say)]


def run_part(part: str, full: bool, say: Say) -> list[Row]:
    note = wait_until_idle(600.0 if full else 0.0)
    if part == "crowd":
        return crowd_rows(600.0 if full else 60.0, say, note)
    return load_rows(part, 5 if full else 3, say, note)


def load_rows(tier: str, num_pairs: int, say: Say, note: str, total_bytes: int = TOTAL_BYTES) -> list[Row]:
    """Loads of 2,000 tokens from one tier: through shared memory over in process; over gRPC; lookups; the start."""
    say(f"loads from {tier}: in process, through shared memory, over gRPC")
    blocks = Blocks.random(PAYLOAD_BYTES, total_bytes)
    folder = Path(tempfile.mkdtemp(prefix="pgt-"))
    try:
        copier = StreamingCopier(Library(library_path(kernels_dir())))  # both sides have the one that `serve` has
        own_tier: Tier = HostTier(GIB, copier=copier)
        if tier == "nvme":
            own_tier = NvmeTier(folder / "nvme", 4 * GIB, DOMAIN, refresh_s=0)
        with store_over(own_tier, PAYLOAD_BYTES) as own, store_process(tiers=tier) as service:
            put_rate(own, blocks)
            shared = service.remote(service.shared_url, PAYLOAD_BYTES, copier)
            put_bytes_s = put_rate(shared, blocks)
            over_grpc = service.remote(service.grpc_url, PAYLOAD_BYTES)
            load_rate(shared, blocks), load_rate(own, blocks)  # warm: both sides' memory is mapped
            pairs = measure_pairs(lambda: load_rate(shared, blocks), lambda: load_rate(own, blocks), num_pairs * 3)
            grpc_rates = [load_rate(over_grpc, blocks) for _ in range(num_pairs)]
            start_s = service.start_s
            shared.close()
            over_grpc.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rates = sorted(pairs.ours)
    return [
        Row(f"shared_vs_in_process_{tier}", pairs.ratio, "ratio", ">= 0.70", runs=num_pairs * 3, note=note),
        Row(f"shared_load_{tier}", percentile(rates, 0.5) / 1e9, "GB/s", runs=num_pairs * 3, note=note),
        Row(f"shared_put_{tier}", put_bytes_s / 1e9, "GB/s", note=note),
        Row(f"grpc_load_{tier}", percentile(grpc_rates, 0.5) / 1e9, "GB/s", runs=num_pairs, note=note),
        Row(f"start_{tier}", start_s, "s", "<= 1", note=note),
    ]


# ---- the crowd


def crowd_rows(seconds: float, say: Say, note: str, num_clients: int = NUM_CLIENTS) -> list[Row]:
    """Many clients at once, one killed every ten seconds and replaced: what is left of them, and were bytes right."""
    say(f"{num_clients} clients for {seconds:.0f} s, one killed every {KILL_EVERY_S:.0f} s")
    with store_process(tiers="host,nvme", host_size="128MiB") as service:
        end_s, number = time.monotonic() + seconds, 0
        clients: list[subprocess.Popen[str]] = []
        memory: list[int] = []
        num_killed = 0
        while time.monotonic() < end_s:
            while len(clients) < num_clients:
                number += 1
                clients.append(_client(service, end_s - time.monotonic(), number))
            time.sleep(min(KILL_EVERY_S, max(0.1, end_s - time.monotonic())))
            memory.append(service.private_bytes())
            if time.monotonic() < end_s:
                victim = clients.pop(0)
                victim.kill()
                victim.communicate()
                num_killed += 1
        totals = _totals(clients)
        left = _left(service)
    grown = memory[-1] - memory[len(memory) // 2] if len(memory) > 1 else 0
    did = f"{totals['loads']} loads of {totals['blocks']} blocks and {totals['puts']} puts"
    told = f"{num_killed} killed; the rest: {did}"
    told = f"{told}; {note}" if note else told
    return [
        Row("crowd_leaked_leases_and_pins", left, "1", "== 0", note=told),
        Row("crowd_wrong_blocks", totals["wrong"], "blocks", "== 0", note=told),
        Row("crowd_failed_clients", totals["failed"], "clients", "== 0", note=told),
        Row("crowd_memory_growth", grown / (1 << 20), "MiB", "<= 32", note=f"second half of the run; {told}"),
    ]


def _client(service: StoreProcess, seconds: float, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pagetier.benchmarks.service.client", service.shared_url, str(seconds), str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _totals(clients: list[subprocess.Popen[str]]) -> dict[str, int]:
    totals = {"loads": 0, "blocks": 0, "wrong": 0, "puts": 0, "failed": 0}
    for client in clients:
        out, _ = client.communicate(timeout=120)
        if client.returncode:
            totals["failed"] += 1
            continue
        for name, count in json.loads(out).items():
            totals[name] += count
    return totals


def _left(service: StoreProcess) -> int:
    """Sessions, tickets and leases a moment after the last client has gone."""
    limit_s = time.monotonic() + 10.0
    while True:
        counts = service.counts()
        left = sum(counts[name] for name in ("sessions", "tickets", "leases")) + counts["window_bytes"]
        if not left or time.monotonic() > limit_s:
            return left
        time.sleep(0.1)
