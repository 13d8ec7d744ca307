"""The Redis tier over TLS: a scripted server, and a proxy in front of a real one, which is built without it."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pagetier.kvstore.block import BlockStatus
from pagetier.kvstore.errors import ConfigError, TierUnavailable
from pagetier.kvstore.redis.sockets import Sockets
from pagetier.kvstore.redis.tier import RedisTier
from pagetier.kvstore.tier import BlockRead, BlockWrite, Tier
from tests.kvstore.resp_server import Command, KeptSockets, RespServer
from tests.kvstore.tier_contract import DOMAIN, PART, TierContract, addresses, chain, payload_of, soon
from tests.kvstore.tls_proxy import Certificate, make_certificate, tls_proxy
from tests.kvstore.valkey import Valkey, own_valkey, valkey, valkey_server  # noqa: F401
from tests.kvstore.valkey_groups import free_port, own_cluster

OK, ERROR, TIMEOUT = BlockStatus.OK, BlockStatus.ERROR, BlockStatus.TIMEOUT
PAYLOAD_BYTES = 100_000  # several TLS records


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def client_certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("client"), "DNS:client")


@pytest.fixture
def tls(certificate: Certificate) -> ssl.SSLContext:
    return certificate.server_context()


class Store:
    """What a server does with GET, SET, EXISTS and the probe of a put."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def __call__(self, command: Command) -> bytes:
        verb, *rest = command
        if verb == b"INFO":
            return b"-NOPERM\r\n"
        key, *rest = rest
        if verb == b"SET":
            self.values[key] = rest[0]
            return b"+OK\r\n"
        value = self.values.get(key)
        if verb == b"GET":
            return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)
        return b":%d\r\n" % (len(value or b"") if verb == b"STRLEN" else value is not None)


def trusting(server: RespServer, certificate: Certificate, sockets: Sockets | None = None) -> RedisTier:
    url = f"{server.url}?ssl_ca_certs={certificate.cert}"
    return RedisTier(url, DOMAIN, refresh_interval_s=1e9, sockets=sockets)


def reads(num_blocks: int) -> list[BlockRead]:
    return [BlockRead(name, PART, memoryview(bytearray(PAYLOAD_BYTES))) for name in chain(num_blocks)]


def writes(num_blocks: int) -> list[BlockWrite]:
    names = chain(num_blocks)
    return [BlockWrite(name, PART, memoryview(payload_of(name, nbytes=PAYLOAD_BYTES))) for name in names]


def test_blocks_travel_both_ways(tls: ssl.SSLContext, certificate: Certificate) -> None:
    with RespServer(Store(), tls) as server:
        tier = trusting(server, certificate)
        assert tier.put(writes(6), soon()) == [OK] * 6
        assert tier.lookup(addresses(chain(8)), soon()) == 6
        got = reads(6)
        assert tier.get(got, soon()) == [OK] * 6
        for read in got:
            assert bytes(read.destination) == payload_of(read.name, nbytes=PAYLOAD_BYTES)
        assert server.num_connections == 1, "an idle TLS connection is reusable"
        tier.check()
        tier.close()


def test_a_deadline_holds(tls: ssl.SSLContext, certificate: Certificate) -> None:
    store = Store()
    with RespServer(store, tls) as server:
        tier = trusting(server, certificate)
        tier.put(writes(2), soon())
        server.piece_bytes, server.pause_s = 1000, 0.02  # 2 s a value
        started_s = time.monotonic()
        assert tier.get(reads(2), started_s + 0.2) == [TIMEOUT] * 2
        assert time.monotonic() - started_s < 1.0
        server.piece_bytes = 0
        assert tier.get(reads(2), soon()) == [OK] * 2
        assert server.num_connections == 2
        tier.close()


def test_bytes_nobody_asked_for_end_the_connection(tls: ssl.SSLContext, certificate: Certificate) -> None:
    store = Store()
    with RespServer(lambda command: store(command) + b"+late\r\n", tls) as server:
        sockets = KeptSockets()
        tier = trusting(server, certificate, sockets)
        assert tier.lookup(addresses(chain(1)), soon()) == 0
        sockets.wait_for_bytes()
        server.answer = store
        assert tier.put(writes(1), soon()) == [OK]
        assert server.num_connections == 2
        tier.close()


