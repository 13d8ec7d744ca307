"""What is cached, where, and for how long: /query for everybody who may ask for completions; /top, /pins, /pin, /unpin,
/purge and /events for administrators, since they show or change what is everybody's.

Knows the engine through `EngineClient`. A question about a prompt is asked below the root of its `cache_salt`, so that
nobody learns of another tenant's prompts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from pagetier.engine.server.asking import asking
from pagetier.engine.server.cache_protocol import (
    PinFields,
    PrefixFields,
    PurgeFields,
    QueryFields,
    UnpinFields,
    from_query_string,
    parse_fields,
    parse_key,
)
from pagetier.engine.server.engine_client import EngineClient
from pagetier.engine.server.errors import ApiError
from pagetier.engine.server.event_hub import EventHub
from pagetier.engine.server.guards import check_admin, check_key, read_body
from pagetier.engine.server.preparation import Preparer
from pagetier.engine.tokenizer import Tokenizer
from pagetier.kvstore.identity import CacheIdentity

ASK_TIMEOUT_S = 15.0
PURGE_TIMEOUT_S = 60.0
DOCTOR_TIMEOUT_S = 60.0
TOP_TOKENS = 64  # of a prefix, that are shown as text
EVENT_PING_S = 15.0


@dataclass(frozen=True, slots=True)
class CacheDesk:
    """What the routes below share. owner: event loop thread."""

    client: EngineClient
    tokenizer: Tokenizer
    preparer: Preparer
    hub: EventHub
    api_key: str | None
    admin_token: str | None

    async def ask(self, verb: str, fields: dict[str, Any], timeout_s: float = ASK_TIMEOUT_S) -> dict[str, Any]:
        """The engine's answer. Raises ApiError."""
        with asking(timeout_s):
            return await self.client.ask(verb, fields, timeout_s)

    async def prefix(self, fields: PrefixFields) -> dict[str, Any]:
        """The prompt of a question as the engine wants it."""
        asked = await self.preparer.prefix(fields)
        return {"root": asked.root, "tokens": asked.tokens}

    def text(self, packed: bytes, max_tokens: int | None = None) -> str:
        """The text of tokens (u32 little-endian)."""
        ids = np.frombuffer(packed, "<u4")[:max_tokens].tolist()
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def check_admin(self, request: Request) -> None:
        check_admin(request, self.admin_token, self.api_key)


def add_cache_routes(app: FastAPI, desk: CacheDesk) -> None:
    """Register the routes."""
    _add_questions(app, desk)
    _add_changes(app, desk)

    @app.get("/events")
    async def events(request: Request) -> Response:
        """KV events from now on, one JSON object a line; an empty line now and then while nothing happens."""
        desk.check_admin(request)
        return StreamingResponse(_event_lines(desk.hub), media_type="application/x-ndjson")


def _add_questions(app: FastAPI, desk: CacheDesk) -> None:
    async def answer(fields: QueryFields) -> Response:
        if fields.keys is not None:
            told = await desk.ask("query_keys", {"keys": [parse_key(text) for text in fields.keys]})
        else:
            told = await desk.ask("query", await desk.prefix(fields))
        for block in told["blocks"]:
            block["text"] = desk.text(block.pop("token_ids"))
        return JSONResponse({"domain": desk.client.ready.domain.hex(), **told})

    @app.get("/query")
    async def query(request: Request) -> Response:
        """Where each block of a prompt is; for short prompts, by hand."""
        check_key(request, desk.api_key)
        pairs = from_query_string(list(request.query_params.multi_items()))
        return await answer(parse_fields(QueryFields, pairs))

    @app.post("/query")
    async def post_query(request: Request) -> Response:
        """The same, for prompts of any length."""
        check_key(request, desk.api_key)
        return await answer(parse_fields(QueryFields, await read_body(request)))

    @app.get("/top")
    async def top(request: Request, limit: int = 20) -> Response:
        """The hottest prefixes as a forest, with the beginning of their text."""
        desk.check_admin(request)
        told = await desk.ask("top", {"limit": limit})
        for prefix in told["prefixes"]:
            _add_text(desk, prefix)
        return JSONResponse({"domain": desk.client.ready.domain.hex(), **told})

    @app.get("/doctor")
    async def doctor(request: Request) -> Response:
        """How fast each tier is now, and what its counters say; a few blocks are written and removed for that."""
        desk.check_admin(request)
        told = await desk.ask("doctor", {}, DOCTOR_TIMEOUT_S)
        with asking(ASK_TIMEOUT_S):
            stats = await desk.client.stats(ASK_TIMEOUT_S)
        ready = desk.client.ready
        tiers = {name: {**stats["tiers"].get(name, {}), **told["tiers"].get(name, {})} for name in ready.tiers}
        identity = CacheIdentity.decode(ready.identity).as_dict()
        return JSONResponse({"domain": ready.domain.hex(), "identity": identity, **told, "tiers": tiers})

    @app.get("/pins")
    async def pins(request: Request) -> Response:
        desk.check_admin(request)
        return JSONResponse(await desk.ask("pins", {}))


def _add_text(desk: CacheDesk, prefix: dict[str, Any]) -> None:
    prefix["text"] = desk.text(prefix.pop("token_ids"), TOP_TOKENS)
    for child in prefix["children"]:
        _add_text(desk, child)


def _add_changes(app: FastAPI, desk: CacheDesk) -> None:
    def route(path: str, change: Callable[[bytes], Awaitable[dict[str, Any]]]) -> None:
        @app.post(path)
        async def changed(request: Request) -> Response:
            desk.check_admin(request)
            return JSONResponse(await change(await read_body(request)))

    async def pin(body: bytes) -> dict[str, Any]:
        fields = parse_fields(PinFields, body)
        asked: dict[str, Any] = {"ttl_s": fields.ttl_s, "tiers": fields.tiers}
        asked |= {"key": parse_key(fields.keys[0])} if fields.keys is not None else await desk.prefix(fields)
        return await desk.ask("pin", asked)

    async def unpin(body: bytes) -> dict[str, Any]:
        fields = parse_fields(UnpinFields, body)
        if fields.num_prompts:
            return await desk.ask("unpin", await desk.prefix(fields))
        return await desk.ask("unpin", {"ids": fields.ids})

    async def purge(body: bytes) -> dict[str, Any]:
        fields = parse_fields(PurgeFields, body)
        ready = desk.client.ready
        if fields.domain is not None and not ready.domain.hex().startswith(fields.domain.lower()):
            raise ApiError(400, f"domain: this server's is {ready.domain.hex()}; what is another's is purged offline")
        asked: dict[str, Any] = {"tiers": fields.tiers, "known_tiers": list(ready.tiers)}
        if fields.num_prompts:
            asked |= await desk.prefix(fields)
        elif fields.keys is not None:
            asked["keys"] = [parse_key(text) for text in fields.keys]
        if not fields.num_prompts and fields.cache_salt is not None:
            asked["root"] = desk.preparer.root(fields.cache_salt)
        return await desk.ask("purge", asked, PURGE_TIMEOUT_S)

    route("/pin", pin)
    route("/unpin", unpin)
    route("/purge", purge)


async def _event_lines(hub: EventHub) -> AsyncIterator[str]:
    with hub.followed() as queue:
        while True:
            try:
                async with asyncio.timeout(EVENT_PING_S):
                    yield json.dumps(await queue.get()) + "\n"
            except TimeoutError:
                yield "\n"
