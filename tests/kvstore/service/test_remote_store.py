"""A store that is a service answers as one in this process does, by shared memory and by gRPC, and may come and go."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
import xxhash

from pagetier.kvstore.block import BlockStatus
from pagetier.kvstore.copier import Copy, PlainCopier
from pagetier.kvstore.events import EventKind
from pagetier.kvstore.job import LoadDone, LookupDone, PutDone
from pagetier.kvstore.service.messages import to_chains
from pagetier.proto import kvstore_pb2 as pb
from pagetier.proto.kvstore_pb2_grpc import KVStoreStub
from tests.kvstore.service.service_rig import (
    PAYLOAD_BYTES,
    TOKEN,
    Client,
    Service,
    identity,
    names_of,
    payload,
    service,
    until,
)

OK, EXISTS, MISS = BlockStatus.OK, BlockStatus.EXISTS, BlockStatus.MISS
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def shared() -> Iterator[Service]:
    with service(listen="127.0.0.1:0", token=TOKEN) as running:
        yield running


@pytest.fixture(params=["shared memory", "grpc"])
def client(shared: Service, request: pytest.FixtureRequest) -> Iterator[Client]:
    """Leaves nothing behind."""
    with Client(shared.address if request.param == "shared memory" else shared.tcp_address) as client:
        assert client.store.is_attached and client.store.tier_names == ("host", "nvme")
        yield client
        client.store.check()
        until(lambda: not client.store.has_work and client.store.counters()["tickets"] == 0)
    shared.until_idle()


def seeds(request: pytest.FixtureRequest) -> int:
    """A chain of each test's own."""
    return abs(hash(request.node.nodeid)) % 1000 + 1


def test_what_was_put_is_found_and_read_back(client: Client, request: pytest.FixtureRequest) -> None:
    names = names_of(40, seeds(request))
    assert client.found(names) == ()
    assert client.put(names) == (OK,) * 40
    assert client.put(names) == (EXISTS,) * 40
    assert client.hit(names) == ("host",) * 40


def test_a_hit_may_be_loaded_in_pieces_and_any_order(client: Client, request: pytest.FixtureRequest) -> None:
    names = names_of(24, seeds(request))
    client.put(names)
    ticket, tiers = client.lookup([*names, *names_of(3, 5)])
    assert len(tiers) == 24
    assert client.load(ticket, names[16:]).statuses == (OK,) * 8
    assert client.load(ticket, names[3::-1]).statuses == (OK,) * 4
    client.store.release(ticket)


def test_more_than_the_window_goes_through_it(client: Client, request: pytest.FixtureRequest) -> None:
    names = names_of(300, seeds(request))  # 4.7 MiB; a session may have 1 MiB at once
    statuses = client.put(names)
    assert set(statuses) <= {OK, EXISTS}
    served = client.hit(names)
    assert set(served) == {"host", "nvme"} or set(served) == {"host"}


def test_blocks_of_a_slower_tier_come_through_the_window(shared: Service, request: pytest.FixtureRequest) -> None:
    names = names_of(64, seeds(request))
    with Client(shared.address) as client, shared.client() as admin:
        client.put(names)
        admin.purge(keys=[name.key for name in names], tiers=["host"])
        assert client.hit(names) == ("nvme",) * 64
    shared.until_idle()


def test_a_ticket_that_is_released_before_its_answer_leaves_nothing(client: Client) -> None:
    names = names_of(50, 3)
    for _ in range(20):
        client.store.release(client.store.submit_lookup(names))


def test_what_is_not_a_hit_is_a_miss(client: Client, request: pytest.FixtureRequest) -> None:
    names = names_of(6, seeds(request))
    client.put(names[:3])
    ticket, tiers = client.lookup(names)
    assert len(tiers) == 3
    done = client.load(ticket, names)
    assert set(done.statuses) <= {MISS, BlockStatus.ERROR}
    client.store.release(ticket)


def test_former_weights_stay_apart_and_their_puts_land(client: Client, request: pytest.FixtureRequest) -> None:
    old, new = names_of(8, seeds(request)), names_of(8, seeds(request), model="newer")
    job = client.store.submit_put(old, [memoryview(payload(name)) for name in old])
    client.store.set_identity(identity("newer"))
    assert client.wait(PutDone, job).statuses == (OK,) * 8
    until(lambda: client.store.is_attached)
    assert client.found(new) == ()
    assert client.put(new) == (OK,) * 8
    assert client.hit(new) == ("host",) * 8
    client.store.set_identity(identity())
    until(lambda: client.store.is_attached)
    assert client.hit(old) == ("host",) * 8


