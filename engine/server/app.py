"""The HTTP face: OpenAI's routes, health, stats and metrics.

Owns routes and what a request passes before it is generated: key, model, queue. Knows the engine only through
`EngineClient`, and text only through deltas.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from pagetier.engine.metrics import ServerMetrics
from pagetier.engine.server.admin import add_admin_routes
from pagetier.engine.server.asking import asking
from pagetier.engine.server.cache_routes import CacheDesk, add_cache_routes
from pagetier.engine.server.engine_client import EngineClient, EngineDeadError
from pagetier.engine.server.errors import ApiError, engine_dead, queue_full, shutting_down
from pagetier.engine.server.event_hub import EventHub
from pagetier.engine.server.generation import Generation, TextOptions
from pagetier.engine.server.guards import check_key, read_body
from pagetier.engine.server.preparation import PreparedRequest, Preparer
from pagetier.engine.server.protocol import ChatCompletionRequest, CompletionRequest, SharedFields, parse_body
from pagetier.engine.server.responses import Answer, ChatAnswer, CompletionAnswer, dump, usage_body
from pagetier.engine.tokenizer import Tokenizer
from pagetier.kvstore.identity import CacheIdentity, domain_of

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 15.0  # answers come between steps; one of 512 tokens was seen to take 5 s on two busy cores
HEALTH_TIMEOUT_S = 2.0  # within the five seconds in which /health must tell
PING_S = 15.0  # a comment line after so much silence keeps proxies from closing a stream
PING = b": ping\n\n"

TIER_FIELDS = (
    "hit_blocks",
    "hit_tokens",
    "hit_rate",
    "blocks",
    "bytes",
    "capacity_bytes",
    "evictions",
    "errors",
    "corrupt",
    "quarantined",
    "scrubbed_bytes",
    "read_bytes",
    "written_bytes",
    "breaker",
)


@dataclass(slots=True)
class Service:
    """What the routes share. owner: event loop thread."""

    client: EngineClient
    tokenizer: Tokenizer
    preparer: Preparer
    metrics: ServerMetrics
    model_names: tuple[str, ...]
    api_key: str | None = None
    admin_token: str | None = None
    draining: bool = False
    hub: EventHub = field(init=False)
    start_s: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.hub = EventHub(self.client)

    def admit(self, body: SharedFields, num_sequences: int) -> str:
        """The model's name for the answer. Raises ApiError when the request cannot be taken on."""
        if self.draining:
            raise shutting_down()
        if self.client.error is not None:
            raise engine_dead(self.client.error)
        if body.model is not None and body.model not in self.model_names:
            known = ", ".join(self.model_names)
            raise ApiError(
                404, f"model {body.model!r} does not exist; served: {known}", param="model", code="model_not_found"
            )
        ready = self.client.ready
        limit = ready.max_num_seqs + ready.max_num_queued_reqs
        if num_sequences > limit:
            raise ApiError(400, f"{num_sequences} sequences asked for at once; allowed: {limit}", param="n")
        backlog = self.client.backlog
        excess = backlog.num_open + num_sequences - limit
        if excess > 0:
            raise queue_full(
                f"{backlog.num_open} sequences are running or waiting",
                limit,
                "--max-num-seqs plus --max-num-queued-reqs",
                backlog.retry_for_sequences_s(excess),
            )
        return body.model or self.model_names[0]

    def admit_prompts(self, prepared: PreparedRequest) -> None:
        """Raises ApiError when too many prompt tokens wait already. One request alone is never too long to wait."""
        backlog, limit = self.client.backlog, self.client.ready.max_num_queued_tokens
        excess = backlog.num_tokens + prepared.num_prompt_tokens - limit
        if backlog.num_tokens and excess > 0:
            raise queue_full(
                f"{backlog.num_tokens} prompt tokens wait to be computed, {prepared.num_prompt_tokens} would be added",
                limit,
                "--max-num-queued-tokens",
                backlog.retry_for_tokens_s(excess),
            )

    def account(self, generation: Generation) -> None:
        """Add an ended request to the metrics."""
        timing, usage = generation.timing, generation.usage
        self.metrics.request_ended(
            arrival_s=timing.arrival_s,
            first_token_s=timing.first_token_s,
            end_s=timing.end_s if timing.end_s is not None else time.monotonic(),
            gaps_s=timing.token_gaps_s,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            finish_reasons=generation.finish_reasons,
        )


