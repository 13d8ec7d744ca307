"""Mutated messages, over gRPC and over the lease socket: each is answered or refused, and nothing is left of any."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from itertools import islice

import grpc
import pytest

from pagetier.kvstore.service.messages import to_chain, to_chains, to_part
from pagetier.kvstore.service.server import SERVICE
from pagetier.proto import kvstore_pb2 as pb
from tests.kvstore.service.service_rig import PART, PAYLOAD_BYTES, Client, Service, identity, names_of, service

QUICK, ALL = 1_500, 100_000
STREAMED = {"Put"}
STREAMING = {"Attach", "Load", "Put", "Known", "Events"}
FAULTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}  # of the store's own


@pytest.fixture
def running() -> Iterator[Service]:
    with service() as running:
        yield running


def requests(session: bytes, ticket: int) -> dict[str, list[bytes]]:
    """Good requests of every rpc that mutations start from; what they hold of a session is a live one's."""
    names = names_of(5, 3)
    chain, chains, keys = to_chain(names), to_chains(names), [name.key for name in names]
    domain = identity().domain()
    attach = pb.AttachRequest(
        identity=identity().encode(), part=to_part(PART), payload_bytes=PAYLOAD_BYTES, client="m", shared=True
    )
    blocks = [pb.PutBlock(index=i, data=bytes(PAYLOAD_BYTES), checksum=bytes(16)) for i in range(2)]
    messages: dict[str, list[object]] = {
        "Attach": [attach],
        "Lookup": [pb.LookupRequest(session=session, chain=chain)],
        "Load": [pb.LoadRequest(session=session, ticket=ticket, blocks=[0, 1, 2])],
        "Put": [pb.PutRequest(session=session, offer=chains), pb.PutRequest(blocks=blocks)],
        "Touch": [pb.TouchRequest(session=session, chain=chain)],
        "Release": [pb.ReleaseRequest(session=session, tickets=[1 << 40])],
        "Quarantine": [pb.QuarantineRequest(session=session, chains=chains)],
        "Pin": [pb.PinRequest(domain=domain, chain=chain, ttl_s=1.0, tiers=["nvme"])],
        "Unpin": [pb.UnpinRequest(domain=domain, pins=[keys[0].hex()])],
        "Purge": [pb.PurgeRequest(domain=domain, keys=keys, tiers=["host"])],
        "Query": [pb.QueryRequest(domain=domain, keys=keys)],
        "Known": [pb.KnownRequest(domain=domain)],
        "Top": [pb.TopRequest(domain=domain, limit=5)],
        "Measure": [pb.MeasureRequest(domain=domain)],
        "Stats": [pb.StatsRequest()],
        "Identities": [pb.IdentitiesRequest()],
        "Events": [pb.EventsRequest(from_seq=3)],
    }
    return {
        name: [message.SerializeToString() for message in listed]  # type: ignore[attr-defined]
        for name, listed in messages.items()
    }


def mutated(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """A few bytes flipped, cut, doubled, invented, or taken from another message."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(6):
            case 0 if out:
                out[min(at, len(out) - 1)] ^= 1 << rng.randrange(8)
            case 1:
                del out[at : at + rng.randint(1, 40)]
            case 2:
                out[at:at] = rng.randbytes(rng.randint(1, 12))
            case 3:
                out[at:at] = out[at : at + rng.randint(1, 64)]
            case 4:
                other = rng.choice(others)
                out[at:] = other[rng.randrange(len(other) + 1) :]
            case _:
                out[at : at + 1] = bytes([0xFF] * rng.randint(1, 10))
    return bytes(out)


class Sender:
    """Raw bytes to any rpc."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._verbs: dict[str, object] = {}
        for name in (method.name for method in pb.DESCRIPTOR.services_by_name["KVStore"].methods):
            path = f"/{SERVICE}/{name}"
            if name in STREAMED:
                self._verbs[name] = channel.stream_stream(path)
            elif name in STREAMING:
                self._verbs[name] = channel.unary_stream(path)
            else:
                self._verbs[name] = channel.unary_unary(path)

    def send(self, name: str, messages: list[bytes]) -> grpc.StatusCode:
        """How the call ended; endless ones are ended by us."""
        verb = self._verbs[name]
        try:
            if name in STREAMED:
                list(islice(verb(iter(messages), timeout=5.0), 8))  # type: ignore[operator]
            elif name in STREAMING:
                call = verb(messages[0], timeout=0.3 if name in ("Attach", "Events") else 5.0)  # type: ignore[operator]
                list(islice(call, 1 if name in ("Attach", "Events") else 64))
                call.cancel()
            else:
                verb(messages[0], timeout=5.0)  # type: ignore[operator]
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            return error.code()
        return grpc.StatusCode.OK


def storm(running: Service, num_messages: int, seed: int) -> dict[grpc.StatusCode, int]:
    """That many mutated messages, many at once; how they were answered."""
    rng = random.Random(seed)
    counts: dict[grpc.StatusCode, int] = {}
    with Client(running.address) as client, grpc.insecure_channel(running.address.target) as channel:
        names = names_of(5, 3)
        client.put(names)
        sender, link = Sender(channel), client.store._current
        assert link.attached is not None
        for _ in range(num_messages):
            ticket = 0
            good = requests(link.attached.session, ticket)
            everything = [data for listed in good.values() for data in listed]
            name = rng.choice(list(good))
            messages = [mutated(rng, data, everything) if rng.random() < 0.8 else data for data in good[name]]
            code = sender.send(name, messages)
            counts[code] = counts.get(code, 0) + 1
            assert code not in FAULTS, f"{name} ended with {code}: {messages}"
    return counts


def check_alive(running: Service) -> None:
    running.until_idle()
    with Client(running.address) as client:
        names = names_of(9, 4)
        assert len(client.put(names)) == 9
        assert set(client.hit(names)) == {"host"}
    running.until_idle()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_mutated_messages_are_answered_or_refused(running: Service) -> None:
    counts = storm(running, QUICK, seed=1)
    assert counts[grpc.StatusCode.OK] > 0 and counts[grpc.StatusCode.INVALID_ARGUMENT] > 0
    check_alive(running)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_mutated_messages_leak_nothing(running: Service) -> None:
    storm(running, ALL // 10, seed=2)
    check_alive(running)
    before = resident_bytes()
    for round_ in range(9):
        storm(running, ALL // 10, seed=3 + round_)
    check_alive(running)
    assert resident_bytes() - before < 64 << 20


@pytest.mark.parametrize("num_packets", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_mutated_lease_packets_end_no_more_than_their_own_connection(running: Service, num_packets: int) -> None:
    rng = random.Random(5)
    path = str(running.folder / "s.leases")
    with Client(running.address) as client:
        names = names_of(5, 3)
        client.put(names)
        attached = client.store._current.attached
        assert attached is not None
        good = [
            pb.LeaseMessage(hello=attached.session).SerializeToString(),
            pb.LeaseMessage(hello=bytes(16)).SerializeToString(),
            pb.LeaseMessage(returned=[1, 2, 3], ended_jobs=[7]).SerializeToString(),
        ]
        for _ in range(num_packets):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.connect(path)  # waits for its turn
                connection.settimeout(5.0)
                try:
                    connection.send(mutated(rng, rng.choice(good), good))
                    connection.send(mutated(rng, good[2], good))
                except OSError:
                    continue  # cut off after the first one
        assert set(client.hit(names)) == {"host"}
    check_alive(running)
