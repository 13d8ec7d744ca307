"""The engine's side of the link: one thread that drains requests, steps the core and sends tokens.

Owns the loop and its life: start, idle sleep, orderly end. Knows the core only by the verbs of `Core`, the API side
only by the messages of `wire`. The same loop runs as the main thread of its own process or as a thread of the API's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import zmq

from pagetier.engine.inspection import Report
from pagetier.engine.interpreter import calm_the_collector, collect_at_rest, switch_often
from pagetier.engine.messages import EngineRequest, TokenOutput
from pagetier.engine.server import wire
from pagetier.kvstore.errors import ConfigError, PagetierError, ProtocolError

logger = logging.getLogger(__name__)

DEFAULT_FACTORY = "pagetier.engine.server.factory:build"
FOLLOW_POLL_MS = 100  # the same while somebody follows events, which tiers cause on threads of their own
IDLE_POLL_MS = 1000  # nothing to do: messages, signals and a closed lifeline wake the poll before that
STALL_POLL_MS = 1  # work there is, but it waits for a tier or a device
MAX_DRAIN = 256  # messages taken between two steps, so that a flood of requests cannot stop the running ones
RUNNING_SHARE = 0.6  # of the shutdown time-out is for running requests, the rest for queued puts


class Core(Protocol):
    """What the loop calls; `pagetier.engine.core.EngineCore` and the tests' double keep it."""

    def add_request(self, request: EngineRequest) -> None: ...

    def abort(self, request_ids: Sequence[str]) -> object: ...

    def step(self) -> list[TokenOutput]: ...

    def has_work(self) -> bool: ...

    @property
    def waits_for_store(self) -> bool: ...

    def stats(self) -> dict[str, Any]: ...

    def ask(self, verb: str, fields: Mapping[str, Any], report: Report) -> None: ...

    def follow_events(self, wanted: bool) -> None: ...

    def take_events(self) -> tuple[list[tuple[Any, ...]], int]: ...

    def timelines(self, name: str) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """An engine ready to serve. close(timeout_s): write queued puts for at most that long, then let go of all.
    set_weights_version(version): use no KV of before; the encoded identity from now on.
    """

    core: Core
    ready: wire.Ready
    close: Callable[[float], None]
    set_weights_version: Callable[[str], bytes]


Factory = Callable[[Mapping[str, Any]], ServedEngine]


def load_factory(name: str) -> Factory:
    """The function `module:function`."""
    module, _, function = name.partition(":")
    return cast(Factory, getattr(importlib.import_module(module), function))


class EngineLink:
    """The engine's two sockets below `directory`: it binds the one for requests and connects to the one for outputs.

    Each side binds what it reads, so a stranger (of the same user: the directory is 0700) could only add messages.
    """

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context(io_threads=1)
        self._requests = self._context.socket(zmq.PULL)
        self._requests.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        self._requests.setsockopt(zmq.LINGER, 0)
        self._requests.bind(requests_endpoint(directory))
        self._outputs = self._context.socket(zmq.PUSH)
        self._outputs.setsockopt(zmq.SNDHWM, 0)  # the core thread never waits; output is bounded by max_tokens
        self._outputs.setsockopt(zmq.LINGER, 1000)
        self._outputs.connect(outputs_endpoint(directory))
        self._poller = zmq.Poller()
        self._poller.register(self._requests, zmq.POLLIN)
        self.num_dropped = 0  # malformed messages

    def watch(self, fd: int) -> None:
        """Let `wait` also end when `fd` becomes readable."""
        self._poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        self._poller.unregister(fd)

    def wait(self, timeout_ms: int) -> list[int]:
        """Sleep until a message, a watched descriptor or the time-out; the descriptors that are readable."""
        return [source for source, _ in self._poller.poll(timeout_ms) if isinstance(source, int)]

    def take(self) -> wire.Message | None:
        """The next message, None when there is none. Malformed ones are dropped and counted."""
        while True:
            try:
                frames = self._requests.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"engine message of {len(frames)} frames")
                return wire.decode(frames[0])
            except ProtocolError as error:
                self.num_dropped += 1
                logger.warning("dropped a message to the engine: %s", error)

    def send(self, message: wire.Message) -> None:
        self._outputs.send(wire.encode(message))

    def close(self) -> None:
        self._requests.close()
        self._outputs.close()
        self._context.term()


def requests_endpoint(directory: Path) -> str:
    return f"ipc://{directory / 'requests.sock'}"


def outputs_endpoint(directory: Path) -> str:
    return f"ipc://{directory / 'outputs.sock'}"


