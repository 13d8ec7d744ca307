"""`pagetier serve` over the engine double, as a program: prints its URL, ends on SIGTERM. Argument: JSON options."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from pagetier.engine.server.engine_host import EngineOrder
from pagetier.engine.server.serve import ServeOptions, bind, serve
from tests.engine.server.double import build_tokenizer

if __name__ == "__main__":
    given: dict[str, Any] = json.loads(sys.argv[1])
    timeout_s = given.pop("shutdown_timeout_s", 5.0)
    order = EngineOrder(given, "tests.engine.server.double:build", timeout_s)
    options = ServeOptions(order, ("double",), shutdown_timeout_s=timeout_s)
    listener = bind("127.0.0.1", 0)
    asyncio.run(serve(options, build_tokenizer, listener, lambda url, ready: print(url, flush=True)))  # noqa: T201
