"""The local connector moves pool blocks under their names, in both directions, with one copy."""

from __future__ import annotations

from collections.abc import Sequence

from pagetier.connectors.base import Connector
from pagetier.connectors.local import LocalConnector
from pagetier.kvstore.block import BlockName, BlockStatus
from pagetier.kvstore.executor import SeededExecutor
from pagetier.kvstore.job import Completion, LoadDone, LookupDone, PutDone
from pagetier.kvstore.store import TieredStore
from tests.kvstore.rig import PAYLOAD_BYTES, memory, payload
from tests.kvstore.tier_contract import PART, chain


class Pool:
    """A device pool of CPU bytes."""

    def __init__(self, num_blocks: int) -> None:
        self.bytes = bytearray(num_blocks * PAYLOAD_BYTES)

    def readable(self, block_id: int) -> memoryview:
        return self.writable(block_id).toreadonly()

    def writable(self, block_id: int) -> memoryview:
        return memoryview(self.bytes)[block_id * PAYLOAD_BYTES : (block_id + 1) * PAYLOAD_BYTES]

    def fill(self, block_ids: Sequence[int], names: Sequence[BlockName]) -> None:
        for block_id, name in zip(block_ids, names, strict=True):
            self.writable(block_id)[:] = payload(name)


def poll(connector: Connector) -> Completion:
    for _ in range(1000):
        if done := connector.poll():
            assert len(done) == 1
            return done[0]
    raise AssertionError("nothing was answered")


def test_blocks_go_out_and_come_back_elsewhere() -> None:
    pool, names = Pool(8), chain(3)
    store = TieredStore(
        [memory("nvme")], part=PART, payload_bytes=PAYLOAD_BYTES, make_executor=SeededExecutor.inline().factory
    )
    connector: Connector = LocalConnector(store, pool)
    pool.fill([5, 0, 7], names)
    job = connector.submit_save(names, [5, 0, 7])
    assert poll(connector) == PutDone(job, (BlockStatus.OK,) * 3)
    ticket = connector.submit_lookup(names)
    assert poll(connector) == LookupDone(ticket, ("nvme",) * 3)
    job = connector.submit_load(ticket, names[:2], [2, 3])
    assert poll(connector) == LoadDone(job, (BlockStatus.OK,) * 2, ("nvme",) * 2, True)
    assert bytes(pool.writable(2)) == payload(names[0]) and bytes(pool.writable(3)) == payload(names[1])
    connector.touch(names)
    connector.release(ticket)
    assert connector.stats()["nvme"]["blocks"] == 3
    assert connector.flush(1.0)
    connector.close()
    connector.close()
