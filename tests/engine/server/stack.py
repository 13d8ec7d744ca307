"""The server's real stack over the engine double, in a thread of the test's process: engine, link, app, HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from pagetier.engine.metrics import ServerMetrics
from pagetier.engine.server.app import Service, create_app
from pagetier.engine.server.engine_client import EngineClient
from pagetier.engine.server.engine_host import EngineHost, EngineOrder, ProcessHost, ThreadHost
from pagetier.engine.server.preparation import Preparer
from pagetier.engine.server.serve import bind
from tests.engine.server.double import build_tokenizer

FACTORY = "tests.engine.server.double:build"
ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Stack:
    """A running server. `host` is the engine's; `service` may be read from the test's thread."""

    url: str
    http: httpx.Client
    service: Service
    host: EngineHost
    loop: asyncio.AbstractEventLoop

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON of a successful answer."""
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        fields: dict[str, Any] = answer.json()
        return fields

    def stats(self) -> dict[str, Any]:
        fields: dict[str, Any] = self.http.get("/stats").json()
        return fields


@contextlib.contextmanager
def running_stack(
    *,
    process: bool = False,
    api_key: str | None = None,
    admin_token: str | None = None,
    factory: str = FACTORY,
    **config: Any,
) -> Iterator[Stack]:
    """Start everything on a free port; end it in order."""
    order = EngineOrder(config, factory, shutdown_timeout_s=2.0)
    box: dict[str, Any] = {}
    up = threading.Event()

    async def main() -> None:
        host: EngineHost = ProcessHost(order) if process else ThreadHost(order)
        stop = asyncio.Event()
        box.update({"loop": asyncio.get_running_loop(), "stop": stop, "host": host})
        try:
            async with EngineClient(host) as client:
                tokenizer = build_tokenizer()
                preparer = Preparer(tokenizer, lambda: client.ready)
                names, secrets = ("double", "alias"), (api_key, admin_token)
                service = Service(client, tokenizer, preparer, ServerMetrics("double"), names, *secrets)
                listener = bind("127.0.0.1", 0)
                server = uvicorn.Server(uvicorn.Config(create_app(service), log_level="warning", lifespan="off"))
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                box.update({"port": listener.getsockname()[1], "service": service})
                up.set()
                await stop.wait()
                server.should_exit = True
                await serving
                preparer.close()
        finally:
            up.set()

    with importable():
        thread = threading.Thread(target=lambda: asyncio.run(main()), name="stack")
        thread.start()
        up.wait(30)
    try:
        url = f"http://127.0.0.1:{box['port']}"
        with httpx.Client(base_url=url, timeout=20) as http:
            yield Stack(url, http, box["service"], box["host"], box["loop"])
    finally:
        if "loop" in box:
            box["loop"].call_soon_threadsafe(box["stop"].set)
        thread.join(30)


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Let child processes import `tests`."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT) if before is None else f"{ROOT}{os.pathsep}{before}"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
