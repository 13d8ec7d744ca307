"""The three media: how fast a store over one tier moves a chain, and how fast a tool of the medium's own moves bytes.

The store is as in `serve`: its threads, its pieces, checksums on every byte. Every put is of new names into a new
folder or beside what is there, and the tool writes a new file, so that both sides write where nothing was; every load
is through a tier that was opened after the put. What is unfair is in the limits' favour: fio writes one buffer again
and again, redis-benchmark sends one value again and again, which a core's own cache holds at 360 KiB, and looks at no
byte of a reply, a copy knows where everything is, and none of them checks a sum. In ours is the lookup.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import redis

from pagetier.benchmarks.limits.program import Clock, LimitsError, LimitsProgram
from pagetier.benchmarks.limits.redis_limits import PIPELINE, RedisRates
from pagetier.benchmarks.report import num_cores
from pagetier.benchmarks.tiers.blocks import DOMAIN, Blocks, load_rate, put_rate, store_over
from pagetier.kernels.cpu.build import library_path
from pagetier.kernels.cpu.copying import StreamingCopier
from pagetier.kernels.cpu.library import Library
from pagetier.kvstore.arena import SLAB_BYTES
from pagetier.kvstore.host import HostTier
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.places import cache_dir, kernels_dir
from pagetier.kvstore.redis.embedded import join_embedded
from pagetier.kvstore.redis.tier import RedisTier

DEPTH = 8
REQUEST_BYTES = 1 << 20
TOOL_S = 0.5


class Medium(Protocol):
    """Bytes per second of each side, measured anew by each call; `load` loads what the last `put` stored. `how`: what
    measures the limit.
    """

    how: str

    def put(self) -> float: ...

    def load(self) -> float: ...

    def limit_put(self) -> float: ...

    def limit_load(self) -> float: ...


class NvmeMedium:
    """The NVMe tier with its defaults, in the cache folder's file system, against direct I/O of a file as large."""

    def __init__(self, folder: Path, blocks: Blocks) -> None:
        self._folder, self._blocks, self._num_puts = folder, blocks, 0
        self._fio = shutil.which("fio")
        self.how = f"{'fio' if self._fio else 'threads of our own program'}, O_DIRECT, depth {DEPTH}, 1 MiB"

    @classmethod
    @contextmanager
    def open(cls, blocks: Blocks) -> Iterator[NvmeMedium]:
        with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="tiers-") as folder:
            yield cls(Path(folder), blocks)

    def put(self) -> float:
        shutil.rmtree(self._path, ignore_errors=True)
        self._num_puts += 1
        self._blocks = self._blocks.renamed(self._num_puts)
        with store_over(self._tier(), self._blocks.payload_bytes) as store:
            return put_rate(store, self._blocks)

    def load(self) -> float:
        with store_over(self._tier(), self._blocks.payload_bytes) as store:
            return load_rate(store, self._blocks)

    def limit_put(self) -> float:
        (self._folder / "file").unlink(missing_ok=True)
        return self._by_fio("write") if self._fio else self._by_program()[1]

    def limit_load(self) -> float:
        return self._by_fio("read") if self._fio else self._by_program()[0]

    @property
    def _path(self) -> Path:
        return self._folder / "nvme"

    def _tier(self) -> NvmeTier:
        return NvmeTier(self._path, 8 * self._blocks.nbytes + (1 << 30), DOMAIN)

    def _by_fio(self, kind: str) -> float:
        command = [str(self._fio), "--name=tiers", f"--filename={self._folder / 'file'}", f"--rw={kind}"]
        command += [f"--size={self._blocks.nbytes}", f"--bs={REQUEST_BYTES}", f"--iodepth={DEPTH}"]
        command += ["--ioengine=libaio", "--direct=1", "--output-format=json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300.0, check=False)
        if done.returncode != 0:
            raise LimitsError(f"fio: {(done.stderr or done.stdout).strip()[:200]}")
        answer = json.loads(done.stdout[done.stdout.index("{") :])  # fio puts its warnings in front
        return float(answer["jobs"][0][kind]["bw_bytes"])

    def _by_program(self) -> tuple[float, float]:
        program = LimitsProgram(kernels_dir())
        found = program.disk(self._folder / "file", Clock(DEPTH, TOOL_S), self._blocks.nbytes, REQUEST_BYTES)
        return found.read[0], found.write[0]


class RedisMedium:
    """The Redis tier and redis-benchmark over the same socket of one embedded Valkey, both into an empty server."""

    def __init__(self, url: str, rates: RedisRates, blocks: Blocks) -> None:
        self._url, self._rates, self._blocks, self._num_puts = url, rates, blocks, 0
        self.how = f"{rates.how} over the same Unix socket, {PIPELINE} connections"

    @classmethod
    @contextmanager
    def open(cls, blocks: Blocks) -> Iterator[RedisMedium]:
        num_keys = max(1, len(blocks.names) // PIPELINE) * PIPELINE  # as many values as we load
        with (
            tempfile.TemporaryDirectory(prefix="pgt-", dir="/tmp") as folder,  # short: socket paths have a limit
            join_embedded(Path(folder), 4 * blocks.nbytes, linger_s=0.0) as server,
        ):
            yield cls(server.url, RedisRates(server.socket_path, blocks.payload_bytes, num_keys), blocks)

    def put(self) -> float:
        self._empty()
        self._num_puts += 1
        self._blocks = self._blocks.renamed(self._num_puts)
        with store_over(RedisTier(self._url, DOMAIN), self._blocks.payload_bytes) as store:
            return put_rate(store, self._blocks)

    def load(self) -> float:
        self._empty()
        with store_over(RedisTier(self._url, DOMAIN), self._blocks.payload_bytes) as store:
            put_rate(store, self._blocks)
            return load_rate(store, self._blocks)

    def limit_put(self) -> float:
        self._empty()
        return self._rates.set_new(len(self._blocks.names))

    def limit_load(self) -> float:
        self._empty()
        self._rates.set(0.0)
        return self._rates.get(TOOL_S)

    def _empty(self) -> None:
        with redis.Redis.from_url(self._url) as client:
            client.flushall()


class HostMedium:
    """The host tier, its arena touched before, against copies by as many threads as there are cores."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks, self._num_puts = blocks, 0
        copier = StreamingCopier(Library(library_path(kernels_dir())))
        self._store = store_over(
            HostTier(2 * blocks.nbytes + 2 * SLAB_BYTES, copier=copier), blocks.payload_bytes
        )  # half can be pinned
        self._program = LimitsProgram(kernels_dir())
        self.how = f"copies by {num_cores()} threads, each byte counted once"

    @classmethod
    @contextmanager
    def open(cls, blocks: Blocks) -> Iterator[HostMedium]:
        medium = cls(blocks)
        with medium._store:
            medium.put()
            yield medium

    def put(self) -> float:
        self._num_puts += 1
        self._blocks = self._blocks.renamed(self._num_puts)
        return put_rate(self._store, self._blocks)

    def load(self) -> float:
        return load_rate(self._store, self._blocks)

    def limit_put(self) -> float:
        return self._program.copy(Clock(num_cores(), TOOL_S))[0]

    def limit_load(self) -> float:
        return self.limit_put()