class EngineLoop:
    """drain -> step -> send, until told to leave. owner: core thread, except `begin_drain` (signal handler).

    lifeline: a descriptor whose end of file says that the API process is gone.
    """

    def __init__(self, engine: ServedEngine, link: EngineLink, shutdown_timeout_s: float, lifeline: int | None) -> None:
        self._engine, self._core, self._link = engine, engine.core, link
        self._shutdown_timeout_s = shutdown_timeout_s
        self._lifeline = lifeline
        self._open: set[str] = set()  # requests that have not ended
        self._end_s: float | None = None  # monotonic: by when everything is over, once leaving
        self._running_end_s = 0.0  # monotonic: until when running requests may go on, once leaving
        self._stalled = False
        self._follows = False  # somebody wants to hear of events
        self._answers: deque[wire.Answer] = deque()  # appended to by any thread, which then wakes the loop
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        self.orphaned = False  # nobody else will remove the sockets' folder

    def run(self) -> None:
        """Serve until shut down, drained or orphaned; then end what runs and close the engine."""
        if self._lifeline is not None:
            self._link.watch(self._lifeline)
        self._link.watch(self._wake_in)
        self._link.send(self._engine.ready)
        while not self._done():
            self._wait()
            self._drain()
            if not self._core.has_work():
                collect_at_rest()
            self._step()
            self._tell()
        self._leave()

    def close(self) -> None:
        """Let go of the pipe; nobody may report any more."""
        self._link.unwatch(self._wake_in)
        os.close(self._wake_in)
        os.close(self._wake_out)

    def begin_drain(self) -> None:
        """Refuse new requests, let running ones end for a while, then leave. Idempotent; safe in a signal handler."""
        if self._end_s is None:
            now = time.monotonic()
            self._running_end_s = now + RUNNING_SHARE * self._shutdown_timeout_s
            self._end_s = now + self._shutdown_timeout_s

    def _done(self) -> bool:
        return self._end_s is not None and (not self._open or time.monotonic() >= self._running_end_s)

    def _wait(self) -> None:
        if not self._core.has_work():
            timeout_ms = IDLE_POLL_MS if self._end_s is None else STALL_POLL_MS
            if self._follows:
                timeout_ms = min(timeout_ms, FOLLOW_POLL_MS)
        elif self._stalled:
            timeout_ms = STALL_POLL_MS
        else:
            timeout_ms = 0
        for fd in self._link.wait(timeout_ms):
            data = os.read(fd, 4096)
            if fd == self._lifeline and not data:
                logger.warning("the API process is gone; the engine ends")
                self._link.unwatch(fd)
                self.orphaned = True
                self._end_by(self._shutdown_timeout_s)

    def _end_by(self, timeout_s: float) -> None:
        self._running_end_s = now = time.monotonic()
        self._end_s = now + timeout_s

    def _drain(self) -> None:
        """Take in what was sent."""
        for _ in range(MAX_DRAIN):
            message = self._link.take()
            if message is None:
                return
            match message:
                case wire.Submit(request):
                    self._submit(request)
                case wire.Abort(request_ids):
                    self._abort(request_ids)
                case wire.StatsQuery(ticket):
                    self._link.send(wire.StatsAnswer(ticket, self._core.stats()))
                case wire.TimelineQuery(ticket, request_id):
                    self._link.send(wire.StatsAnswer(ticket, {"sequences": self._core.timelines(request_id)}))
                case wire.SetWeightsVersion(ticket, version):
                    self._link.send(wire.IdentityChanged(ticket, self._engine.set_weights_version(version)))
                case wire.Question(ticket, verb, fields):
                    self._core.ask(verb, fields, functools.partial(self._report, ticket))
                case wire.Follow(wanted):
                    self._follows = wanted
                    self._core.follow_events(wanted)
                case wire.Shutdown(timeout_s):
                    self._end_by(timeout_s)
                case _:
                    logger.warning("dropped a message to the engine: unexpected %s", type(message).__name__)

    def _report(self, ticket: int, fields: dict[str, Any], error: PagetierError | None) -> None:
        """Any thread: the answer to a question."""
        usage = isinstance(error, ConfigError)
        self._answers.append(wire.Answer(ticket, fields, "" if error is None else str(error) or "failed", usage))
        with contextlib.suppress(OSError):  # it is awake enough, or gone
            os.write(self._wake_out, b"a")

    def _tell(self) -> None:
        """Send what was asked for, and what came and went."""
        while self._answers:
            answer = self._answers.popleft()
            try:
                self._link.send(answer)
            except ProtocolError as error:
                self._link.send(wire.Answer(answer.ticket, {}, f"the answer is too long ({error}); ask for less"))
        if self._follows:
            events, num_lost = self._core.take_events()
            if events or num_lost:
                self._link.send(wire.Events(tuple(events), num_lost))

    def _submit(self, request: EngineRequest) -> None:
        if request.request_id in self._open:
            logger.warning("dropped a request: id %r is already running", request.request_id)
            return
        if self._end_s is not None:
            self._refuse(request.request_id, "the server is shutting down")
            return
        try:
            self._core.add_request(request)
        except PagetierError as error:
            self._refuse(request.request_id, str(error))
            return
        self._open.add(request.request_id)

    def _refuse(self, request_id: str, error: str) -> None:
        self._link.send(wire.Tokens((TokenOutput(request_id, (), finish_reason="error", error=error),)))

    def _abort(self, request_ids: Sequence[str]) -> None:
        mine = [request_id for request_id in request_ids if request_id in self._open]
        if mine:
            self._core.abort(mine)
            self._open.difference_update(mine)

    def _step(self) -> None:
        if not self._core.has_work():
            self._stalled = False
            return
        outputs = [output for output in self._core.step() if output.request_id in self._open]  # aborted ones are over
        self._stalled = not outputs and self._core.waits_for_store
        if not outputs:
            return
        self._open.difference_update(o.request_id for o in outputs if o.finish_reason is not None)
        self._link.send(wire.Tokens(tuple(outputs)))

    def _leave(self) -> None:
        """End what still runs with an error, write queued puts in the time that is left, close."""
        assert self._end_s is not None, "leaves only once told to"
        cut = tuple(self._open)
        if cut:
            self._core.abort(cut)
            error = "the server is shutting down"
            self._link.send(wire.Tokens(tuple(TokenOutput(i, (), finish_reason="error", error=error) for i in cut)))
            self._open.clear()
        while self._core.has_work() and time.monotonic() < self._end_s:  # steps and copies that are in flight
            self._core.step()
            self._link.wait(STALL_POLL_MS)
        self._engine.close(max(0.0, self._end_s - time.monotonic()))