def create_app(service: Service) -> FastAPI:
    """The application over a started engine. Starts and closes nothing."""
    app = FastAPI(title="Pagetier", docs_url=None, redoc_url=None, openapi_url=None)
    _add_error_shapes(app, service)
    _add_openai_routes(app, service)
    _add_status_routes(app, service)
    add_admin_routes(app, service.client, service.admin_token, service.api_key)
    secrets = service.api_key, service.admin_token
    add_cache_routes(app, CacheDesk(service.client, service.tokenizer, service.preparer, service.hub, *secrets))
    return app


def _add_error_shapes(app: FastAPI, service: Service) -> None:
    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError), "registered for it"
        service.metrics.answered(_route(request), error.status)
        return JSONResponse(error.body, error.status, headers=error.headers)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for it"
        return JSONResponse(
            ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").body, error.status_code
        )

    async def validation_error(request: Request, error: Exception) -> Response:
        return JSONResponse(ApiError(400, f"{request.url.path}: {error}").body, 400)

    async def bug(request: Request, error: Exception) -> Response:
        return JSONResponse(ApiError(500, f"internal error: {type(error).__name__}; see the server's log").body, 500)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(Exception, bug)


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        check_key(request, service.api_key)
        return JSONResponse({"object": "list", "data": [_model_card(service, name) for name in service.model_names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> Response:
        check_key(request, service.api_key)
        if name not in service.model_names:
            raise ApiError(404, f"model {name!r} does not exist", param="model", code="model_not_found")
        return JSONResponse(_model_card(service, name))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        check_key(request, service.api_key)
        body = parse_body(CompletionRequest, await read_body(request))
        model = service.admit(body, body.num_sequences)
        request_id = f"cmpl-{uuid.uuid4().hex}"
        answer = CompletionAnswer(service.tokenizer, request_id, model, body.logprobs is not None)
        prepared = await service.preparer.completion(body, request_id)
        return await _respond(service, request, body, prepared, answer)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        check_key(request, service.api_key)
        body = parse_body(ChatCompletionRequest, await read_body(request))
        model = service.admit(body, body.n or 1)
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        answer = ChatAnswer(service.tokenizer, request_id, model, bool(body.logprobs))
        prepared = await service.preparer.chat(body, request_id)
        return await _respond(service, request, body, prepared, answer)


def _add_status_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 while the engine lives, with the breaker of each tier; 503 once it is dead or answers nothing."""
        if service.client.error is not None:
            return JSONResponse({"status": "dead", "error": service.client.error}, 503)
        try:
            stats = await service.client.stats(HEALTH_TIMEOUT_S)
        except EngineDeadError as error:
            return JSONResponse({"status": "dead", "error": str(error)}, 503)
        except TimeoutError:
            if service.client.hung():
                return JSONResponse({"status": "hung", "error": "the engine does not answer"}, 503)
            return JSONResponse({"status": "ok", "engine": "busy"})
        breakers = {name: tier.get("breaker") for name, tier in stats["tiers"].items() if name != "device"}
        degraded = any(state not in (None, "closed") for state in breakers.values())
        return JSONResponse({"status": "degraded" if degraded else "ok", "tiers": breakers})

    @app.get("/ready")
    async def ready() -> Response:
        """200 while new requests are taken on."""
        if service.client.error is not None or service.draining:
            return JSONResponse({"ready": False}, 503)
        return JSONResponse({"ready": True})

    @app.get("/stats")
    async def stats(request: Request) -> Response:
        check_key(request, service.api_key)
        with asking(STATS_TIMEOUT_S):
            counters = await service.client.stats(STATS_TIMEOUT_S)
        return JSONResponse(
            {
                "model": service.model_names[0],
                "domain": service.client.ready.domain.hex(),
                "uptime_s": round(time.monotonic() - service.start_s, 3),
                "lookup": counters["lookup"],
                "tiers": {
                    name: {field_name: tier.get(field_name) for field_name in TIER_FIELDS}
                    for name, tier in counters["tiers"].items()
                },
                "preemptions": counters["preemptions"],
                "resumptions": counters["resumptions"],
                "harmful_hits": counters["harmful_hits"],
                "given_up_loads": counters["given_up_loads"],
                "verify": counters["verify"],
            }
        )

    @app.get("/v1/requests/{request_id}")
    async def timelines(request_id: str, request: Request) -> Response:
        """What happened to a request under way or one of the last that ended: queued, computed, preempted, loaded."""
        check_key(request, service.api_key)
        with asking(STATS_TIMEOUT_S):
            sequences = await service.client.timelines(request_id, STATS_TIMEOUT_S)
        if not sequences:
            raise ApiError(404, f"request {request_id!r} is not known, or ended too long ago", code="request_not_found")
        return JSONResponse({"id": request_id, "sequences": sequences})

    @app.get("/identity")
    async def identity(request: Request) -> Response:
        """What this server's KV depends on, field by field, for `pagetier diff-identity`."""
        check_key(request, service.api_key)
        encoded = service.client.ready.identity
        fields = CacheIdentity.decode(encoded).as_dict()
        return JSONResponse({"domain": domain_of(encoded).hex(), "identity": fields, "encoded": encoded.hex()})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        check_key(request, service.api_key)
        try:
            counters = await service.client.stats(STATS_TIMEOUT_S)
        except (EngineDeadError, TimeoutError):
            counters = None
        return Response(service.metrics.scrape(counters), media_type="text/plain; version=0.0.4; charset=utf-8")


def _model_card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "pagetier",
        "max_model_len": service.client.ready.max_len_tokens,
    }


def _route(request: Request) -> str:
    """The route's pattern, never what a client wrote: metrics must not grow with requests."""
    route = request.scope.get("route")
    return str(getattr(route, "path", "other"))


def _options(body: SharedFields) -> TextOptions:
    return TextOptions(body.stop_strings, body.skip_special_tokens, body.include_stop_str_in_output)


async def _respond(
    service: Service, request: Request, body: SharedFields, prepared: PreparedRequest, answer: Answer
) -> Response:
    service.admit(body, len(prepared.sequences))  # again: much may have happened while a long prompt was prepared
    service.admit_prompts(prepared)
    generation = Generation(service.client, service.tokenizer, prepared, _options(body))
    service.metrics.answered(_route(request), 200)
    if body.stream:
        events = _events(service, body, generation, answer)
        return _GenerationStream(events, lambda: _end(service, generation))
    try:
        whole = await _until_disconnect(request, _fold(generation, answer))
    finally:
        _end(service, generation)
    return JSONResponse(whole)


def _end(service: Service, generation: Generation) -> None:
    generation.close()
    service.account(generation)


async def _fold(generation: Generation, answer: Answer) -> dict[str, Any]:
    async for delta in generation.deltas():
        answer.add(delta)
    return dump(answer.whole(), usage_body(generation.usage), with_usage=True)


async def _until_disconnect(request: Request, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """The result of `work`, which is cancelled when the client goes away."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "the client closed the connection")
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _events(service: Service, body: SharedFields, generation: Generation, answer: Answer) -> AsyncIterator[bytes]:
    """The answer as server-sent events. An error after the first byte becomes the last event but [DONE]."""
    try:
        while True:
            try:
                delta = await generation.next(PING_S)
            except TimeoutError:
                yield PING
                continue
            if delta is None:
                break
            chunk = answer.chunk(delta)
            if chunk is not None:
                usage = usage_body(generation.usage) if body.continuous_usage else None
                yield _event(dump(chunk, usage, with_usage=body.include_usage))
        if body.include_usage:
            yield _event(dump(answer.usage_chunk(), usage_body(generation.usage), with_usage=True))
    except ApiError as error:
        yield _event(error.body)
    yield b"data: [DONE]\n\n"


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class _GenerationStream(StreamingResponse):
    """A stream that ends its generation however it ends itself: to its end, by disconnect, by cancellation."""

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()
