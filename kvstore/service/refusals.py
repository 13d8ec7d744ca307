"""What becomes of a request that cannot be answered: a gRPC status, here and nowhere else.

Every rpc of one service is wrapped: bytes that are no message are INVALID_ARGUMENT, errors that this project raises on
purpose have the codes below, and a bug is INTERNAL with its trace in the log.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from pagetier.kvstore.errors import CapacityError, ClosedError, ConfigError, PagetierError, ProtocolError
from pagetier.kvstore.service.messages import TooLarge

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext
Handler = grpc.RpcMethodHandler


class UnknownNumber(ProtocolError):
    """A session or a ticket that there is not."""


CODES = (
    (UnknownNumber, grpc.StatusCode.NOT_FOUND),
    (TooLarge, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
    (CapacityError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ClosedError, grpc.StatusCode.UNAVAILABLE),
    (ConfigError, grpc.StatusCode.FAILED_PRECONDITION),
    (PagetierError, grpc.StatusCode.INTERNAL),
)


class RefusingInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the rpcs of `service`, a full name; leaves those of others alone."""

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefix):
            return handler
        return _wrapped(handler)


def _wrapped(handler: Any) -> Handler[Any, Any]:
    """The same rpc, given its requests as bytes."""

    def parsed(data: bytes) -> Any:
        try:
            return handler.request_deserializer(data)
        except DecodeError:
            raise ProtocolError("these bytes are not the message that this call takes") from None

    async def parsed_all(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in requests:
            yield parsed(data)

    async def answer(data: bytes, context: Context[Any, Any]) -> Any:
        try:
            return await handler.unary_unary(parsed(data), context)
        except Exception as error:  # the connection's boundary: its client is told
            await _refuse(context, error)

    async def stream(given: Any, context: Context[Any, Any]) -> AsyncIterator[Any]:
        try:
            if handler.request_streaming:
                replies = handler.stream_stream(parsed_all(given), context)
            else:
                replies = handler.unary_stream(parsed(given), context)
            async with contextlib.aclosing(replies):
                async for reply in replies:
                    yield reply
        except Exception as error:  # the connection's boundary: its client is told
            await _refuse(context, error)

    serializer = handler.response_serializer
    if not handler.response_streaming:
        return grpc.unary_unary_rpc_method_handler(answer, None, serializer)
    make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
    return make(stream, None, serializer)


async def _refuse(context: Context[Any, Any], error: Exception) -> NoReturn:
    code = next((code for kind, code in CODES if isinstance(error, kind)), None)
    if code is None:
        logger.exception("a call of the store service failed; its client is told so")
        await context.abort(grpc.StatusCode.INTERNAL, f"the store failed ({type(error).__name__}); see its log")
    await context.abort(code, str(error))
    raise AssertionError("abort raises")
