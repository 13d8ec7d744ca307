"""The Redis tier over a network and a server that fail, single-threaded and by seed: what it says is true, and on time.

A seed that fails is printed by pytest as the test's parameter and replays exactly.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Sequence

import pytest

from pagetier.kvstore.block import BlockName, BlockStatus
from pagetier.kvstore.config import StoreLimits
from pagetier.kvstore.errors import TierUnavailable
from pagetier.kvstore.executor import SeededExecutor
from pagetier.kvstore.job import LoadDone, LookupDone
from pagetier.kvstore.redis.faults import FaultSockets, FaultStream, SocketFault, SocketFaults
from pagetier.kvstore.redis.simulated import ERROR_REPLIES, SimulatedRedis, SimulatedSockets, seeded_refusals
from pagetier.kvstore.redis.sockets import PlainStream
from pagetier.kvstore.redis.tier import HOUSEKEEPING_S, RedisTier
from pagetier.kvstore.store import TieredStore
from pagetier.kvstore.tier import BlockRead, BlockWrite
from tests.kvstore.rig import Clock
from tests.kvstore.tier_contract import DOMAIN, PART, addresses, chain, payload_of

OK, MISS, CORRUPT, EXISTS = BlockStatus.OK, BlockStatus.MISS, BlockStatus.CORRUPT, BlockStatus.EXISTS
ERROR, TIMEOUT, DROPPED = BlockStatus.ERROR, BlockStatus.TIMEOUT, BlockStatus.DROPPED
BUDGET_S = 0.5
PAYLOAD_BYTES = 600  # of it a byte may arrive in a buffer, another in place


class World:
    """A tier over faulty sockets to a simulated server, and a clock that moves when somebody waits."""

    def __init__(self, seed: int = 0, *, maxmemory: int = 0, policy: str = "allkeys-lru", ttl_s: float = 60.0):
        self.clock, self.faults = Clock(), SocketFaults(rng=random.Random(seed))
        self.server = SimulatedRedis(self.clock, maxmemory=maxmemory, policy=policy, seed=seed)
        sockets = SimulatedSockets({"simulated:1": self.server}, self.clock, self.clock.sleep)
        self.tier = RedisTier(
            "redis://simulated:1",
            DOMAIN,
            ttl_s=ttl_s,
            max_pipeline_bytes=4 * PAYLOAD_BYTES,
            refresh_interval_s=1.0,
            sockets=FaultSockets(sockets, self.faults),
        )

    def on_time(self, call: Callable[[float], object], budget_s: float = BUDGET_S) -> object:
        """`call`, which must not take longer than it may."""
        deadline_s = self.clock() + budget_s
        answer = call(deadline_s)
        assert self.clock() <= deadline_s + 1e-6, "later than its deadline"
        self.tier.check()
        return answer

    def put(self, names: Sequence[BlockName]) -> list[BlockStatus]:
        writes = [BlockWrite(name, PART, memoryview(payload(name))) for name in names]
        statuses = self.on_time(lambda deadline_s: self.tier.put(writes, deadline_s))
        assert isinstance(statuses, list) and len(statuses) == len(names)
        return statuses

    def get(self, names: Sequence[BlockName]) -> list[BlockStatus]:
        """Every block that is said to be there holds its own bytes."""
        buffers = [bytearray(PAYLOAD_BYTES) for _ in names]
        reads = [BlockRead(name, PART, memoryview(buffer)) for name, buffer in zip(names, buffers, strict=True)]
        statuses = self.on_time(lambda deadline_s: self.tier.get(reads, deadline_s))
        assert isinstance(statuses, list) and len(statuses) == len(names)
        for name, status, buffer in zip(names, statuses, buffers, strict=True):
            assert status is not OK or bytes(buffer) == payload(name), f"wrong bytes at {name.position}"
        return statuses

    def lookup(self, names: Sequence[BlockName]) -> int:
        """-1: no answer."""

        def ask(deadline_s: float) -> int:
            try:
                return self.tier.lookup(addresses(names), deadline_s)
            except TierUnavailable:
                return -1

        count = self.on_time(ask)
        assert isinstance(count, int) and count <= len(names)
        return count

    def touch(self, names: Sequence[BlockName]) -> None:
        self.on_time(lambda deadline_s: self.tier.touch(addresses(names)), HOUSEKEEPING_S)


def payload(name: BlockName) -> bytes:
    return payload_of(name, PART, PAYLOAD_BYTES)


# -- everything at once ------------------------------------------------------------------------------------------------


def befall(world: World, rng: random.Random) -> None:
    """Something happens to the server or the network."""
    server, faults = world.server, world.faults
    faults.rate = rng.choice((0.0, 0.0, 0.02, 0.2))
    faults.silent, faults.down = rng.random() < 0.05, rng.random() < 0.05
    server.refuse = seeded_refusals(rng, rng.choice((0.0, 0.0, 0.05, 1.0)))
    server.latency_s = rng.choice((0.0, 0.0, 0.01, 0.3))
    if not server.is_running:
        server.start()
    happening = rng.randrange(8)
    if happening == 0:
        server.freeze()
    elif happening == 1:
        server.thaw()
    elif happening == 2:
        server.kill()
    elif happening == 3:
        server.data.evict(rng.randrange(1, 6))
    elif happening == 4:
        server.data.corrupt(rng)
    elif happening == 5:
        world.clock.sleep(rng.choice((0.1, 5.0, 59.0)))


def mend(world: World) -> None:
    world.faults.rate, world.faults.silent, world.faults.down = 0.0, False, False
    world.server.refuse, world.server.latency_s = (lambda command: None), 0.0
    world.server.thaw()
    if not world.server.is_running:
        world.server.start()


@pytest.mark.parametrize("seed", range(150))
def test_whatever_fails_no_wrong_bytes_and_no_call_is_late(seed: int) -> None:
    rng = random.Random(seed)
    world = World(seed, maxmemory=rng.choice((0, 20_000)), policy=rng.choice(("noeviction", "allkeys-lru")))
    chains = [chain(rng.randrange(1, 12), number) for number in range(4)]
    for _ in range(40):
        if rng.random() < 0.3:
            befall(world, rng)
        names = rng.choice(chains)
        rng.choice((world.put, world.get, world.lookup, world.touch))(names)
        world.server.data.check()
    mend(world)
    world.server.data.maxmemory = 0
    for names in chains:
        world.get(names)  # quarantines what is corrupt
        assert set(world.put(names)) <= {OK, EXISTS}
        world.get(names)
        assert set(world.put(names)) <= {OK, EXISTS}
        assert world.get(names) == [OK] * len(names)
        assert world.lookup(names) == len(names)
    world.tier.close()


def test_the_same_seed_is_the_same_run() -> None:
    def run() -> list[object]:
        world, rng, names = World(7), random.Random(7), chain(8)
        happened: list[object] = []
        for _ in range(60):
            befall(world, rng)
            happened += [world.put(names), world.get(names), world.lookup(names), world.clock(), world.faults.num_sends]
        world.tier.close()
        return [*happened, world.tier.counters(), world.tier.error_replies()]

    assert run() == run()


# -- each kind ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordinal", range(6))
@pytest.mark.parametrize("fault", [SocketFault.LATE, SocketFault.STALL])
def test_the_late_reply_is_never_the_next_answer(fault: SocketFault, ordinal: int) -> None:
    """Every receive of a get, a put and a lookup in turn times out; its bytes come afterwards."""
    first, second = chain(4, 1), chain(4, 2)
    for call in (World.put, World.get, World.lookup):
        world = World()
        world.put([*first, *second])
        world.faults.receives[world.faults.num_receives + ordinal] = fault
        call(world, first)
        world.faults.receives.clear()
        assert world.get(second) == [OK] * 4
        assert world.lookup(chain(4, 3)) == 0
        assert world.lookup(second) == 4
        assert world.put(first) == [EXISTS] * 4
        world.tier.close()


@pytest.mark.parametrize("seed", range(30))
def test_a_cut_or_garbled_reply_is_a_failure_and_the_next_call_is_sound(seed: int) -> None:
    names, rng = chain(5), random.Random(seed)
    for fault in (SocketFault.CUT, SocketFault.GARBAGE):
        world = World(seed)
        world.put(names)
        world.faults.receives[world.faults.num_receives + rng.randrange(8)] = fault
        world.get(names)
        world.put(names)
        world.faults.receives.clear()
        world.get(names)  # may have stored a garbled record
        world.put(names)
        assert world.get(names) == [OK] * 5
        world.tier.close()


@pytest.mark.parametrize("seed", range(30))
def test_a_cut_command_is_no_record(seed: int) -> None:
    names, world = chain(6), World(seed)
    world.faults.sends[world.faults.num_sends + seed % 4] = SocketFault.CUT
    statuses = world.put(names)
    assert ERROR in statuses and world.tier.counters().errors > 0
    stored = world.get(names)
    assert set(stored) <= {OK, MISS}, "a part of a record is visible"
    assert all(there is OK for there, said in zip(stored, statuses, strict=True) if said is OK)
    world.tier.close()


def test_a_refused_connection_is_an_error_at_once() -> None:
    world, names = World(), chain(3)
    world.faults.down = True
    assert world.put(names) == [ERROR] * 3 and world.get(names) == [ERROR] * 3 and world.lookup(names) == -1
    assert world.clock() == Clock()(), "nobody waited"
    world.faults.down = False
    assert world.put(names) == [OK] * 3
    world.tier.close()


def test_a_slow_network_is_waited_for_as_long_as_there_is_time() -> None:
    world, names = World(), chain(3)
    world.put(names)
    world.faults.delay_s = 0.01
    assert world.get(names) == [OK] * 3
    world.faults.delay_s = 1.0
    assert world.get(names) == [TIMEOUT] * 3
    world.tier.close()


# -- time and memory ---------------------------------------------------------------------------------------------------


def test_blocks_live_as_long_as_they_are_used() -> None:
    world, names = World(ttl_s=60.0), chain(4)
    world.put(names)
    for _ in range(5):
        world.clock.sleep(50.0)
        world.touch(names)
    assert world.get(names) == [OK] * 4
    world.clock.sleep(30.0)
    world.touch(names[:2])
    world.clock.sleep(31.0)
    assert world.lookup(names) == 2, "the tail was not used"
    assert world.get(names) == [OK, OK, MISS, MISS]
    world.tier.close()


def test_a_server_that_evicts_parents_shortens_chains_and_nothing_else() -> None:
    """allkeys-lru takes the coldest of a few samples: any block of a chain may go, its children stay."""
    holes = 0
    for seed in range(20):
        world, chains = World(seed, maxmemory=12_000), [chain(6, number) for number in range(6)]
        for names in chains:
            assert set(world.put(names)) == {OK}, seed
        for names in reversed(chains):
            statuses, count = world.get(names), world.lookup(names)
            assert set(statuses) <= {OK, MISS}, seed
            assert count == (statuses.index(MISS) if MISS in statuses else len(names)), seed
            holes += OK in statuses[count:]
            assert set(world.put(names)) <= {OK, EXISTS}, f"seed {seed}: missing parents are stored again"
        assert world.server.data.evictions > 0
        world.tier.close()
    assert holes, "no child outlived its parent: the test shows nothing"


@pytest.mark.parametrize("seed", range(10))
def test_a_full_server_drops_and_goes_on_serving(seed: int) -> None:
    world, names = World(seed, maxmemory=8_000, policy="noeviction"), chain(20, seed)
    statuses = world.put(names)
    num_stored = statuses.count(OK)
    assert statuses == [OK] * num_stored + [DROPPED] * (20 - num_stored) and 0 < num_stored < 20
    assert world.get(names) == [OK] * num_stored + [MISS] * (20 - num_stored)
    assert world.tier.error_replies()["OOM"] > 0
    world.tier.close()


# -- over real sockets -------------------------------------------------------------------------------------------------


def test_a_late_fault_leaves_the_bytes_in_the_socket() -> None:
    """What the wrapper does over a real stream, so that tests over it mean what they say."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        clock, faults = Clock(), SocketFaults(receives={0: SocketFault.LATE})
        stream, got = FaultStream(PlainStream(ours), faults, SimulatedSockets({}, clock, clock.sleep)), bytearray(5)
        theirs.sendall(b"reply")
        with pytest.raises(TimeoutError):
            stream.receive(memoryview(got), clock() + 1.0, whole=True)
        assert clock() == 1001.0 and not stream.is_quiet()
        assert stream.receive(memoryview(got), 1e12, whole=True) == 5 and got == b"reply"


