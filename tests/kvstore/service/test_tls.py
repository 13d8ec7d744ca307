"""TLS and token over TCP: who is let in, and one line with cause and next step for who is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagetier.kvstore.config import MIB
from pagetier.kvstore.errors import ConfigError, PagetierError
from pagetier.kvstore.service.address import parse_address
from pagetier.kvstore.service.client import StoreClient
from tests.kvstore.service.service_rig import TOKEN, Client, Service, names_of, service
from tests.kvstore.tls_proxy import Certificate, make_certificate, make_expired_certificate


@dataclass(frozen=True)
class Papers:
    """Certificates that sign themselves, and files with the token and with another one."""

    folder: Path
    good: Certificate
    stranger: Certificate

    def login(self, token: str = "token", ca: Certificate | None = None) -> str:
        """What an address says after its question mark."""
        return f"ca={(ca or self.good).cert}&token_file={self.folder / token}"


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    folder = tmp_path_factory.mktemp("papers")
    for name in ("good", "stranger"):
        (folder / name).mkdir()
    (folder / "token").write_text(TOKEN)
    (folder / "other").write_text(f"not {TOKEN}")
    return Papers(folder, make_certificate(folder / "good"), make_certificate(folder / "stranger"))


def tls_service(own: Certificate, client: Certificate | None = None) -> Iterator[Service]:
    ca = None if client is None else client.cert
    with service(token=TOKEN, listen="127.0.0.1:0", tls_cert=own.cert, tls_key=own.key, client_ca=ca) as running:
        yield running


@pytest.fixture
def secure(papers: Papers) -> Iterator[Service]:
    yield from tls_service(papers.good)


def refusal(url: str) -> str:
    """The one line that a command would end with."""
    with pytest.raises(PagetierError) as refused, StoreClient(parse_address(url)) as client:
        client.stats()
    line = str(refused.value)
    assert "\n" not in line and TOKEN not in line and len(line) < 300
    return line


def test_blocks_travel_over_tls(secure: Service, papers: Papers) -> None:
    names = names_of(9)
    with Client(parse_address(f"grpcs://127.0.0.1:{secure.server.port}?{papers.login()}")) as client:
        client.put(names)
        assert set(client.hit(names)) == {"host"}
    secure.until_idle()


def test_who_is_not_let_in_is_told_why(secure: Service, papers: Papers) -> None:
    port, ca = secure.server.port, papers.good.cert
    url = f"grpcs://127.0.0.1:{port}"
    assert "asks for a token; name the file that its --token-file has" in refusal(f"{url}?ca={ca}")
    assert "refuses the token" in refusal(f"{url}?{papers.login('other')}")
    token_file = papers.folder / "token"
    assert "where it has TLS, use grpcs://" in refusal(f"grpc://127.0.0.1:{port}?token_file={token_file}")
    for untrusted in (f"{url}?token_file={token_file}", f"{url}?{papers.login(ca=papers.stranger)}"):
        assert "no CA that is trusted here signed its certificate; name its CA" in refusal(untrusted)
    assert "is for another name" in refusal(f"grpcs://localhost:{port}?{papers.login()}")
    assert "is no PEM file" in refusal(f"{url}?ca={token_file}&token_file={token_file}")
    with pytest.raises(ConfigError, match="a certificate cannot be read"):
        parse_address(f"{url}?ca={papers.folder}/none")


def test_an_expired_certificate_is_named_as_the_cause(tmp_path: Path, papers: Papers) -> None:
    old = make_expired_certificate(tmp_path)
    for running in tls_service(old):
        url = f"grpcs://127.0.0.1:{running.server.port}?{papers.login(ca=old)}"
        assert "its certificate has expired; start the store with a new --tls-cert" in refusal(url)


def test_a_store_that_asks_for_a_clients_certificate_gets_it(papers: Papers) -> None:
    for running in tls_service(papers.good, client=papers.stranger):
        url = f"grpcs://127.0.0.1:{running.server.port}?{papers.login()}"
        shown, wrong = (f"{url}&cert={one.cert}&key={one.key}" for one in (papers.stranger, papers.good))
        with StoreClient(parse_address(shown)) as client:
            assert client.stats()["service"]["sessions"] == 0
        for refused in (url, wrong):
            assert "where it asks for a client's certificate, name one" in refusal(refused)


def test_a_store_without_tls_is_named_as_such(papers: Papers) -> None:
    with service(token=TOKEN, listen="127.0.0.1:0") as running:
        assert "speaks no TLS; use grpc://" in refusal(f"grpcs://127.0.0.1:{running.server.port}?{papers.login()}")


def test_files_that_are_no_certificate_and_key_are_refused_at_the_start(papers: Papers) -> None:
    good, stranger, token = papers.good, papers.stranger, papers.folder / "token"
    for pair, words in (
        ((token, good.key), "no certificate and its key"),
        ((good.cert, stranger.key), "key values mismatch"),
        ((good.cert, papers.folder / "none"), "cannot be read"),
    ):
        options = {"tls_cert": pair[0], "tls_key": pair[1], "window_bytes": 4 * MIB}
        with pytest.raises(ConfigError, match=words), service(token=TOKEN, listen="127.0.0.1:0", **options):
            pass