def test_three_models_in_one_store_do_not_mix(shared: Service) -> None:
    models = ("one", "two", "three")
    with Client(shared.address, "one") as a, Client(shared.address, "two") as b, Client(shared.address, "three") as c:
        clients = dict(zip(models, (a, b, c), strict=True))
        for model, client in clients.items():
            assert client.put(names_of(10, 77, model)) == (OK,) * 10
        for model, client in clients.items():
            assert client.hit(names_of(10, 77, model)) == ("host",) * 10
            for other in set(models) - {model}:
                ticket, tiers = client.lookup(names_of(10, 77, other))
                assert set(client.load(ticket, names_of(10, 77, other)[: len(tiers)]).statuses) <= {OK}
                client.store.release(ticket)
    with shared.client(identity("two").domain()) as admin:
        assert admin.purge().removed["host"] == 10
        assert not any(info.tiers for info in admin.query([name.key for name in names_of(10, 77, "two")]))
    with shared.client(identity("one").domain()) as admin:
        assert all(info.tiers for info in admin.query([name.key for name in names_of(10, 77, "one")]))
    shared.until_idle()


def test_a_block_that_arrives_damaged_is_recomputed_and_taken_out(
    shared: Service, request: pytest.FixtureRequest
) -> None:
    names = names_of(8, seeds(request))

    class Damaging(PlainCopier):
        def copy(self, copies: Sequence[Copy]) -> list[bytes]:
            digests = super().copy(copies)
            for i, (source, destination) in enumerate(copies):
                if is_loading and bytes(source[:64]) == payload(names[5])[:64]:
                    destination[0] ^= 1
                    digests[i] = xxhash.xxh3_128_digest(destination)
            return digests

    is_loading = False
    with Client(shared.address, copier=Damaging()) as client:
        client.put(names)
        is_loading = True
        ticket, _ = client.lookup(names)
        done = client.load(ticket, names)
        assert done.statuses == (*[OK] * 5, BlockStatus.CORRUPT, OK, OK)
        client.store.release(ticket)
        until(lambda: len(client.found(names)) == 5)
    shared.until_idle()


def test_the_services_events_are_an_engines_while_it_follows(shared: Service) -> None:
    names, log = names_of(6, 81), shared.server.tiers.watch.events  # type: ignore[union-attr]
    with Client(shared.address) as client, Client(shared.address, "gemma") as other:
        client.put(names_of(3, 80))
        assert client.store.events.next_seq == 0, "nobody follows"
        client.store.events.follow(True)
        until(lambda: bool(log._listeners))
        other.put(names_of(4, 81, "gemma"))
        client.put(names)
        wanted = {(tier, name.key) for tier in ("host", "nvme") for name in names}
        until(lambda: {(e.medium, key) for e in client.store.events.since(0).events for key in e.keys} >= wanted)
        stored = [event for event in client.store.events.since(0).events if event.kind is EventKind.STORED]
        assert {event.domain for event in stored} == {identity().domain()}, "another model's are not told"
        client.store.events.follow(False)
        until(lambda: not log._listeners)
    shared.until_idle()


@pytest.mark.parametrize("transport", ["shared", "grpc"])
def test_what_is_under_way_when_a_session_is_lost_is_answered(transport: str) -> None:
    with service(token=TOKEN, listen="127.0.0.1:0") as running:
        address = running.address if transport == "shared" else running.tcp_address
        with Client(address) as client:
            names, more = names_of(9, 83), names_of(5, 84)
            client.put(names)
            ticket, _ = client.lookup(names)
            attached = client.store._current.attached
            assert attached is not None
            gate = threading.Event()
            running.loop.call_soon_threadsafe(gate.wait)  # the service is silent for a while
            store, buffers = client.store, [memoryview(bytearray(PAYLOAD_BYTES)) for _ in names]
            load, lookup = store.submit_load(ticket, names, buffers), store.submit_lookup(names)
            put = store.submit_put(more, [memoryview(payload(name)) for name in more])
            until(lambda: store.counters()["open"] == 3)
            store._loop.call_soon_threadsafe(attached.lost.set)
            done = client.wait(LoadDone, load), client.wait(PutDone, put)
            assert {status for one in done for status in one.statuses} == {BlockStatus.ERROR}
            assert client.wait(LookupDone, lookup).tiers == ()
            gate.set()
            until(lambda: client.store.is_attached)
            assert set(client.hit(names)) == {"host"}
            for number in (ticket, lookup):
                store.release(number)
        running.until_idle()


def test_what_is_lent_counts_as_used_again(shared: Service) -> None:
    names = names_of(6, 91)
    with Client(shared.address) as client:
        client.put(names)

        def gaps() -> int:
            tiers = client.store.admin.stats()["domains"][0]["tiers"]  # type: ignore[attr-defined]
            return sum(tiers["host"]["residency"]["reuse_gap"]["counts"])

        before = gaps()
        assert set(client.hit(names)) == {"host"}
        with shared.client(identity().domain()) as asking:
            asking.query([names[0].key])  # what waits to be entered is entered
        assert gaps() == before + 6
    shared.until_idle()


