"""`pagetier serve` as a function: start the engine, answer HTTP, end in order.

Owns the order of start and end and who hears SIGTERM; knows no route and no flag.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from pagetier.engine.metrics import ServerMetrics
from pagetier.engine.server.app import Service, create_app
from pagetier.engine.server.engine_client import EngineClient
from pagetier.engine.server.engine_host import EngineHost, EngineOrder, ProcessHost, ThreadHost
from pagetier.engine.server.engine_process import RUNNING_SHARE
from pagetier.engine.server.errors import shutting_down
from pagetier.engine.server.event_publisher import EventPublisher, KvEventsConfig
from pagetier.engine.server.preparation import Preparer
from pagetier.engine.server.wire import Ready
from pagetier.engine.tokenizer import Tokenizer
from pagetier.kvstore.errors import ConfigError

logger = logging.getLogger(__name__)

SETTLE_S = 0.5  # for the last error events to reach their clients


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The API process's own settings; the engine's travel in `order`.

    engine_process: auto and on run the engine in a process of its own, off in a thread. seed: of the seeds drawn for
    requests that name none; None: from the system.
    """

    order: EngineOrder
    model_names: tuple[str, ...]
    api_key: str | None = None
    admin_token: str | None = None
    engine_process: str = "auto"
    shutdown_timeout_s: float = 10.0
    seed: int | None = None
    kv_events: KvEventsConfig = KvEventsConfig()


def bind(host: str, port: int) -> socket.socket:
    """A bound, not yet listening socket; ConfigError when the address cannot be had."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        server = socket.socket(info[0], info[1], info[2])
    except OSError as error:
        raise ConfigError(f"--host: got {host!r}: {error}; give an address of this machine") from None
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else answers wait 40 ms for a delayed ACK
        server.bind(info[4])
    except OSError as error:
        server.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --port") from None
    return server


async def serve(
    options: ServeOptions,
    tokenizer: Callable[[], Tokenizer],
    listener: socket.socket,
    started: Callable[[str, Ready], None],
) -> None:
    """Serve on `listener` until SIGTERM or SIGINT. `started` is called with the URL, and with
    what the engine said of itself, once requests are answered.

    `tokenizer` loads it; that runs while the engine starts. Raises ConfigError or PagetierError when the engine does
    not start. SIGTERM: running requests get their share of the shutdown time-out, then end with an error; the rest
    of it is for queued puts.
    """
    host: EngineHost = ThreadHost(options.order) if options.engine_process == "off" else ProcessHost(options.order)
    client = EngineClient(host)
    end = _End(options.shutdown_timeout_s)
    with end.listening():
        try:
            loading = asyncio.create_task(asyncio.to_thread(tokenizer))
            try:
                await end.unless_asked(client.start())
            except BaseException:
                await asyncio.gather(loading, return_exceptions=True)  # the engine's reason is the one to tell
                raise
            text = await loading  # a thread cannot be cancelled; it is short
            if end.asked:
                return
            preparer, publisher = Preparer(text, lambda: client.ready, options.seed), None
            try:
                metrics = ServerMetrics(options.model_names[0])
                secrets = options.api_key, options.admin_token
                service = Service(client, text, preparer, metrics, options.model_names, *secrets)
                if options.kv_events.is_on:
                    publisher = EventPublisher(options.kv_events, service.hub, client.ready.block_size)
                await _answer(service, listener, options, started, end)
            finally:
                if publisher is not None:
                    await publisher.close()
                preparer.close()
        finally:
            await client.close(end.left_s())


class _End:
    """When serving ends: asked for by a signal, and by when everything must be over. owner: event loop thread."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._asked = asyncio.Event()
        self._by_s: float | None = None

    @property
    def asked(self) -> bool:
        return self._by_s is not None

    def ask(self) -> None:
        """Begin the end; a second time leaves no more time."""
        self._by_s = time.monotonic() + (0.0 if self.asked else self._timeout_s)
        self._asked.set()

    def left_s(self) -> float:
        """Seconds until everything must be over."""
        return self._timeout_s if self._by_s is None else max(0.0, self._by_s - time.monotonic())

    async def unless_asked(self, work: Coroutine[Any, Any, object]) -> None:
        """Run `work` to its end, or give it up when the end is asked for."""
        working = asyncio.create_task(work)
        asking = asyncio.create_task(self._asked.wait())
        try:
            await asyncio.wait((working, asking), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            working.cancel()
            asking.cancel()
            await asyncio.wait((working, asking))

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While entered, SIGTERM and SIGINT ask for the end."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self.ask)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handlers (`_End` has them), which says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _answer(
    service: Service,
    listener: socket.socket,
    options: ServeOptions,
    started: Callable[[str, Ready], None],
    end: _End,
) -> None:
    config = uvicorn.Config(
        create_app(service),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=max(1, round(options.shutdown_timeout_s)),
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await _first_of(server.listens.wait(), running)
        if not running.done():
            started(_url(listener), service.client.ready)
            await end.unless_asked(_wait_for(running))
            await _drain(service, end, options.shutdown_timeout_s)
    finally:
        server.should_exit = True
        try:
            async with asyncio.timeout(SETTLE_S + end.left_s()):
                await running
        except TimeoutError:
            logger.warning("connections were still open when the server ended")


async def _first_of(work: Coroutine[Any, Any, object], other: asyncio.Task[None]) -> None:
    """Return when either has ended; `work` is given up if it was not the first."""
    working = asyncio.create_task(work)
    await asyncio.wait((working, other), return_when=asyncio.FIRST_COMPLETED)
    working.cancel()
    await asyncio.wait((working,))


async def _wait_for(task: asyncio.Task[None]) -> None:
    await asyncio.shield(task)


async def _drain(service: Service, end: _End, timeout_s: float) -> None:
    """Refuse new requests, let running ones end for their share of the time-out, end the rest with an error."""
    service.draining = True
    for_puts_s = (1 - RUNNING_SHARE) * timeout_s
    await service.client.wait_idle(max(0.0, end.left_s() - for_puts_s))
    service.client.fail_open(str(shutting_down()))


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
