"""`pagetier bench recovery`: what it costs to know 100,000 records, and to look a 100,000-token prompt up in them.

Each opening of the index is in a process of its own, after everything it needs was imported: what is added to a start.
Before that a folder is filled with records of 4 KiB through the tier itself (800 MiB). Another is left as a killed
writer leaves it, with an open segment whose headers are walked. The pages read at the start are in the page cache.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pagetier.benchmarks.pairing import percentile, wait_until_idle
from pagetier.benchmarks.report import Row
from pagetier.benchmarks.tiers.blocks import (
    BLOCK_SIZE,
    DOMAIN,
    NEVER_S,
    PART,
    await_one,
    names_of,
    store_over,
)
from pagetier.benchmarks.tiers.opening import CAPACITY_BYTES, PAYLOAD_BYTES, fill, opened
from pagetier.engine.prefix_index import PrefixIndex
from pagetier.kvstore.block import Address
from pagetier.kvstore.errors import PagetierError
from pagetier.kvstore.job import LookupDone
from pagetier.kvstore.keys import chain_names, pack_tokens, root_key
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.places import cache_dir
from pagetier.kvstore.redis.embedded import join_embedded
from pagetier.kvstore.redis.sockets import Endpoint, Sockets, Stream
from pagetier.kvstore.redis.tier import RedisTier
from pagetier.kvstore.tier import BlockWrite

NUM_RECORDS = 100_000
PROMPT_TOKENS = 100_000
REDIS_BYTES = 256 << 20


def run(full: bool, say: Callable[[str], None]) -> list[Row]:
    """Quick: three openings and ten look-ups. Full: ten and fifty."""
    note = wait_until_idle(300.0 if full else 0.0)
    openings, lookups = (10, 50) if full else (3, 10)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="recovery-") as folder:
        for kind in ("closed", "killed"):
            say(f"{NUM_RECORDS:,} records, the writer {kind}")
            path = Path(folder) / kind
            fill(path, NUM_RECORDS, kill=kind == "killed")
            rows += opening_rows(path, kind, openings, note)
        say(f"looking {PROMPT_TOKENS:,} tokens up")
        rows.append(nvme_lookup_row(Path(folder) / "closed", lookups, note))
    rows += redis_lookup_rows(lookups, note)
    rows.append(match_row(lookups, note))
    return rows


def opening_rows(path: Path, kind: str, runs: int, note: str) -> list[Row]:
    """Seconds until the index of `path` is complete and, for an orderly folder, bytes of memory a record."""
    try:
        found = [
            opened(path, NUM_RECORDS) for _ in range(runs if kind == "closed" else 1)
        ]  # it closes what was left open
    except (subprocess.SubprocessError, OSError) as error:
        return [Row(f"recovery_{kind}_100000", None, "s", note=str(error))]
    seconds = [one.seconds for one in found]
    target = "<= 0.1" if kind == "closed" else None
    time_row = Row(f"recovery_{kind}_100000", max(seconds), "s", target, *_spread(seconds), len(found), note)
    if kind != "closed":
        return [time_row]
    sizes = [one.resident_bytes / NUM_RECORDS for one in found]
    return [time_row, Row("index_bytes_per_record", max(sizes), "B", "<= 300", *_spread(sizes), len(found), note)]


def nvme_lookup_row(path: Path, runs: int, note: str) -> Row:
    """From `submit_lookup` of hashed names to its answer, on the engine's thread, the tier's index in memory."""
    names = names_of(NUM_RECORDS, seed=0)[: PROMPT_TOKENS // BLOCK_SIZE]
    times = []
    with store_over(NvmeTier(path, CAPACITY_BYTES, DOMAIN), PAYLOAD_BYTES) as store:
        for _ in range(runs):
            start_s = time.perf_counter()
            ticket = store.submit_lookup(names)
            found = await_one(store, LookupDone)
            times.append(1e3 * (time.perf_counter() - start_s))
            store.release(ticket)
            if len(found.tiers) != len(names):
                raise RuntimeError(f"{len(found.tiers)} of {len(names)} blocks found")
    return Row(f"nvme_lookup_{len(names)}", statistics.median(times), "ms", "<= 3", *_spread(times), runs, note)


class CountingSockets(Sockets):
    """The real ones; counts what is sent. A round trip begins with a send."""

    def __init__(self) -> None:
        self.num_sends = 0

    def connect(self, endpoint: Endpoint, deadline_s: float) -> Stream:
        return _CountingStream(super().connect(endpoint, deadline_s), self)


class _CountingStream:
    def __init__(self, stream: Stream, sockets: CountingSockets) -> None:
        self._stream, self._sockets = stream, sockets
        self.receive, self.is_quiet = stream.receive, stream.is_quiet
        self.abort, self.close = stream.abort, stream.close

    def send(self, buffers: Sequence[memoryview], deadline_s: float) -> None:
        self._sockets.num_sends += 1
        self._stream.send(buffers, deadline_s)


def redis_lookup_rows(runs: int, note: str) -> list[Row]:
    """The same names in an embedded Valkey: round trips, counted at the socket, and the time they take."""
    names = names_of(PROMPT_TOKENS // BLOCK_SIZE, seed=0)
    addresses, payload = [Address(name.key, PART) for name in names], memoryview(bytes(PAYLOAD_BYTES))
    sockets, times, sends = CountingSockets(), [], []
    try:
        with (
            tempfile.TemporaryDirectory(prefix="pgt-", dir="/tmp") as folder,  # short: socket paths have a limit
            join_embedded(Path(folder), REDIS_BYTES, linger_s=0.0) as server,
        ):
            tier = RedisTier(server.url, DOMAIN, sockets=sockets)
            tier.put([BlockWrite(name, PART, payload) for name in names], time.monotonic() + NEVER_S)
            for _ in range(runs):
                before, start_s = sockets.num_sends, time.perf_counter()
                if tier.lookup(addresses, time.monotonic() + NEVER_S) != len(addresses):
                    raise RuntimeError("Redis does not hold what was put")
                times.append(1e3 * (time.perf_counter() - start_s))
                sends.append(sockets.num_sends - before)
            tier.close()
    except (PagetierError, OSError) as error:
        return [Row("redis_lookup_6250_round_trips", None, "", "<= 1", note=str(error))]
    return [
        Row("redis_lookup_6250_round_trips", max(sends), "", "<= 1", runs=runs, note=note),
        Row("redis_lookup_6250", statistics.median(times), "ms", None, *_spread(times), runs, note),
    ]


def match_row(runs: int, note: str, num_tokens: int = PROMPT_TOKENS) -> Row:
    """Naming the blocks of a prompt (API process) and finding them in the device's radix tree (core thread)."""
    root, tokens = root_key(DOMAIN), np.random.default_rng(0).integers(0, 49_152, num_tokens)
    index = PrefixIndex(BLOCK_SIZE)
    chain = chain_names(root, tokens, BLOCK_SIZE)
    index.insert(chain, list(range(len(chain))), 0, len(chain), None)
    hashing, matching = [], []
    for _ in range(runs):
        start_s = time.perf_counter()
        packed = pack_tokens(tokens)
        chain_names(root, tokens, BLOCK_SIZE)
        middle_s = time.perf_counter()
        if len(index.match(root, packed, num_tokens).nodes) != len(chain):
            raise RuntimeError("the radix tree does not hold what was inserted")
        matching.append(1e3 * (time.perf_counter() - middle_s))
        hashing.append(1e3 * (middle_s - start_s))
    both = [a + b for a, b in zip(hashing, matching, strict=True)]
    words = f"hashing {statistics.median(hashing):.1f} ms, match {statistics.median(matching):.1f} ms"
    noted = f"{words}{'; ' if note else ''}{note}"
    return Row(
        f"hash_and_match_{num_tokens}_tokens", statistics.median(both), "ms", "<= 15", *_spread(both), runs, noted
    )


def _spread(values: list[float]) -> tuple[float, float]:
    return percentile(values, 0.5), percentile(values, 0.99)
