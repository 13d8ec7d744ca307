"""The API side of the link to the engine: requests go down, each request's tokens come back as its own stream.

Owns the sockets, the map of open streams and the knowledge of whether the engine lives. Knows nothing of HTTP or text.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq
import zmq.asyncio

from pagetier.engine.messages import EngineRequest, TokenOutput
from pagetier.engine.server import wire
from pagetier.engine.server.backlog import Backlog
from pagetier.engine.server.engine_host import EngineHost
from pagetier.engine.server.engine_process import outputs_endpoint, requests_endpoint
from pagetier.kvstore.errors import ClosedError, ConfigError, PagetierError, ProtocolError
from pagetier.kvstore.places import check_socket_path

logger = logging.getLogger(__name__)

HUNG_S = 300.0  # `hung` after so long without an answer: one unchunked 8K prefill on two busy cores takes minutes
KILL_GRACE_S = 1.0  # beyond the time-out of `close` before the engine is killed


class EngineDeadError(PagetierError):
    """The engine ended while it was needed."""


class OutputStream:
    """The outputs of a set of sequences, in order of arrival. owner: event loop thread.

    Ends by itself when every sequence has ended; `close` aborts what has not.
    """

    def __init__(self, client: EngineClient, request_ids: Sequence[str]) -> None:
        self._client = client
        self._queue: asyncio.Queue[TokenOutput] = asyncio.Queue()
        self._open = set(request_ids)

    def put(self, output: TokenOutput) -> None:
        self._queue.put_nowait(output)

    async def next(self, timeout_s: float | None = None) -> TokenOutput | None:
        """The next output; None when all sequences have ended. Raises TimeoutError."""
        if not self._open and self._queue.empty():
            return None
        async with asyncio.timeout(timeout_s):
            output = await self._queue.get()
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        return output

    def abort(self, request_id: str) -> None:
        """End one sequence early; nothing more comes of it but what is already here."""
        self._open.discard(request_id)
        self._client.abort([request_id])

    def close(self) -> None:
        """Abort every sequence that has not ended. Idempotent."""
        if self._open:
            self._client.abort(sorted(self._open))
            self._open.clear()


class EngineClient:
    """One engine, behind `host`. owner: event loop thread."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._directory = Path(tempfile.mkdtemp(prefix="pagetier-"))  # 0700
        self._context = zmq.asyncio.Context(io_threads=1)
        self._outputs: zmq.asyncio.Socket | None = None
        self._requests: zmq.Socket[bytes] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: wire.Ready | None = None
        self._started: asyncio.Future[wire.Ready] | None = None
        self._streams: dict[str, OutputStream] = {}
        self.backlog = Backlog()
        self._waiters: dict[int, asyncio.Future[Any]] = {}  # ticket -> who waits for its answer
        self._next_ticket = 0
        self._on_events: Callable[[wire.Events], None] | None = None
        self._unanswered_since_s: float | None = None
        self._error: str | None = None
        self._ended = asyncio.Event()
        self._idle = asyncio.Event()  # set while no stream is open
        self._idle.set()
        self.num_dropped = 0  # malformed messages

    async def start(self) -> wire.Ready:
        """Start the engine and wait until it serves. Raises ConfigError or EngineDeadError in its own words."""
        for name in ("requests.sock", "outputs.sock"):
            check_socket_path(self._directory / name)
        self._outputs = self._context.socket(zmq.PULL)
        self._outputs.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        self._outputs.bind(outputs_endpoint(self._directory))
        self._started = asyncio.get_running_loop().create_future()
        await self._host.start(self._directory)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        self._ready = await self._started
        self._requests = zmq.Socket(self._context, zmq.PUSH)
        self._requests.setsockopt(zmq.SNDHWM, 0)  # bounded by the server's admission
        self._requests.setsockopt(zmq.LINGER, 0)
        self._requests.connect(requests_endpoint(self._directory))
        return self._ready

    @property
    def ready(self) -> wire.Ready:
        if self._ready is None:
            raise ClosedError("the engine has not started")
        return self._ready

    @property
    def error(self) -> str | None:
        """Why the engine is dead; None while it lives."""
        return self._error

    @property
    def directory(self) -> Path:
        return self._directory

    @property
    def num_open(self) -> int:
        """Sequences submitted and not ended."""
        return len(self._streams)

    def submit(self, requests: Sequence[EngineRequest]) -> OutputStream:
        """Start sequences; their outputs come through one stream. Raises EngineDeadError."""
        if self._error is not None:
            raise EngineDeadError(self._error)
        messages = [wire.encode(wire.Submit(request)) for request in requests]
        stream = OutputStream(self, [request.request_id for request in requests])
        self.backlog.add(requests)
        for request, message in zip(requests, messages, strict=True):
            self._streams[request.request_id] = stream
            self._send(message)
        self._idle.clear()
        return stream

    def abort(self, request_ids: Sequence[str]) -> None:
        """End sequences; unknown ids are ignored."""
        mine = tuple(request_id for request_id in request_ids if self._forget(request_id) is not None)
        if mine and self._error is None:
            self._send(wire.encode(wire.Abort(mine)))

    async def stats(self, timeout_s: float) -> dict[str, Any]:
        """The core's counters. Raises TimeoutError, EngineDeadError."""
        answer: dict[str, Any] = await self._ask(wire.StatsQuery, timeout_s)
        return answer

    async def timelines(self, request_id: str, timeout_s: float) -> list[dict[str, Any]]:
        """What happened to each sequence of an API request; empty when it is not known. Raises TimeoutError,
        EngineDeadError."""
        answer = await self._ask(lambda ticket: wire.TimelineQuery(ticket, request_id), timeout_s)
        sequences: list[dict[str, Any]] = answer["sequences"]
        return sequences

    async def set_weights_version(self, version: str, timeout_s: float) -> None:
        """Use no KV of before; `ready` has the new identity then. Raises TimeoutError (it then comes true later),
        EngineDeadError."""
        await self._ask(lambda ticket: wire.SetWeightsVersion(ticket, version), timeout_s)

    async def ask(self, verb: str, fields: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to a question about the cache (engine/inspection.py). Raises ConfigError for a wrong question,
        TimeoutError, EngineDeadError, PagetierError."""
        answer: wire.Answer = await self._ask(lambda ticket: wire.Question(ticket, verb, fields), timeout_s)
        if answer.error:
            raise ConfigError(answer.error) if answer.usage else PagetierError(answer.error)
        return answer.fields

    def follow_events(self, listener: Callable[[wire.Events], None] | None) -> None:
        """Call `listener` with what comes into the cache and leaves it from now on; None: no longer."""
        self._on_events = listener
        if self._error is None and self._requests is not None:
            self._send(wire.encode(wire.Follow(listener is not None)))

    async def _ask(self, question: Callable[[int], wire.Message], timeout_s: float) -> Any:
        """The answer to the question of a new ticket."""
        if self._error is not None:
            raise EngineDeadError(self._error)
        self._next_ticket += 1
        ticket = self._next_ticket
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiters[ticket] = waiter
        if self._unanswered_since_s is None:
            self._unanswered_since_s = time.monotonic()
        self._send(wire.encode(question(ticket)))
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        finally:
            self._waiters.pop(ticket, None)

    def hung(self) -> bool:
        """Whether the engine has left a question unanswered for too long."""
        since = self._unanswered_since_s
        return since is not None and time.monotonic() - since > HUNG_S

    async def wait_idle(self, timeout_s: float) -> bool:
        """Sleep until no sequence is open, for at most `timeout_s`; whether that came true."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def fail_open(self, error: str) -> None:
        """End every open stream with `error`; the engine is told to abort them."""
        request_ids = tuple(self._streams)
        for request_id in request_ids:
            self._streams[request_id].put(TokenOutput(request_id, (), finish_reason="error", error=error))
        self.abort(request_ids)

    async def close(self, timeout_s: float = 10.0) -> None:
        """Shut the engine down within `timeout_s` (queued puts are written), or kill it. Idempotent."""
        if self._tasks:
            if self._error is None and self._requests is not None:
                self._send(wire.encode(wire.Shutdown(timeout_s)))
            else:
                self._host.kill()
            try:
                async with asyncio.timeout(timeout_s + KILL_GRACE_S):
                    await self._ended.wait()
            except TimeoutError:
                logger.warning("the engine did not end within %.1f s and is killed; queued puts may be lost", timeout_s)
                self._host.kill()
                await self._ended_or_given_up()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._tasks = []
        for socket in (self._outputs, self._requests):
            if socket is not None:
                socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def __aenter__(self) -> EngineClient:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ended_or_given_up(self) -> None:
        try:
            async with asyncio.timeout(KILL_GRACE_S):
                await self._ended.wait()
        except TimeoutError:
            logger.warning("the engine cannot be ended; it ends with this process")

    def _send(self, data: bytes) -> None:
        assert self._requests is not None, "sends only after start"
        self._requests.send(data, zmq.NOBLOCK)

    async def _receive(self) -> None:
        assert self._outputs is not None, "bound in start"
        while True:
            frames = await self._outputs.recv_multipart()
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"engine message of {len(frames)} frames")
                self._dispatch(wire.decode(frames[0]))
            except ProtocolError as error:
                self.num_dropped += 1
                logger.warning("dropped a message from the engine: %s", error)

    def _dispatch(self, message: wire.Message) -> None:
        match message:
            case wire.Tokens(outputs):
                for output in outputs:
                    self._deliver(output)
            case wire.StatsAnswer(ticket, stats):
                self._answer(ticket, stats)
            case wire.Answer(ticket):
                self._answer(ticket, message)
            case wire.Events():
                if self._on_events is not None:
                    self._on_events(message)
            case wire.IdentityChanged(ticket, identity):
                self._ready = replace(self.ready, identity=identity)
                self._answer(ticket, None)
            case wire.Ready():
                if self._started is not None and not self._started.done():
                    self._started.set_result(message)
            case wire.Failed(error, usage):
                self._die(error, ConfigError(error) if usage else EngineDeadError(error))
            case _:
                raise ProtocolError(f"unexpected {type(message).__name__}")

    def _answer(self, ticket: int, answer: Any) -> None:
        self._unanswered_since_s = None
        waiter = self._waiters.get(ticket)
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    def _deliver(self, output: TokenOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return  # aborted meanwhile
        if output.token_ids:
            self.backlog.took(output.request_id)
        if output.finish_reason is not None:
            self._forget(output.request_id)
        stream.put(output)

    def _forget(self, request_id: str) -> OutputStream | None:
        stream = self._streams.pop(request_id, None)
        self.backlog.end(request_id)
        if not self._streams:
            self._idle.set()
        return stream

    async def _watch(self) -> None:
        reason = await self._host.wait()
        await asyncio.sleep(0.05)  # its last messages may still be on their way
        self._die(reason, EngineDeadError(reason))
        self._ended.set()

    def _die(self, reason: str, error: PagetierError) -> None:
        if self._error is not None:
            return
        self._error = reason
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(error)
        self.fail_open(f"the engine died: {reason}")
