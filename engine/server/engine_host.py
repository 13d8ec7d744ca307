"""Where the engine's loop runs: in a process of its own (the rule) or in a thread of the API process.

Owns starting, watching and ending it; knows no message.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pagetier.engine.server.engine_process import DEFAULT_FACTORY, serve_engine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """What to serve. config: JSON-able, for `factory` (module:function) alone to read."""

    config: Mapping[str, Any]
    factory: str = DEFAULT_FACTORY
    shutdown_timeout_s: float = 10.0
    log_level: int = logging.WARNING


class EngineHost(Protocol):
    """One engine's life. owner: event loop thread."""

    async def start(self, directory: Path) -> None:
        """Begin; readiness and failures arrive as messages."""

    async def wait(self) -> str:
        """Sleep until it ended; how, in words."""

    def kill(self) -> None:
        """End it at once, where that can be done."""


class ProcessHost:
    """A child process. It holds our end of its stdin as a lifeline: when this process dies, it ends as well."""

    def __init__(self, order: EngineOrder) -> None:
        self._order = order
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, directory: Path) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "pagetier.engine.server.engine_process", stdin=asyncio.subprocess.PIPE
        )
        order = {
            "factory": self._order.factory,
            "config": dict(self._order.config),
            "directory": str(directory),
            "shutdown_timeout_s": self._order.shutdown_timeout_s,
            "log_level": self._order.log_level,
        }
        assert self._process.stdin is not None, "started with a pipe"
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        try:
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            logger.error("the engine process ended before it read its orders")

    async def wait(self) -> str:
        assert self._process is not None, "wait comes after start"
        code = await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        return f"engine process killed by signal {-code}" if code < 0 else f"engine process ended with status {code}"

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


class ThreadHost:
    """A thread of this process: for debuggers and small scripts. It shares the interpreter lock with the server."""

    def __init__(self, order: EngineOrder) -> None:
        self._order = order
        self._ended = asyncio.Event()
        self._thread: threading.Thread | None = None

    async def start(self, directory: Path) -> None:
        loop = asyncio.get_running_loop()

        def run() -> None:
            try:
                serve_engine(self._order.factory, self._order.config, directory, self._order.shutdown_timeout_s)
            finally:
                try:
                    loop.call_soon_threadsafe(self._ended.set)
                except RuntimeError:  # the event loop is closed: nobody waits any more
                    logger.debug("the engine thread outlived the event loop")

        self._thread = threading.Thread(target=run, name="pagetier-engine", daemon=True)
        self._thread.start()

    async def wait(self) -> str:
        await self._ended.wait()
        assert self._thread is not None, "wait comes after start"
        self._thread.join()
        return "engine thread ended"

    def kill(self) -> None:
        """A thread cannot be killed; it ends with the process."""
