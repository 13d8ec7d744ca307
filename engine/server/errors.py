"""Errors as OpenAI's clients expect them: an HTTP status and {"error": {message, type, param, code}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagetier.kvstore.errors import PagetierError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(PagetierError):
    """A request that ends with an HTTP error. param: the field at fault. code: OpenAI's word for it, if any."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def unsupported(param: str, message: str) -> ApiError:
    """A field whose effect this server does not have: refused, because ignoring it would change the answer."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def invalid(param: str, reason: str) -> ApiError:
    """A value that cannot be used: `param` and why."""
    return ApiError(400, f"{param}: {reason}", param=param)


def queue_full(what: str, limit: int, flags: str, retry_s: int) -> ApiError:
    """what: is there already, in words. flags: that set the limit."""
    return ApiError(
        503,
        f"the queue is full: {what}, allowed: {limit} ({flags}); try again in {retry_s} s",
        code="queue_full",
        headers={"Retry-After": str(retry_s)},
    )


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})


def engine_dead(reason: str) -> ApiError:
    return ApiError(503, f"the engine died: {reason}; restart the server", code="engine_dead")


def engine_silent(timeout_s: float, consequence: str = "try again") -> ApiError:
    return ApiError(503, f"the engine did not answer within {timeout_s:g} s; {consequence}", code="engine_silent")


def tiers_hang(reason: str) -> ApiError:
    """reason: the engine's line. A tier's breaker tries it again after 30 s at the latest."""
    return ApiError(503, reason, code="kv_tiers_hang", headers={"Retry-After": "30"})
