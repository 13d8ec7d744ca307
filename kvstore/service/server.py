"""A store service as an object: sockets, TLS, token, health and reflection around the servicer."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pagetier.kvstore import places
from pagetier.kvstore.config import StoreConfig
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.pins import PinFile
from pagetier.kvstore.service.lease_socket import LeaseServer, is_answered
from pagetier.kvstore.service.leases import WINDOW_BYTES, Window
from pagetier.kvstore.service.refusals import RefusingInterceptor
from pagetier.kvstore.service.servicer import StoreServicer
from pagetier.kvstore.service.sessions import Sessions
from pagetier.kvstore.service.tiers import TierSet
from pagetier.proto import kvstore_pb2 as pb
from pagetier.proto.kvstore_pb2_grpc import add_KVStoreServicer_to_server

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["KVStore"].full_name
MAX_MESSAGE_BYTES = 16 << 20
MAX_STREAMS = 256  # at once on one connection
LEASES_SUFFIX = ".leases"
OPEN_METHODS = ("/grpc.health.v1.Health/",)  # probes cannot send tokens

Handler = Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]]


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Where a service listens and who may ask it.

    socket: None is `<cache>/store/store.sock`. listen: host:port for TCP, None for none; it needs a token, and TLS
    (certificate and key, PEM) unless it is loopback. client_ca: whose certificates clients must show.
    """

    store: StoreConfig = field(default_factory=StoreConfig)
    socket: Path | None = None
    listen: str | None = None
    token: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None
    window_bytes: int = WINDOW_BYTES
    shutdown_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key go together; give both or none")
        if self.token is not None and len(self.token) < 16:
            raise ConfigError("--token-file: the token is shorter than 16 characters; use a longer one")
        if self.listen is None:
            return
        host, separator, port = self.listen.rpartition(":")
        if not separator or not host or not port.isdigit() or int(port) > 65535:
            raise ConfigError.bad_value("--listen", self.listen, "host:port, such as 127.0.0.1:7070")
        if self.token is None:
            raise ConfigError("--listen needs --token-file: whoever reaches the port could read every cache")
        if self.tls_cert is None and not is_loopback(host):
            raise ConfigError(f"--listen {self.listen} needs --tls-cert and --tls-key; only loopback goes without")


def is_loopback(host: str) -> bool:
    """Whether a name or address means this machine alone."""
    return host in ("localhost", "[::1]", "::1") or host.startswith("127.")


def default_socket() -> Path:
    """`<cache>/store/store.sock`, its folder made when missing."""
    return places.store_dir() / "store.sock"


