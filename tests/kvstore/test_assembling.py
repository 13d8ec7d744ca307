"""A rank's part comes from records of any other TP or PP degree, bytes identical, or not at all; on real tiers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagetier.kvstore.assembling import AssemblingTier
from pagetier.kvstore.block import Address, BlockName, BlockStatus, KVGroup, Part, Plane
from pagetier.kvstore.config import MIB, StoreConfig
from pagetier.kvstore.identity import CacheIdentity
from pagetier.kvstore.job import Completion, LoadDone, LookupDone, PutDone
from pagetier.kvstore.keys import chain_names, root_key
from pagetier.kvstore.memory import Fault, MemoryTier
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.parts import Division, PartLayout, divide
from pagetier.kvstore.redis.tier import RedisTier
from pagetier.kvstore.store import TieredStore, open_store
from pagetier.kvstore.tier import BlockRead, BlockWrite, Tier
from tests.kvstore.tier_contract import CAPACITY_BLOCKS, DOMAIN, PART, PAYLOAD_BYTES, TierContract, soon
from tests.kvstore.valkey import Valkey, valkey, valkey_server  # noqa: F401

OK, MISS, CORRUPT = BlockStatus.OK, BlockStatus.MISS, BlockStatus.CORRUPT
# A model of 8 heads over 4 KV heads of 16, 6 layers, bf16, blocks of 4 tokens.
NUM_LAYERS, NUM_KV_HEADS, RUN_BYTES, BLOCK_SIZE = 6, 4, 4 * 16 * 2, 4
PLANES = (Plane("k", "bfloat16", (NUM_KV_HEADS, 16)), Plane("v", "bfloat16", (NUM_KV_HEADS, 16)))
GROUP = KVGroup(tuple(range(NUM_LAYERS)), PLANES, None, NUM_LAYERS * 2 * NUM_KV_HEADS * 16 * 2)
IDENTITY = CacheIdentity("llama", (("num_heads", 8),), (GROUP,), "block-layer-plane-head-token-dim", 4, "f" * 64)
WHOLE = Part(0, 0, NUM_LAYERS, 0, NUM_KV_HEADS)
LAYOUT = PartLayout(2, RUN_BYTES)
NUM_BLOCKS = 7
NAMES = chain_names(root_key(IDENTITY.domain()), list(range(NUM_BLOCKS * BLOCK_SIZE)), BLOCK_SIZE)
KV = np.random.default_rng(4).integers(
    0, 256, (NUM_BLOCKS, NUM_LAYERS, 2, NUM_KV_HEADS, RUN_BYTES), dtype=np.uint8
)  # block, layer, plane, head, tokens x dims
DEGREES = [(1, 1), (1, 2), (1, 4), (2, 1), (3, 2), (4, 4)]  # stages, ranks


def bytes_of(block: int, part: Part) -> bytes:
    cut = KV[block, part.first_layer : part.end_layer, :, part.first_head : part.end_head]
    return np.ascontiguousarray(cut).tobytes()


def write(tier: Tier, part: Part, blocks: range = range(NUM_BLOCKS)) -> None:
    writes = [BlockWrite(NAMES[i], part, memoryview(bytes_of(i, part))) for i in blocks]
    assert tier.put(writes, soon()) == [OK] * len(blocks)


def read(tier: Tier, part: Part, names: list[BlockName] = NAMES) -> tuple[list[BlockStatus], list[bytearray]]:
    buffers = [bytearray(LAYOUT.nbytes(part)) for _ in names]
    reads = [BlockRead(name, part, memoryview(buffer)) for name, buffer in zip(names, buffers, strict=True)]
    return tier.get(reads, soon()), buffers


def found(tier: Tier, part: Part) -> int:
    return tier.lookup([Address(name.key, part) for name in NAMES], soon())


class TestAssemblingTier(TierContract):
    @pytest.fixture(params=["nvme", "memory"])
    def tier(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Tier]:
        inner: Tier = (
            NvmeTier(tmp_path, 8 << 20, DOMAIN) if request.param == "nvme" else MemoryTier(CAPACITY_BLOCKS << 13)
        )
        layout = PartLayout(2, PAYLOAD_BYTES // 4)
        tier = AssemblingTier(inner, PART, layout, [divide(PART, 2, 1)])
        yield tier
        tier.close()


@pytest.fixture(params=["nvme", "redis"])
def make_tier(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    valkey: Valkey,  # noqa: F811
) -> Iterator[Callable[[], Tier]]:
    """Opens a new tier over the same medium, as another rank or replica does."""
    opened: list[Tier] = []

    def make() -> Tier:
        if request.param == "nvme":
            opened.append(NvmeTier(tmp_path, 8 << 20, IDENTITY.domain(), refresh_s=0, fsync="none"))
        else:
            opened.append(RedisTier(valkey.url, IDENTITY.domain()))
        return opened[-1]

    yield make
    for tier in opened:
        tier.check()
        tier.close()


@pytest.mark.parametrize(("writers", "readers"), list(itertools.permutations(DEGREES, 2)))
def test_any_degree_reads_what_any_other_wrote(
    make_tier: Callable[[], Tier], writers: tuple[int, int], readers: tuple[int, int]
) -> None:
    written, inner = divide(WHOLE, *writers), make_tier()
    for part in written:
        write(inner, part)
    for part in divide(WHOLE, *readers):
        assert part in written or found(inner, part) == 0
        tier = AssemblingTier(make_tier(), part, LAYOUT, [divide(WHOLE, *degree) for degree in DEGREES])
        assert found(tier, part) == NUM_BLOCKS
        statuses, buffers = read(tier, part)
        assert statuses == [OK] * NUM_BLOCKS
        assert [bytes(buffer) for buffer in buffers] == [bytes_of(i, part) for i in range(NUM_BLOCKS)]


def test_a_block_is_a_hit_only_if_all_of_its_part_is_there(make_tier: Callable[[], Tier]) -> None:
    """Each piece in turn is missing of one block: whoever needs it hits up to there, the others all of it."""
    halves = divide(WHOLE, 1, 2)
    for lost, part in enumerate(halves):
        inner = make_tier()
        for other in halves:
            write(inner, other)
        inner.delete([Address(NAMES[4].key, part)])
        whole = AssemblingTier(inner, WHOLE, LAYOUT, [halves])
        assert found(whole, WHOLE) == 4
        statuses, _ = read(whole, WHOLE)
        assert statuses == [OK] * 4 + [MISS] + [OK] * 2
        for rank, quarter in enumerate(divide(WHOLE, 1, 4)):
            tier = AssemblingTier(inner, quarter, LAYOUT, [halves])
            assert found(tier, quarter) == (4 if rank // 2 == lost else NUM_BLOCKS)
        inner.delete([Address(name.key, half) for name in NAMES for half in halves])


def test_a_chain_may_be_of_several_degrees(make_tier: Callable[[], Tier]) -> None:
    """A replica that was restarted with another degree left the middle."""
    inner, halves, quarters = make_tier(), divide(WHOLE, 1, 2), divide(WHOLE, 1, 4)
    write(inner, WHOLE, range(2))
    for part in halves:
        write(inner, part, range(2, 4))
    for part in quarters:
        write(inner, part, range(4, 6))
    write(inner, WHOLE, range(6, 7))
    for part in (WHOLE, *halves, *quarters):
        tier = AssemblingTier(make_tier(), part, LAYOUT, [(WHOLE,), halves, quarters])
        assert found(tier, part) == NUM_BLOCKS
        statuses, buffers = read(tier, part)
        assert statuses == [OK] * NUM_BLOCKS
        assert [bytes(buffer) for buffer in buffers] == [bytes_of(i, part) for i in range(NUM_BLOCKS)]


def test_damaged_and_failing_pieces_are_not_used() -> None:
    halves = divide(WHOLE, 1, 2)
    for fault, status in ((Fault.CORRUPT, CORRUPT), (Fault.ERROR, BlockStatus.ERROR), (Fault.LOST, MISS)):
        inner = MemoryTier(1 << 20)
        for part in halves:
            write(inner, part)
        inner.faults.reads = {NUM_BLOCKS + 5: fault}  # after the whole ones, which are not there: block 2, second half
        statuses, buffers = read(AssemblingTier(inner, WHOLE, LAYOUT, [halves]), WHOLE)
        assert statuses == [OK, OK, status, *[OK] * (NUM_BLOCKS - 3)]
        right = [bytes(buffer) == bytes_of(i, WHOLE) for i, buffer in enumerate(buffers)]
        assert right == [True, True, False, *[True] * (NUM_BLOCKS - 3)]


def test_what_a_rank_may_not_assemble_from_is_no_hit() -> None:
    inner, halves = MemoryTier(1 << 20), divide(WHOLE, 1, 2)
    write(inner, halves[0])
    divisions: tuple[list[Division], ...] = ([], [halves], [halves[:1]])
    for sources in divisions:
        tier = AssemblingTier(inner, WHOLE, LAYOUT, sources)
        assert found(tier, WHOLE) == 0 and read(tier, WHOLE)[0] == [MISS] * NUM_BLOCKS


def answer(store: TieredStore, kind: type[Completion]) -> Any:
    limit_s = time.monotonic() + 20.0
    while time.monotonic() < limit_s:
        for completion in store.poll():
            assert isinstance(completion, kind)
            return completion
        time.sleep(0.001)
    raise AssertionError("no answer")


@pytest.mark.parametrize(
    ("writers", "readers"), [((1, 1), (1, 2)), ((1, 1), (2, 4)), ((1, 4), (1, 1)), ((2, 2), (1, 1))]
)
def test_stores_of_other_degrees_share_through_nvme_and_redis(
    tmp_path: Path,
    valkey: Valkey,  # noqa: F811
    writers: tuple[int, int],
    readers: tuple[int, int],
) -> None:
    config = StoreConfig(
        tiers=("nvme", "redis"), nvme_path=tmp_path, nvme_size=64 * MIB, redis_url=valkey.url, load_budget_s=10.0
    )
    for part in divide(WHOLE, *writers):
        with open_store(config, IDENTITY, part, LAYOUT.nbytes(part)) as store:
            store.submit_put(NAMES, [memoryview(bytes_of(i, part)) for i in range(NUM_BLOCKS)])
            assert answer(store, PutDone).statuses == (OK,) * NUM_BLOCKS
    for part, tiers in itertools.product(divide(WHOLE, *readers), (("nvme",), ("redis",))):
        other = StoreConfig(tiers=tiers, nvme_path=tmp_path, nvme_size=64 * MIB, redis_url=valkey.url)
        with open_store(other, IDENTITY, part, LAYOUT.nbytes(part), [divide(WHOLE, *writers)]) as store:
            ticket = store.submit_lookup(NAMES)
            assert answer(store, LookupDone).tiers == tiers * NUM_BLOCKS
            buffers = [bytearray(LAYOUT.nbytes(part)) for _ in NAMES]
            store.submit_load(ticket, NAMES, [memoryview(buffer) for buffer in buffers])
            assert answer(store, LoadDone).statuses == (OK,) * NUM_BLOCKS
            assert [bytes(buffer) for buffer in buffers] == [bytes_of(i, part) for i in range(NUM_BLOCKS)]
            store.release(ticket)