def serve_engine(
    factory: str, config: Mapping[str, Any], directory: Path, shutdown_timeout_s: float, lifeline: int | None = None
) -> int:
    """Build an engine and serve it on the sockets below `directory` until told to leave; the exit status.

    Whatever goes wrong is sent as one line (`wire.Failed`) and logged; only bugs are logged with their traceback.
    """
    link = EngineLink(directory)
    try:
        engine = load_factory(factory)(config)
        if lifeline is not None:
            calm_the_collector()
        loop = EngineLoop(engine, link, shutdown_timeout_s, lifeline)
        with _SigtermDrains(loop, link, active=lifeline is not None):
            try:
                loop.run()
            finally:
                loop.close()
        if loop.orphaned:
            shutil.rmtree(directory, ignore_errors=True)
        return 0
    except PagetierError as error:
        link.send(wire.Failed(str(error), usage=isinstance(error, ConfigError)))
        return 1
    except Exception as error:  # the process or thread boundary
        logger.exception("the engine failed; open requests end with an error")
        link.send(wire.Failed(f"{type(error).__name__}: {error}", usage=False))
        return 1
    finally:
        link.close()


class _SigtermDrains:
    """While entered in a process of its own, SIGTERM begins the drain and wakes the loop's poll."""

    def __init__(self, loop: EngineLoop, link: EngineLink, active: bool) -> None:
        self._loop, self._link, self._active = loop, link, active

    def __enter__(self) -> None:
        if not self._active:
            return
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        signal.set_wakeup_fd(self._wake_out, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: self._loop.begin_drain())
        self._link.watch(self._wake_in)

    def __exit__(self, *_: object) -> None:
        if not self._active:
            return
        signal.set_wakeup_fd(-1)
        self._link.unwatch(self._wake_in)
        os.close(self._wake_in)
        os.close(self._wake_out)


def main() -> int:
    """The engine process: one JSON line on stdin says what to serve; stdin's end says that the parent is gone."""
    switch_often()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the API process decides
    order = json.loads(_read_line(sys.stdin.fileno()))
    logging.basicConfig(level=order["log_level"], format="%(levelname)s %(name)s: %(message)s")
    return serve_engine(
        order["factory"],
        order["config"],
        Path(order["directory"]),
        order["shutdown_timeout_s"],
        lifeline=sys.stdin.fileno(),
    )


def _read_line(fd: int) -> bytes:
    """One line, unbuffered: what follows on the descriptor is left to the poll."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            break
        line += byte
    return bytes(line)


if __name__ == "__main__":
    sys.exit(main())
