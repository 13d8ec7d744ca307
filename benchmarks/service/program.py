"""A `pagetier store` process to measure, and stores to reach it by. The service runs as a user starts it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pagetier.benchmarks.tiers.blocks import NEVER_S, PART
from pagetier.kvstore.block import KVGroup, Plane
from pagetier.kvstore.copier import Copier
from pagetier.kvstore.errors import PagetierError
from pagetier.kvstore.identity import CacheIdentity
from pagetier.kvstore.service.address import parse_address
from pagetier.kvstore.service.client import StoreClient
from pagetier.kvstore.service.remote_store import RemoteStore
from pagetier.kvstore.store import TieredStore

IDENTITY = CacheIdentity(
    architecture="bench",
    attention=(("num_kv_heads", 3),),
    groups=(KVGroup(tuple(range(30)), (Plane("k", "bfloat16", (3, 64)),), None, 360 << 6),),
    layout="bench",
    block_size=16,
    weights_fingerprint="00" * 32,
)
TOKEN = "a token for a benchmark"


@dataclass(frozen=True, slots=True)
class StoreProcess:
    """A running service. start_s: from the command to the line that it is ready."""

    folder: Path
    port: int
    start_s: float
    pid: int

    @property
    def shared_url(self) -> str:
        return f"unix://{self.folder}/s?token_file={self.folder}/token"

    @property
    def grpc_url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}?token_file={self.folder}/token"

    def remote(self, url: str, payload_bytes: int, copier: Copier | None = None) -> TieredStore:
        """A store over the service; it has the verbs that benchmarks use."""
        store = RemoteStore(parse_address(url), IDENTITY, PART, payload_bytes, load_budget_s=NEVER_S, copier=copier)
        if not store.is_attached:
            raise PagetierError("the store service was not reached")
        return cast(TieredStore, store)

    def counts(self) -> dict[str, int]:
        """What the service has under way."""
        with StoreClient(parse_address(self.shared_url)) as client:
            counts: dict[str, int] = client.stats()["service"]
            return counts

    def private_bytes(self) -> int:
        """Memory of the service beyond what is shared."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def store_process(*, tiers: str, host_size: str = "1GiB") -> Iterator[StoreProcess]:
    """Start `pagetier store` in a folder of its own; it is ended and the folder removed."""
    folder = Path(tempfile.mkdtemp(prefix="pgt-"))
    (folder / "token").write_text(TOKEN)
    command = [sys.executable, "-m", "pagetier.cli", "store", "--socket", str(folder / "s"), "--kv-tier", tiers]
    command += ["--kv-host-size", host_size, "--kv-nvme-path", str(folder / "nvme"), "--kv-nvme-size", "4GiB"]
    command += ["--kv-nvme-allow-unsafe", "--listen", "127.0.0.1:0", "--token-file", str(folder / "token")]
    environment = os.environ | {"PAGETIER_CACHE_DIR": str(folder)}
    try:
        begun_s = time.perf_counter()
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                line = process.stderr.readline()
                if "store ready at" not in line:
                    raise PagetierError(f"the store service did not start: {line.strip()}")
                start_s = time.perf_counter() - begun_s
                port = int(line.partition("127.0.0.1:")[2].partition(":")[0].split()[0])
                yield StoreProcess(folder, port, start_s, process.pid)
            finally:
                process.terminate()
                process.wait(20)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