# -- in front of a real server -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_server() -> Iterator[Valkey]:
    with own_valkey(maxmemory=str(8 << 20), maxmemory_policy="allkeys-lru", requirepass="pw") as server:
        yield server


class TestTlsTier(TierContract):
    @pytest.fixture
    def tier(self, small_server: Valkey, certificate: Certificate) -> Iterator[Tier]:
        small_server.client(password="pw").flushall()
        with tls_proxy(small_server.socket_path, certificate.server_context()) as port:
            url = f"rediss://:pw@127.0.0.1:{port}?ssl_ca_certs={certificate.cert}"
            tier = RedisTier(url, DOMAIN, refresh_interval_s=0.0)
            tier.put_identity(DOMAIN, b"known")
            yield tier
            tier.close()


def test_a_cluster_over_tls(certificate: Certificate) -> None:
    """The nodes announce the ports of their proxies, so every step of the way is encrypted."""
    ports = [free_port() for _ in range(3)]
    with own_cluster(announced_ports=ports) as nodes, ExitStack() as stack:
        for node, port in zip(nodes, ports, strict=True):
            stack.enter_context(tls_proxy(node.server.socket_path, certificate.server_context(), port))
        url = f"rediss+cluster://127.0.0.1:{ports[2]}?ssl_ca_certs={certificate.cert}"
        tier = RedisTier(url, DOMAIN)
        assert tier.put(writes(20), soon()) == [OK] * 20
        got = reads(20)
        assert tier.get(got, soon()) == [OK] * 20
        assert all(bytes(read.destination) == payload_of(read.name, nbytes=PAYLOAD_BYTES) for read in got)
        assert all(node.client.dbsize() for node in nodes)
        tier.close()


def test_a_server_that_wants_a_certificate_gets_it(
    valkey: Valkey,  # noqa: F811
    certificate: Certificate,
    client_certificate: Certificate,
) -> None:
    with tls_proxy(valkey.socket_path, certificate.server_context(client_certificate)) as port:
        url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate.cert}"
        shown = f"&ssl_certfile={client_certificate.cert}&ssl_keyfile={client_certificate.key}"
        with_it, without = RedisTier(url + shown, DOMAIN), RedisTier(url, DOMAIN)
        assert with_it.put(writes(2), soon()) == [OK] * 2
        assert without.put(writes(2), soon()) == [ERROR] * 2
        for tier in (with_it, without):
            tier.close()


# -- what is wrong with a certificate, in one line ---------------------------------------------------------------------


def trouble_of(url: str) -> str:
    """Why a lookup fails."""
    tier = RedisTier(url, DOMAIN)
    assert tier.put(writes(1), soon()) == [ERROR]
    with pytest.raises(TierUnavailable) as caught:
        tier.lookup(addresses(chain(1)), soon())
    tier.close()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_certificate_nobody_signed_is_not_trusted(valkey: Valkey, tls: ssl.SSLContext) -> None:  # noqa: F811
    with tls_proxy(valkey.socket_path, tls) as port:
        trouble = trouble_of(f"rediss://127.0.0.1:{port}")
        assert trouble.startswith(f"redis lookup: the certificate of 127.0.0.1:{port} is not trusted: self")
        assert "ssl_ca_certs" in trouble


def test_a_certificate_of_another_host_is_not_trusted(valkey: Valkey, tmp_path: Path) -> None:  # noqa: F811
    other = make_certificate(tmp_path, "DNS:elsewhere")
    with tls_proxy(valkey.socket_path, other.server_context()) as port:
        trouble = trouble_of(f"rediss://127.0.0.1:{port}?ssl_ca_certs={other.cert}")
        assert "is not trusted" in trouble and "127.0.0.1" in trouble
        tier = RedisTier(f"rediss://127.0.0.1:{port}?ssl_ca_certs={other.cert}&ssl_check_hostname=false", DOMAIN)
        assert tier.put(writes(1), soon()) == [OK]
        tier.close()


def test_a_server_without_tls_says_so(valkey: Valkey) -> None:  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_plainly() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(b"-ERR unknown command\r\n")

        thread = threading.Thread(target=answer_plainly)
        thread.start()
        assert "no TLS with 127.0.0.1" in trouble_of(f"rediss://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


def test_a_certificate_file_that_is_missing_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ssl_certfile"):
        RedisTier(f"rediss://host?ssl_certfile={tmp_path / 'none.pem'}", DOMAIN)
