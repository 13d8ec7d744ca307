"""open_store builds what the configuration names, and serves on without a tier that will not start."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagetier.kvstore.block import BlockName, BlockStatus, KVGroup, Part, Plane
from pagetier.kvstore.config import MIB, StoreConfig
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.identity import CacheIdentity
from pagetier.kvstore.job import Completion, LookupDone, PutDone
from pagetier.kvstore.keys import chain_names, root_key
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.store import TieredStore, open_store
from pagetier.kvstore.tier import BlockRead
from tests.kvstore.valkey import Valkey, valkey, valkey_server  # noqa: F401

PART = Part(0, 0, 2, 0, 1)
PAYLOAD_BYTES = 8192
ROOT = Path(__file__).resolve().parents[2]
IDENTITY = CacheIdentity(
    hash_name="sha256",
    architecture="llama",
    attention=(("num_heads", 1), ("rope_theta", 1e4)),
    groups=(KVGroup((0, 1), (Plane("k", "float32", (1, 64)), Plane("v", "float32", (1, 64))), None, 1024),),
    layout="layer-plane-head-token-dim",
    block_size=8,
    weights_fingerprint="00" * 32,
    weights_version="1",
    numerics=(("weights", "float32"),),
    kv_format="none",
    lora_digest="",
)
NVME: dict[str, Any] = {"nvme_size": 512 * MIB, "nvme_allow_unsafe": True}  # the tests' folder may lie in memory
NAMES = chain_names(root_key(IDENTITY.domain()), list(range(32)), 8)


def answer(store: TieredStore) -> Completion:
    limit_s = time.monotonic() + 20.0
    while time.monotonic() < limit_s:
        if done := store.poll():
            return done[0]
        time.sleep(0.001)
    raise AssertionError("no answer")


def put_all(store: TieredStore) -> None:
    job = store.submit_put(NAMES, [memoryview(bytes([i]) * PAYLOAD_BYTES) for i in range(4)])
    assert answer(store) == PutDone(job, (BlockStatus.OK,) * 4)


def test_host_and_nvme_serve_and_nvme_survives_a_restart(tmp_path: Path) -> None:
    config = StoreConfig(
        tiers=("nvme",), host_size=4 * MIB, nvme_path=tmp_path, nvme_size=512 * MIB, nvme_allow_unsafe=True
    )
    with open_store(config, IDENTITY, PART, PAYLOAD_BYTES) as store:
        assert list(store.stats()) == ["host", "nvme"]
        put_all(store)
        assert store.flush(5.0)
    with open_store(config, IDENTITY, PART, PAYLOAD_BYTES) as store:
        ticket = store.submit_lookup(NAMES)
        assert store.poll() == [LookupDone(ticket, ("nvme",) * 4)]
        buffers = [bytearray(PAYLOAD_BYTES) for _ in NAMES]
        store.submit_load(ticket, NAMES, [memoryview(buffer) for buffer in buffers])
        done = answer(store)
        assert getattr(done, "statuses", None) == (BlockStatus.OK,) * 4
        assert buffers == [bytearray([i]) * PAYLOAD_BYTES for i in range(4)]
        store.release(ticket)


def test_the_store_serves_though_a_tier_cannot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And says so, in a line and in its stats, until the medium is there."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    config = StoreConfig(
        tiers=("nvme",), host_size=4 * MIB, nvme_path=loop, nvme_size=512 * MIB, nvme_allow_unsafe=True
    )
    with open_store(config, IDENTITY, PART, PAYLOAD_BYTES) as store:
        assert [store.stats()[name]["breaker"] for name in ("host", "nvme")] == ["closed", "open"]
        assert store.is_degraded
        assert len([r for r in caplog.records if "nvme" in r.getMessage().lower()]) == 1, "it is said once, aloud"
        put_all(store)
        ticket = store.submit_lookup(NAMES)
        assert answer(store) == LookupDone(ticket, ("host",) * 4)
        store.release(ticket)
        loop.unlink()
        store.submit_put([NAMES[0]], [memoryview(bytes(PAYLOAD_BYTES))])
        answer(store)
        assert store.stats()["nvme"]["breaker"] == "closed" and not store.is_degraded


def test_a_path_that_can_never_work_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file", tmp_path / "file" / "kv"):
        config = StoreConfig(tiers=("nvme",), nvme_path=path, **NVME)
        with pytest.raises(ConfigError, match="--kv-nvme-path.*name another place"):
            open_store(config, IDENTITY, PART, PAYLOAD_BYTES)


def test_a_path_that_all_may_write_to_is_taken_only_when_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    config = StoreConfig(tiers=("nvme",), nvme_path=tmp_path, nvme_size=512 * MIB)
    with pytest.raises(ConfigError, match="everybody may write.*--kv-nvme-allow-unsafe"):
        open_store(config, IDENTITY, PART, PAYLOAD_BYTES)
    open_store(replace(config, nvme_allow_unsafe=True), IDENTITY, PART, PAYLOAD_BYTES).close()


def test_an_identity_is_put_beside_the_records(tmp_path: Path) -> None:
    config = StoreConfig(tiers=("nvme",), nvme_path=tmp_path, **NVME)
    with open_store(config, IDENTITY, PART, PAYLOAD_BYTES) as store:
        put_all(store)
        assert store.flush(5.0)
    tier = NvmeTier(tmp_path, 512 * MIB, IDENTITY.domain())
    assert tier.identities()[IDENTITY.domain()] == IDENTITY.encode()
    tier.close()


def test_a_secret_authenticates_what_is_stored(tmp_path: Path) -> None:
    """With another secret, or none, the records are damaged ones."""
    for name in ("ours", "theirs"):
        (tmp_path / name).write_text(f"a secret of {name}\n")
    config = StoreConfig(tiers=("nvme",), nvme_path=tmp_path / "nvme", nvme_size=512 * MIB)
    with open_store(replace(config, mac_key_file=tmp_path / "ours"), IDENTITY, PART, PAYLOAD_BYTES) as store:
        put_all(store)
        assert store.flush(5.0)
    for secret, expected in (("ours", BlockStatus.OK), ("theirs", BlockStatus.CORRUPT), (None, BlockStatus.MISS)):
        key_file = None if secret is None else tmp_path / secret
        with open_store(replace(config, mac_key_file=key_file), IDENTITY, PART, PAYLOAD_BYTES) as store:
            ticket = store.submit_lookup(NAMES)
            assert isinstance(answer(store), LookupDone)
            store.submit_load(ticket, NAMES, [memoryview(bytearray(PAYLOAD_BYTES)) for _ in NAMES])
            assert getattr(answer(store), "statuses", None) == (expected,) * 4, secret
            store.release(ticket)


def test_another_identity_finds_nothing_and_puts_under_way_land_under_the_former(tmp_path: Path) -> None:
    updated = replace(IDENTITY, weights_version="2")
    names = chain_names(root_key(updated.domain()), list(range(32)), 8)
    config = StoreConfig(tiers=("nvme",), nvme_path=tmp_path, nvme_size=512 * MIB)
    with open_store(config, IDENTITY, PART, PAYLOAD_BYTES) as store:
        store.submit_put(NAMES, [memoryview(bytes([i]) * PAYLOAD_BYTES) for i in range(4)])
        store.set_identity(updated)
        assert store.flush(5.0) and isinstance(answer(store), PutDone)
        ticket = store.submit_lookup(names)
        assert answer(store) == LookupDone(ticket, ())
        store.release(ticket)
        job = store.submit_put(names, [memoryview(bytes([i + 4]) * PAYLOAD_BYTES) for i in range(4)])
        assert answer(store) == PutDone(job, (BlockStatus.OK,) * 4)
        assert store.domain == updated.domain()
    for identity, blocks, first in ((IDENTITY, NAMES, 0), (updated, names, 4)):
        with NvmeTier(tmp_path, 512 * MIB, identity.domain()) as tier:
            assert tier.identities()[identity.domain()] == identity.encode()
            buffers = [bytearray(PAYLOAD_BYTES) for _ in blocks]
            reads = [BlockRead(name, PART, memoryview(b)) for name, b in zip(blocks, buffers, strict=True)]
            assert tier.get(reads, time.monotonic() + 20.0) == [BlockStatus.OK] * 4
            assert buffers == [bytearray([first + i]) * PAYLOAD_BYTES for i in range(4)]


SHARING = """
import sys
from pathlib import Path
from tests.kvstore.test_open_store import open_shared, put_all, read_all
path, redis_url, what = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
for tiers in [("nvme", "redis")] if what == "put" else [("nvme",), ("redis",)]:
    with open_shared(tiers, path, redis_url) as store:
        put_all(store) if what == "put" else read_all(store, tiers[0])
        assert store.flush(20.0)