def refuse_unusable(cert: Path, key: Path, client_ca: Path | None) -> None:
    """Raise ConfigError for files that are no certificate and its key, which gRPC would not tell apart from a port that
    is taken; OSError for those that cannot be read."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
    except ssl.SSLError as error:
        reason = (error.reason or "not PEM").replace("_", " ").lower()
        raise ConfigError(f"--tls-cert, --tls-key, --tls-client-ca: no certificate and its key ({reason})") from None


class StoreServer:
    """One service. All methods on one event loop."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.socket_path = config.socket or default_socket()
        self.port = 0  # of TCP, once started
        self.tiers: TierSet | None = None
        self.sessions = Sessions()
        self.window: Window | None = None
        self._leases: LeaseServer | None = None
        self._grpc: grpc.aio.Server | None = None
        self._servicer: StoreServicer | None = None
        self._health = health.aio.HealthServicer()

    async def start(self) -> None:
        """Open the tiers, then answer. Raises ConfigError for what cannot work; leaves nothing open then."""
        try:
            await self._start()
        except BaseException:
            await self.stop(0.0)
            raise

    async def _start(self) -> None:
        places.check_socket_path(self._lease_path)
        if is_answered(self.socket_path, socket.SOCK_STREAM):
            raise ConfigError(f"--socket: a store answers at {self.socket_path} already; use it, or choose another one")
        places.make_private_dir(self.socket_path.parent)
        self.window = Window(self.config.window_bytes)
        pins = PinFile(self.config.store.pins_path or places.pins_path())
        self.tiers = TierSet(self.config.store, pins)
        self._leases = LeaseServer(self._lease_path, self.sessions, self.window, self.tiers.host)
        self._leases.start()
        self._servicer = StoreServicer(self.tiers, self.window, self.sessions, os.fspath(self._lease_path))
        self._grpc = self._make_server(self._servicer)
        self._listen_unix(self._grpc)
        if self.config.listen is not None:
            self._listen_tcp(self._grpc, self.config.listen)
        await self._grpc.start()
        for name in (SERVICE, ""):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    @property
    def _lease_path(self) -> Path:
        return self.socket_path.with_name(self.socket_path.name + LEASES_SUFFIX)

    def _make_server(self, servicer: StoreServicer) -> grpc.aio.Server:
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_metadata_size", 16 << 10),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.keepalive_time_ms", 20_000),  # finds dead clients that TCP would keep for hours
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ("grpc.so_reuseport", 0),
        ]
        interceptors: list[grpc.aio.ServerInterceptor] = [RefusingInterceptor(SERVICE)]
        if self.config.token is not None:
            interceptors.insert(0, _TokenInterceptor(self.config.token))
        server = grpc.aio.server(interceptors=interceptors, options=options)
        add_KVStoreServicer_to_server(servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        return server

    def _listen_unix(self, server: grpc.aio.Server) -> None:
        before = os.umask(0o177)  # no moment at which others could connect
        try:
            server.add_insecure_port(f"unix:{self.socket_path}")
        except RuntimeError as error:
            raise ConfigError(f"--socket: cannot listen at {self.socket_path} ({error}); choose another one") from None
        finally:
            os.umask(before)

    def _listen_tcp(self, server: grpc.aio.Server, address: str) -> None:
        try:
            if self.config.tls_cert is None or self.config.tls_key is None:
                self.port = server.add_insecure_port(address)
                return
            refuse_unusable(self.config.tls_cert, self.config.tls_key, self.config.client_ca)
            ca = None if self.config.client_ca is None else self.config.client_ca.read_bytes()
            pair = (self.config.tls_key.read_bytes(), self.config.tls_cert.read_bytes())
            credentials = grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)
            self.port = server.add_secure_port(address, credentials)
        except OSError as error:
            raise ConfigError(f"--tls-cert, --tls-key, --tls-client-ca: cannot be read ({error.strerror})") from None
        except RuntimeError as error:
            raise ConfigError(f"--listen: cannot listen on {address} ({error}); choose another one") from None

    async def stop(self, timeout_s: float | None = None) -> bool:
        """Answer no more, write what is queued, let go of everything; whether all was written. Idempotent."""
        timeout_s = self.config.shutdown_timeout_s if timeout_s is None else timeout_s
        if self._servicer is not None:
            self._servicer.is_closing.set()
        if self._grpc is not None:
            await self._health.enter_graceful_shutdown()
            await self._grpc.stop(min(1.0, timeout_s / 2))
            self._grpc = None
        if self._servicer is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.1, timeout_s / 2)):
                    await self._servicer.background.drain()
        if self._leases is not None:
            await self._leases.close()
        written = True
        if self.tiers is not None:
            written = await self.tiers.close(timeout_s)
        if self.window is not None:
            with contextlib.suppress(BufferError):  # a tier that hangs still reads or writes there
                self.window.close()
            self.window = None
        return written


class _TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without the token, before anything of them is read."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

        async def refuse(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "give the store's token")

        self._refusal: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(
        self, continuation: Handler, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if handler_call_details.method.startswith(OPEN_METHODS):
            return await continuation(handler_call_details)
        for name, value in handler_call_details.invocation_metadata or ():
            given = value if isinstance(value, bytes) else value.encode()
            if name == "authorization" and hmac.compare_digest(given, self._expected):
                return await continuation(handler_call_details)
        return self._refusal