def test_events_go_on_when_the_service_was_restarted() -> None:
    with service() as running, Client(running.address) as client:
        client.store.events.follow(True)
        until(lambda: bool(running.server.tiers and running.server.tiers.watch.events._listeners))
        running.stop()
        running.start()
        until(lambda: bool(running.server.tiers and running.server.tiers.watch.events._listeners))
        until(lambda: client.store.is_attached)
        client.put(names_of(2, 82))
        until(lambda: client.store.events.next_seq > 0)


def test_what_a_client_has_ended_is_lent_no_more(shared: Service) -> None:
    names = names_of(40, 71)
    with Client(shared.address) as client, grpc.insecure_channel(shared.address.target) as channel:
        client.put(names)
        attached, stub = client.store._current.attached, KVStoreStub(channel)
        assert attached is not None and attached.memory is not None
        (chain,) = to_chains(names)
        found = stub.Lookup(pb.LookupRequest(session=attached.session, chain=chain), metadata=shared.address.metadata)
        client.store._loop.call_soon_threadsafe(lambda: attached.memory.give_back(jobs=[1 << 40]))
        (session,) = shared.server.sessions._sessions.values()
        until(lambda: session.holder.has_ended(1 << 40))
        request = pb.LoadRequest(
            session=attached.session, ticket=found.ticket, blocks=range(40), shared=True, job=1 << 40
        )
        assert not list(stub.Load(request, metadata=shared.address.metadata))
        assert shared.counts()["leases"] == 0
    shared.until_idle()


KILLED = """
    import os, sys, time
    from tests.kvstore.service.service_rig import *
    client = Client(parse_address(sys.argv[1], TOKEN))
    names = names_of(60, 500)
    client.put(names)
    print("ready", flush=True)
    while True:
        client.store.submit_put(names_of(40, int(time.time() * 1e6) % 99991), [memoryview(bytes(PAYLOAD_BYTES))] * 40)
        ticket = client.store.submit_lookup(names)
        done = client.wait(LookupDone, ticket)
        buffers = [memoryview(bytearray(PAYLOAD_BYTES)) for _ in done.tiers]
        client.store.submit_load(ticket, names[: len(done.tiers)], buffers)
        client.store.poll()
        time.sleep(0.003)
"""


def killed_client(address: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", textwrap.dedent(KILLED), address]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_a_client_that_is_killed_leaves_no_lease_and_no_pin(shared: Service) -> None:
    process = killed_client(shared.address.text)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        until(lambda: shared.counts()["leases"] > 0)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    shared.until_idle()
    with Client(shared.address) as client:
        assert set(client.hit(names_of(60, 500))) == {"host"}
    shared.until_idle()


@pytest.mark.parametrize("transport", ["shared memory", "grpc"])
def test_a_service_that_goes_away_costs_hits_and_comes_back(transport: str) -> None:
    with service(listen="127.0.0.1:0", token=TOKEN) as running:
        port = running.server.port
        names = names_of(12)
        with Client(running.address if transport == "shared memory" else running.tcp_address) as client:
            client.put(names)
            ticket, tiers = client.lookup(names)
            assert len(tiers) == 12
            returns = client.store.num_returns
            running.stop()
            done = client.load(ticket, names)
            assert set(done.statuses) <= {BlockStatus.ERROR, BlockStatus.TIMEOUT} and done.quiesced
            client.store.release(ticket)
            until(lambda: not client.store.is_attached)
            assert client.found(names) == ()
            assert set(client.put(names)) == {BlockStatus.DROPPED}
            assert {tier["breaker"] for tier in client.store.stats().values()} == {"open"}
            object.__setattr__(running.config, "listen", f"127.0.0.1:{port}")
            running.start()
            until(lambda: client.store.is_attached)
            assert client.store.num_returns > returns
            assert client.hit(names) == ("nvme",) * 12
        running.until_idle()


def test_an_engine_may_start_before_its_store(tmp_path: Path) -> None:
    with service() as running:
        running.stop()
        with Client(running.address, start_wait_s=0.05) as client:
            assert not client.store.is_attached and client.store.tier_names == ()
            assert client.found(names_of(3)) == ()
            running.start()
            until(lambda: client.store.is_attached)
            assert client.put(names_of(3)) == (OK,) * 3


def test_a_silent_service_is_not_waited_for_beyond_the_budget(shared: Service) -> None:
    with Client(shared.address, load_budget_s=0.2) as client:
        names = names_of(5, 900)
        client.put(names)
        ticket, tiers = client.lookup(names)
        assert len(tiers) == 5
        held: list[bool] = []

        async def hold() -> None:
            time.sleep(1.5)  # noqa: ASYNC251 - the service's only loop answers nobody
            held.append(True)

        waiting = asyncio.run_coroutine_threadsafe(hold(), shared.loop)
        buffers = [memoryview(bytearray(PAYLOAD_BYTES)) for _ in names]
        job = client.store.submit_load(ticket, names, buffers)
        done = client.wait(LoadDone, job)
        assert not held, "the answer came first"
        assert set(done.statuses) == {BlockStatus.TIMEOUT}
        waiting.result()
        client.store.release(ticket)
    shared.until_idle()
