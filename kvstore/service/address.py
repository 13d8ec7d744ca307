"""Where a store service is, as text, and a channel to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import grpc

from pagetier.kvstore import places
from pagetier.kvstore.config import LOCAL_STORE
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.service.server import MAX_MESSAGE_BYTES, default_socket

FORMS = f"{LOCAL_STORE}, unix:///path/to/socket, grpc://host:port or grpcs://host:port?ca=/path/ca.pem"
# What gRPC says when nobody is reached, and what that means. Socket closed: the other side ended a handshake.
TROUBLES = (
    ("No such file", "there is no such socket", "start one with 'pagetier store', or give its address"),
    ("Connection refused", "nobody listens there", "start one with 'pagetier store', or give its address"),
    ("DNS resolution failed", "its name is not known", "check the address"),
    ("has expired", "its certificate has expired", "start the store with a new --tls-cert"),
    ("not yet valid", "its certificate is not valid yet", "check the clocks of both machines"),
    ("CERTIFICATE_VERIFY_FAILED", "no CA that is trusted here signed its certificate", "name its CA: ?ca=FILE"),
    ("Hostname Verification", "its certificate is for another name", "use the name that it was made for"),
    ("WRONG_VERSION_NUMBER", "it speaks no TLS", "use grpc://, or start it with --tls-cert and --tls-key"),
    ("security handshaker", "a file of ca, cert or key is no PEM file", "check what the address names"),
)
CLOSED_TLS = ("it ended the handshake", "where it asks for a client's certificate, name one: &cert=FILE&key=FILE")
CLOSED = ("it closed the connection", "where it has TLS, use grpcs://")
MIN_BACKOFF_MS, MAX_BACKOFF_MS = 100, 2000


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """target: gRPC's. tls: None without. `is_local`: reached over a Unix socket, so memory can be shared."""

    text: str
    target: str
    token: str | None = None
    tls: grpc.ChannelCredentials | None = None

    @property
    def shown(self) -> str:
        """As it may be shown in a line."""
        return self.text.partition("?")[0]

    @property
    def is_local(self) -> bool:
        return self.target.startswith("unix:")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def explain(self, details: str) -> tuple[str, str]:
        """Why nobody was reached, from what gRPC says, and what to do: a few words each."""
        for mark, reason, step in TROUBLES:
            if mark in details:
                return reason, step
        if "closed" in details or "reset" in details or "handshake" in details:
            return CLOSED if self.tls is None else CLOSED_TLS
        return details.rpartition("last error: ")[2], "check that it runs, and its address"

    def aio_channel(self) -> grpc.aio.Channel:
        """For an event loop."""
        if self.tls is not None:
            return grpc.aio.secure_channel(self.target, self.tls, _options())
        return grpc.aio.insecure_channel(self.target, _options())

    def channel(self) -> grpc.Channel:
        """For commands."""
        if self.tls is not None:
            return grpc.secure_channel(self.target, self.tls, _options())
        return grpc.insecure_channel(self.target, _options())


def parse_address(text: str, token: str | None = None, *, flag: str = "--kv-store-url") -> StoreAddress:
    """Raises ConfigError that names `flag` and the forms. `token`: unless the address names a `token_file`."""
    parts = urlsplit(text)
    fields = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    if unknown := fields.keys() - {"ca", "token_file", "cert", "key"}:
        raise ConfigError(f"{flag}: {text!r} has {sorted(unknown)[0]!r}; allowed: ca, cert, key, token_file")
    if "token_file" in fields:
        token = read_token(Path(fields["token_file"]))
    if text.partition("?")[0] == LOCAL_STORE:
        return StoreAddress(text, f"unix:{places.check_socket_path(default_socket())}", token)
    if parts.scheme == "unix" and parts.path.startswith("/") and not parts.netloc:
        return StoreAddress(text, f"unix:{places.check_socket_path(Path(unquote(parts.path)))}", token)
    try:
        is_tcp = parts.scheme in ("grpc", "grpcs") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        is_tcp = False
    if not is_tcp or parts.username is not None:
        raise ConfigError.bad_value(flag, text, FORMS)
    tls = _credentials(fields, flag) if parts.scheme == "grpcs" else None
    return StoreAddress(text, parts.netloc, token, tls)


def read_token(path: Path) -> str:
    """The secret in a file. Raises ConfigError, without showing it."""
    try:
        token = path.expanduser().read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token-file: {path} cannot be read as text ({error})") from None
    if not token or not token.isprintable():
        raise ConfigError(f"--token-file: {path} holds no token; write one line of 16 characters or more")
    return token


def _credentials(fields: dict[str, str], flag: str) -> grpc.ChannelCredentials:
    try:
        ca, cert, key = (
            Path(fields[name]).expanduser().read_bytes() if name in fields else None for name in ("ca", "cert", "key")
        )
    except OSError as error:
        raise ConfigError(f"{flag}: a certificate cannot be read ({error})") from None
    return grpc.ssl_channel_credentials(ca, key, cert)


def _options() -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", MIN_BACKOFF_MS),
        ("grpc.min_reconnect_backoff_ms", MIN_BACKOFF_MS),
        ("grpc.max_reconnect_backoff_ms", MAX_BACKOFF_MS),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