# -- below the store ---------------------------------------------------------------------------------------------------


def test_a_frozen_server_does_not_hold_up_the_end() -> None:
    """Whatever is queued for it, puts and touches: who waits behind a call that got no answer is dropped."""
    world, names = World(), chain(200)
    clock = world.clock
    executor = SeededExecutor(3)
    store = TieredStore(
        [world.tier], part=PART, payload_bytes=PAYLOAD_BYTES, clock=clock, make_executor=executor.factory
    )
    world.server.freeze()
    for first in range(0, 200, 10):
        some = names[first : first + 10]
        store.submit_put(some, [memoryview(payload(name)) for name in some])
        store.touch(some)
        store.touch(some[:5])
    started_s = clock()
    store.close()
    assert clock() - started_s < 2 * StoreLimits().put_budget_s
    assert not executor.num_waiting


@pytest.mark.parametrize("code", sorted(ERROR_REPLIES))
def test_no_reply_to_a_read_gives_a_status_of_a_put(code: str) -> None:
    """OOM is a dropped put; to a read it says nothing that a server means, and is an error like others."""
    world, names = World(), chain(2)
    assert world.put(names) == [OK, OK]
    world.server.refuse = lambda command: ERROR_REPLIES[code] if command[0].upper() == b"GET" else None
    assert set(world.get(names)) <= {OK, MISS, CORRUPT, TIMEOUT, ERROR}


