"""A store service in a thread, its clients, and blocks whose bytes follow from their names."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pagetier.kvstore.block import BlockName, BlockStatus, KVGroup, Part, Plane
from pagetier.kvstore.config import MIB, StoreConfig, StoreLimits
from pagetier.kvstore.identity import CacheIdentity
from pagetier.kvstore.job import Completion, LoadDone, LookupDone, PutDone
from pagetier.kvstore.keys import chain_names, root_key
from pagetier.kvstore.service.address import StoreAddress, parse_address
from pagetier.kvstore.service.client import StoreClient
from pagetier.kvstore.service.remote_store import RemoteStore
from pagetier.kvstore.service.server import ServiceConfig, StoreServer
from tests.kvstore.tier_contract import payload_of
from tests.kvstore.valkey import short_dir

BLOCK_SIZE = 4
PART = Part(0, 0, 2, 0, 1)
PAYLOAD_BYTES = 16 << 10
PATIENCE_S = 30.0
TOKEN = "a token of the tests' own"
C = TypeVar("C", LookupDone, LoadDone, PutDone)


def identity(model: str = "llama") -> CacheIdentity:
    """One of several models, with equal shapes."""
    nbytes = PAYLOAD_BYTES // BLOCK_SIZE
    planes = tuple(Plane(name, "float32", (1, nbytes // 16)) for name in ("k", "v"))
    return CacheIdentity(
        architecture=model,
        attention=(("num_heads", 1), ("num_kv_heads", 1)),
        groups=(KVGroup((0, 1), planes, None, nbytes),),
        layout="layer-plane-head-token-dim",
        block_size=BLOCK_SIZE,
        weights_fingerprint=model.encode().hex(),
    )


def names_of(num_blocks: int, seed: int = 0, model: str = "llama", salt: bytes = b"") -> list[BlockName]:
    first = seed * 1_000_003
    tokens = [(first + i * 7919) % 50_000 for i in range(num_blocks * BLOCK_SIZE)]
    return chain_names(root_key(identity(model).domain(), salt), tokens, BLOCK_SIZE)


def payload(name: BlockName) -> bytes:
    return payload_of(name, PART, PAYLOAD_BYTES)


class Service:
    """A service over tiers in a folder of its own, on a thread of its own. `stop` and `start` make a restart."""

    def __init__(self, folder: Path, *, tiers: Sequence[str] = ("host", "nvme"), **options: Any) -> None:
        self.folder = folder
        self.store = StoreConfig(
            tiers=tuple(tiers),
            host_size=8 * MIB if "host" in tiers else 0,
            nvme_path=folder / "nvme",
            nvme_size=64 * MIB,
            nvme_fsync="none",
            nvme_allow_unsafe=True,
            pins_path=folder / "pins",
            **options.pop("store", {}),
        )
        self.config = ServiceConfig(
            store=self.store, socket=folder / "s", **{"window_bytes": 4 * MIB, "shutdown_timeout_s": 5.0, **options}
        )
        self.start()

    @property
    def address(self) -> StoreAddress:
        return parse_address(f"unix://{self.folder}/s", self.config.token)

    @property
    def tcp_address(self) -> StoreAddress:
        return parse_address(f"grpc://127.0.0.1:{self.server.port}", self.config.token)

    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = StoreServer(self.config)
        self.run(self.server.start())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """On the service's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def stop(self) -> None:
        """In order. Idempotent."""
        if self.thread.is_alive():
            self.run(self.server.stop())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()

    def client(self, domain: bytes = b"") -> StoreClient:
        return StoreClient(self.address, domain)

    def counts(self) -> dict[str, int]:
        """What the service has under way."""
        with self.client() as client:
            counts: dict[str, int] = client.stats()["service"]
            return counts

    def until_idle(self) -> None:
        """Wait until no session, ticket or lease is left; then everything has to be in order."""
        until(lambda: not any(self.counts()[name] for name in ("sessions", "tickets", "leases", "window_bytes")))
        self.check()

    def check(self) -> None:
        async def check() -> None:
            assert self.server.window is not None and self.server.tiers is not None
            self.server.window.check()
            self.server.tiers.check()

        self.run(check())


@contextlib.contextmanager
def service(**options: Any) -> Iterator[Service]:
    """One in a new folder with a short path; ended and removed afterwards."""
    folder = short_dir()
    try:
        running = Service(folder, **options)
        try:
            yield running
        finally:
            running.stop()
    finally:
        shutil.rmtree(folder)


def until(is_so: Callable[[], bool], what: str = "") -> None:
    limit_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < limit_s, f"not within {PATIENCE_S} s: {what or is_so}"
        time.sleep(0.002)


class Client:
    """A RemoteStore and what it answered."""

    def __init__(self, address: StoreAddress, model: str = "llama", **options: Any) -> None:
        options = {"load_budget_s": 20.0, "limits": StoreLimits(put_budget_s=20.0), **options}  # machines are busy
        self.store = RemoteStore(address, identity(model), PART, PAYLOAD_BYTES, **options)
        self._seen: list[Completion] = []

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.store.close()

    def wait(self, kind: type[C], number: int) -> C:
        def found() -> C | None:
            self._seen += self.store.poll()
            for done in self._seen:
                own = done.ticket if isinstance(done, LookupDone) else done.job
                if isinstance(done, kind) and own == number:
                    return done
            return None

        until(lambda: found() is not None, f"{kind.__name__} {number}")
        done = found()
        assert done is not None
        return done

    def put(self, names: Sequence[BlockName]) -> tuple[BlockStatus, ...]:
        job = self.store.submit_put(names, [memoryview(payload(name)) for name in names])
        return self.wait(PutDone, job).statuses

    def lookup(self, names: Sequence[BlockName]) -> tuple[int, tuple[str, ...]]:
        ticket = self.store.submit_lookup(names)
        return ticket, self.wait(LookupDone, ticket).tiers

    def found(self, names: Sequence[BlockName]) -> tuple[str, ...]:
        """Where the hit is; nothing stays pinned."""
        ticket, tiers = self.lookup(names)
        self.store.release(ticket)
        return tiers

    def load(self, ticket: int, names: Sequence[BlockName]) -> LoadDone:
        """All that is said to be loaded holds its own bytes."""
        buffers = [bytearray(PAYLOAD_BYTES) for _ in names]
        job = self.store.submit_load(ticket, names, [memoryview(buffer) for buffer in buffers])
        done = self.wait(LoadDone, job)
        for name, buffer, status in zip(names, buffers, done.statuses, strict=True):
            assert status is not BlockStatus.OK or bytes(buffer) == payload(name), f"wrong bytes at {name.position}"
        return done

    def hit(self, names: Sequence[BlockName]) -> tuple[str | None, ...]:
        """Look up, load what was found, release: the tiers that served."""
        ticket, tiers = self.lookup(names)
        done = self.load(ticket, names[: len(tiers)])
        self.store.release(ticket)
        return done.tiers
