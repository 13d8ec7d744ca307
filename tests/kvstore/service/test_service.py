"""The service over the wire: what may be asked, by whom, how large, how long; and what people ask."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import xxhash
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pagetier.kvstore.block import BlockStatus
from pagetier.kvstore.config import MIB
from pagetier.kvstore.errors import ConfigError, PagetierError
from pagetier.kvstore.events import EventKind
from pagetier.kvstore.service.address import parse_address, read_token
from pagetier.kvstore.service.client import StoreClient
from pagetier.kvstore.service.messages import to_chain, to_chains, to_part
from pagetier.kvstore.service.server import SERVICE, ServiceConfig, StoreServer
from pagetier.proto import kvstore_pb2 as pb
from pagetier.proto.kvstore_pb2_grpc import KVStoreStub
from tests.kvstore.service.service_rig import (
    PART,
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

AUTH = (("authorization", f"Bearer {TOKEN}"),)


@pytest.fixture(scope="module")
def running() -> Iterator[Service]:
    with service(listen="127.0.0.1:0", token=TOKEN) as running:
        yield running


@pytest.fixture
def stub(running: Service) -> Iterator[KVStoreStub]:
    with grpc.insecure_channel(running.address.target) as channel:
        yield KVStoreStub(channel)
    running.until_idle()


class Session:
    """A session over bare rpcs."""

    def __init__(self, stub: KVStoreStub, **changes: Any) -> None:
        fields = {"identity": identity().encode(), "part": to_part(PART), "payload_bytes": PAYLOAD_BYTES, **changes}
        self.call = stub.Attach(pb.AttachRequest(**fields), metadata=AUTH)
        self.first = next(iter(self.call))
        self.secret = self.first.session

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.call.cancel()


def code_of(call: Callable[[], Any]) -> grpc.StatusCode:
    """The status that a call is refused with."""
    with pytest.raises(grpc.RpcError) as refused:
        answer = call()
        if not hasattr(answer, "DESCRIPTOR"):
            list(answer)
    assert isinstance(refused.value, grpc.Call)
    assert len(refused.value.details() or "") < 500
    return refused.value.code()


INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
TOO_MUCH, DENIED = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAUTHENTICATED


def test_sockets_are_for_their_owner_alone(running: Service) -> None:
    for path in (running.folder / "s", running.folder / "s.leases"):
        found = path.stat()
        assert stat.S_ISSOCK(found.st_mode) and stat.S_IMODE(found.st_mode) & 0o077 == 0
        assert found.st_uid == os.geteuid()


def test_without_the_token_only_health_is_answered(running: Service) -> None:
    with grpc.insecure_channel(running.tcp_address.target) as channel:
        stub = KVStoreStub(channel)
        assert code_of(lambda: stub.Stats(pb.StatsRequest())) is DENIED
        wrong = (("authorization", "Bearer something else"),)
        assert code_of(lambda: stub.Stats(pb.StatsRequest(), metadata=wrong)) is DENIED
        assert code_of(lambda: stub.Attach(pb.AttachRequest())) is DENIED
        assert stub.Stats(pb.StatsRequest(), metadata=AUTH).stats_json
        health: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_names_the_service(running: Service) -> None:
    with grpc.insecure_channel(running.address.target) as channel:
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        answers = stub.ServerReflectionInfo(iter([asked]), metadata=AUTH)
        names = {service.name for service in next(iter(answers)).list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"identity": b"nonsense"}, INVALID),
        ({"identity": bytes(2 * MIB)}, TOO_MUCH),
        ({"part": pb.Part()}, INVALID),
        ({"payload_bytes": 0}, INVALID),
        ({"payload_bytes": 1 << 40}, INVALID),
        ({"payload_bytes": 5 * MIB}, TOO_MUCH),
    ],
)
def test_impossible_sessions_are_refused(stub: KVStoreStub, change: dict[str, Any], code: grpc.StatusCode) -> None:
    assert code_of(lambda: Session(stub, **change)) is code


def test_unknown_sessions_and_tickets_are_not_found(stub: KVStoreStub) -> None:
    chain = to_chain(names_of(2))
    for call in (
        lambda: stub.Lookup(pb.LookupRequest(session=b"x" * 16, chain=chain), metadata=AUTH),
        lambda: stub.Load(pb.LoadRequest(session=b"x" * 16), metadata=AUTH),
        lambda: stub.Put(iter([pb.PutRequest(session=b"")]), metadata=AUTH),
        lambda: stub.Touch(pb.TouchRequest(), metadata=AUTH),
        lambda: stub.Release(pb.ReleaseRequest(session=b"y"), metadata=AUTH),
    ):
        assert code_of(call) is NOT_FOUND
    with Session(stub) as session:
        assert code_of(lambda: stub.Load(pb.LoadRequest(session=session.secret, ticket=9), metadata=AUTH)) is NOT_FOUND


def test_malformed_requests_are_refused_and_leave_nothing(stub: KVStoreStub) -> None:
    names = names_of(4, 40)
    with Session(stub) as session:

        def put(*requests: pb.PutRequest) -> Callable[[], Any]:
            first = pb.PutRequest(session=session.secret, offer=to_chains(names))
            return lambda: stub.Put(iter([first, *requests]), metadata=AUTH)

        block = pb.PutBlock
        for requests in (
            [pb.PutRequest(blocks=[block(index=99, data=b"x")])],
            [pb.PutRequest(blocks=[block(index=0, data=bytes(PAYLOAD_BYTES + 1))])],
            [pb.PutRequest(blocks=[block(index=0, data=b"short", checksum=bytes(16))])],
        ):
            stream = put(*requests)
            assert code_of(stream) is INVALID
        shared = pb.PutRequest(session=session.secret, offer=to_chains(names), shared=True)
        assert code_of(lambda: stub.Put(iter([shared]), metadata=AUTH)) is INVALID
        assert code_of(lambda: stub.Put(iter([]), metadata=AUTH)) is INVALID
        chain = to_chain(names)
        chain.tokens = b"123"
        assert (
            code_of(lambda: stub.Lookup(pb.LookupRequest(session=session.secret, chain=chain), metadata=AUTH))
            is INVALID
        )
        ticket = stub.Lookup(pb.LookupRequest(session=session.secret, chain=to_chain(names)), metadata=AUTH).ticket
        for blocks in ([0], [0, 0], [1 << 30]):
            asked = pb.LoadRequest(session=session.secret, ticket=ticket, blocks=blocks)
            assert code_of(lambda asked=asked: stub.Load(asked, metadata=AUTH)) is INVALID  # type: ignore[misc]
    for call in (
        lambda: stub.Query(pb.QueryRequest(keys=[b"short"]), metadata=AUTH),
        lambda: stub.Top(pb.TopRequest(limit=0), metadata=AUTH),
        lambda: stub.Purge(pb.PurgeRequest(), metadata=AUTH),
        lambda: stub.Purge(pb.PurgeRequest(root=b"short"), metadata=AUTH),
    ):
        assert code_of(call) is INVALID


def test_messages_are_bounded(stub: KVStoreStub) -> None:
    too_large = pb.TouchRequest(session=bytes(20 * MIB))
    assert code_of(lambda: stub.Touch(too_large, metadata=AUTH)) is TOO_MUCH
    too_many = pb.Chain(root=bytes(32), parent=bytes(32), keys=bytes(32 * 70_000), num_tokens=[1])
    query = pb.QueryRequest(keys=[bytes(32)] * 70_000)
    assert code_of(lambda: stub.Query(query, metadata=AUTH)) is TOO_MUCH
    with Session(stub) as session:
        lookup = pb.LookupRequest(session=session.secret, chain=too_many)
        assert code_of(lambda: stub.Lookup(lookup, metadata=AUTH)) is TOO_MUCH
        put = pb.PutRequest(session=session.secret, offer=[too_many])
        assert code_of(lambda: stub.Put(iter([put]), metadata=AUTH)) is TOO_MUCH


def test_bytes_that_are_no_message_are_refused_as_such(running: Service) -> None:
    with grpc.insecure_channel(running.address.target) as channel:
        for name, call in (("Top", channel.unary_unary), ("Known", channel.unary_stream)):
            assert code_of(lambda name=name, call=call: call(f"/{SERVICE}/{name}")(b"\xff", metadata=AUTH)) is INVALID  # type: ignore[misc]
        put: Any = channel.stream_stream(f"/{SERVICE}/Put")
        with Session(KVStoreStub(channel)) as session:
            first = pb.PutRequest(session=session.secret, offer=to_chains(names_of(3, 43))).SerializeToString()
            for requests in ([b"\xff"], [first, b"\xff"]):
                assert code_of(lambda requests=requests: put(iter(requests), metadata=AUTH)) is INVALID  # type: ignore[misc]
    running.until_idle()


def test_a_put_that_is_broken_off_ends_as_dropped_and_its_slots_come_back(stub: KVStoreStub) -> None:
    names = names_of(6, 41)
    with Session(stub) as session:
        done = pb.PutBlock(index=0, data=payload(names[0]), checksum=_checksum(payload(names[0])))
        wrong = pb.PutBlock(index=1, data=payload(names[1]), checksum=bytes(16))
        first = pb.PutRequest(session=session.secret, offer=to_chains(names))

        def requests() -> Iterator[pb.PutRequest]:
            yield first
            time.sleep(0.2)  # the bytes are asked for by then
            yield pb.PutRequest(blocks=[done, wrong, pb.PutBlock(index=2, withdrawn=True)])

        statuses: dict[int, int] = {}
        for reply in stub.Put(requests(), metadata=AUTH):
            statuses |= {block.index: block.status for block in reply.blocks if block.status != pb.WANTED}
        assert statuses == {0: pb.OK, 1: pb.CORRUPT, **dict.fromkeys(range(2, 6), pb.DROPPED)}


def _checksum(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def test_a_deadline_ends_a_load_and_nothing_is_left(running: Service) -> None:
    names = names_of(40, 42)
    with Client(running.address) as client:
        client.put(names)
    with grpc.insecure_channel(running.address.target) as channel:
        stub = KVStoreStub(channel)
        with Session(stub) as session:
            asked = pb.LookupRequest(session=session.secret, chain=to_chain(names))
            ticket = stub.Lookup(asked, metadata=AUTH).ticket
            load = pb.LoadRequest(session=session.secret, ticket=ticket, blocks=range(40))
            call = stub.Load(load, metadata=AUTH, timeout=0.1)
            next(iter(call))
            time.sleep(0.2)  # nobody reads
            assert code_of(lambda: call) is grpc.StatusCode.DEADLINE_EXCEEDED or call.code() is grpc.StatusCode.OK
    running.until_idle()


def test_people_are_answered_as_in_process(running: Service) -> None:
    names = names_of(6, 43, "asked about")
    domain = identity("asked about").domain()
    with Client(running.address, "asked about") as client, running.client(domain[:4]) as admin:
        assert client.put(names) == (BlockStatus.OK,) * 6
        for _ in range(2):
            client.hit(names[:4])
        infos = admin.query([*(name.key for name in names), b"?" * 32])
        assert [info.tiers for info in infos] == [("host", "nvme")] * 6 + [()]
        until(lambda: [info.hits for info in admin.query([name.key for name in names])] == [2, 2, 2, 2, 0, 0])
        assert [info.name for info in infos[:6]] == names
        (prefix,) = admin.top()
        assert (prefix.num_blocks, prefix.hits, prefix.children[0].num_blocks) == (4, 2, 2)
        assert {info.key for info in admin.known()} >= {name.key for name in names}
        pinned = admin.pin(names, ttl_s=60.0, tiers=["nvme"])
        assert pinned.held == {"nvme": 6} and [info.pin.names for info in admin.pins()] == [tuple(names)]
        with pytest.raises(PagetierError, match="did you mean 'nvme'"):
            admin.pin(names, tiers=["nvm"])
        assert [info.pin.pin_id for info in admin.unpin([names[-1].key.hex()])] == [pinned.pin.pin_id]
        assert all(not speed.fault for speed in admin.measure().values())
        assert admin.purge(root=names[0].root).removed == {"host": 6, "nvme": 6}
        assert admin.purge(keys=[name.key for name in names]).removed == {"host": 0, "nvme": 0}
        stats = next(one for one in admin.stats()["domains"] if one["domain"] == domain.hex())
        assert stats["lookup"]["hit_tokens"] == 2 * 16 == stats["tiers"]["host"]["hit_tokens"]
        assert stats["lookup"]["lookup_tokens"] == 2 * 16 and stats["lookup"]["hit_rate"] == 1.0
        assert domain in admin.identities()
    with running.client(b"\xff\xff\xff") as admin, pytest.raises(ConfigError, match="no cache with the domain ffffff"):
        admin.query([names[0].key])


def test_events_are_followed_from_a_number_and_from_now(running: Service) -> None:
    names = names_of(3, 44)
    with running.client() as admin, Client(running.address) as client:
        client.put(names)
        seen = []
        for event in admin.events(from_seq=0):
            seen.append(event)
            if event.kind is EventKind.STORED and event.medium == "nvme" and names[2] in event.names:
                break
        assert [event.seq for event in seen] == list(range(seen[0].seq, seen[-1].seq + 1))
        stored = {event.medium for event in seen if event.kind is EventKind.STORED and names[0].key in event.keys}
        assert stored == {"host", "nvme"}


def test_a_second_service_at_one_socket_is_refused(running: Service) -> None:
    config = ServiceConfig(store=running.store, socket=running.folder / "s")
    with pytest.raises(ConfigError, match="answers at .* already"):
        asyncio.run(StoreServer(config).start())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"listen": "7070", "token": TOKEN}, "host:port"),
        ({"listen": "127.0.0.1:7070"}, "--token-file"),
        ({"listen": "10.1.2.3:7070", "token": TOKEN}, "--tls-cert"),
        ({"token": "short"}, "16 characters"),
        ({"tls_cert": Path("a.pem")}, "go together"),
    ],
)
def test_unsafe_or_impossible_settings_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ServiceConfig(**fields)


def test_addresses_are_read_or_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a secret of enough characters\n")
    assert parse_address("unix:///run/s").target == "unix:/run/s"
    address = parse_address(f"grpc://localhost:7070?token_file={tmp_path}/token")
    assert (address.target, address.token, address.is_local) == (
        "localhost:7070",
        "a secret of enough characters",
        False,
    )
    for wrong in ("http://x:1", "unix://x/y", "grpc://x", "grpc://x:99999", "grpc://u:p@x:1", "grpc://x:1?tls=1", "x"):
        with pytest.raises(ConfigError):
            parse_address(wrong)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "none")


def test_nobody_there_is_one_line(tmp_path: Path) -> None:
    with StoreClient(parse_address(f"unix://{tmp_path}/s")) as client, pytest.raises(PagetierError) as error:
        client.stats()
    assert "pagetier store" in str(error.value) and "\n" not in str(error.value)
