"""One client of the crowd, a process of its own: puts and loads until it is killed or its time is up.

Its blocks' bytes follow from their keys, so every load is checked byte by byte. Says what it did as one JSON line.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import TypeVar

import numpy as np

from pagetier.benchmarks.service.program import IDENTITY
from pagetier.benchmarks.tiers.blocks import PART, names_of
from pagetier.kvstore.block import BlockName, BlockStatus
from pagetier.kvstore.job import LoadDone, LookupDone, PutDone
from pagetier.kvstore.service.address import parse_address
from pagetier.kvstore.service.remote_store import RemoteStore

Done = TypeVar("Done", LookupDone, LoadDone, PutDone)
NUM_CHAINS, CHAIN_BLOCKS = 64, 24
PAYLOAD_BYTES = 64 << 10
ANSWER_S = 30.0


def payload(name: BlockName) -> np.ndarray:
    """A block's bytes: its key, over and over."""
    return np.tile(np.frombuffer(name.key, np.uint8), PAYLOAD_BYTES // 32)


def main(url: str, seconds: float, seed: int) -> None:
    rng = random.Random(seed)
    store = RemoteStore(parse_address(url), IDENTITY, PART, PAYLOAD_BYTES, load_budget_s=ANSWER_S)
    counts = {"loads": 0, "blocks": 0, "wrong": 0, "puts": 0}
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        names = names_of(CHAIN_BLOCKS, rng.randrange(NUM_CHAINS))
        if rng.random() < 0.4:
            wait(store, PutDone, store.submit_put(names, [payload(name).data for name in names]))
            counts["puts"] += 1
            continue
        ticket = store.submit_lookup(names)
        found = names[: len(wait(store, LookupDone, ticket).tiers)]
        buffers = [np.zeros(PAYLOAD_BYTES, np.uint8) for _ in found]
        done = wait(store, LoadDone, store.submit_load(ticket, found, [buffer.data for buffer in buffers]))
        store.release(ticket)
        for name, buffer, status in zip(found, buffers, done.statuses, strict=True):
            if status is BlockStatus.OK:
                counts["blocks"] += 1
                counts["wrong"] += not np.array_equal(buffer, payload(name))
        counts["loads"] += 1
    store.close()
    sys.stdout.write(json.dumps(counts) + "\n")


def wait(store: RemoteStore, kind: type[Done], number: int) -> Done:
    """The answer of that kind: one thing is asked at a time. Raises TimeoutError."""
    limit_s = time.monotonic() + ANSWER_S
    while time.monotonic() < limit_s:
        for done in store.poll():
            if isinstance(done, kind):
                return done
        time.sleep(0.0005)
    raise TimeoutError(f"no answer to {number}")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