"""


def open_shared(tiers: tuple[str, ...], path: Path, redis_url: str) -> TieredStore:
    config = StoreConfig(tiers=tiers, nvme_path=path, nvme_size=512 * MIB, redis_url=redis_url)
    return open_store(config, IDENTITY, PART, PAYLOAD_BYTES)


def read_all(store: TieredStore, tier: str) -> None:
    ticket = store.submit_lookup(NAMES)
    assert answer(store) == LookupDone(ticket, (tier,) * 4)
    buffers = [bytearray(PAYLOAD_BYTES) for _ in NAMES]
    store.submit_load(ticket, NAMES, [memoryview(buffer) for buffer in buffers])
    assert getattr(answer(store), "statuses", None) == (BlockStatus.OK,) * 4
    assert buffers == [bytearray([i]) * PAYLOAD_BYTES for i in range(4)]
    store.release(ticket)


def test_processes_of_different_hash_seeds_share_what_they_store(tmp_path: Path, valkey: Valkey) -> None:  # noqa: F811
    for seed, what in (("1", "put"), ("4242", "read")):
        command = [sys.executable, "-c", SHARING, str(tmp_path), valkey.url, what]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_blocks_of_a_former_identity_are_the_first_to_go(tier: str, tmp_path: Path) -> None:
    """Whatever was used last of them: as much as half of the tier put since is all there, and of them the most went."""
    size = 4 * MIB
    config = StoreConfig(tiers=(tier,), host_size=size if tier == "host" else 0, nvme_path=tmp_path, nvme_size=size)

    def chains(identity: CacheIdentity, first: int, count: int) -> list[list[BlockName]]:
        root = root_key(identity.domain())
        return [chain_names(root, [first + i] * 128, 8) for i in range(count)]  # 16 blocks of 8 KiB each

    def put(store: TieredStore, names: list[BlockName]) -> None:
        store.submit_put(names, [memoryview(bytes(PAYLOAD_BYTES))] * len(names))
        assert isinstance(answer(store), PutDone)

    def found(store: TieredStore, names: list[BlockName]) -> int:
        ticket = store.submit_lookup(names)
        done = answer(store)
        store.release(ticket)
        assert isinstance(done, LookupDone)
        return len(done.tiers)

    updated = replace(IDENTITY, weights_version="2")
    former, present = chains(IDENTITY, 0, 28), chains(updated, 0, 12)
    with open_store(config, IDENTITY, PART, PAYLOAD_BYTES) as store:
        for names in former:
            put(store, names)
        kept = sum(found(store, names) for names in former)
        for names in former:
            store.touch(names)
        store.set_identity(updated)
        for names in present:
            put(store, names)
        assert [found(store, names) for names in present] == [16] * 12
        assert sum(found(store, names) for names in former) < kept