def test_a_tier_that_is_well_again_says_so_where_all_is_hits() -> None:
    """Nothing is left to be stored, so no put ever finds out that writes work, too."""
    world, names = World(), chain(8)
    clock, executor = world.clock, SeededExecutor.inline()
    world.put(names)
    store = TieredStore(
        [world.tier], part=PART, payload_bytes=PAYLOAD_BYTES, clock=clock, make_executor=executor.factory
    )
    world.server.refuse = lambda command: ERROR_REPLIES["NOAUTH"]
    for number in range(4):
        some = chain(1, seed=100 + number)
        store.submit_put(some, [memoryview(payload(some[0]))])
        store.poll()
    assert store.stats()["redis"]["breaker"] == "open"
    world.server.refuse = lambda command: None
    clock.sleep(2.0)
    ticket = store.submit_lookup(names)
    assert [done for done in store.poll() if isinstance(done, LookupDone)] == [LookupDone(ticket, ("redis",) * 8)]
    store.submit_load(ticket, names, [memoryview(bytearray(PAYLOAD_BYTES)) for _ in names])
    assert any(isinstance(done, LoadDone) and set(done.statuses) == {OK} for done in store.poll())
    assert store.stats()["redis"]["breaker"] == "closed"
    store.release(ticket)
    store.close()
