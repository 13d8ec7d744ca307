"""Who may ask: API key, admin token, loopback; and how much they may send.

Raises ApiError; knows no route. Secrets are compared in constant time and never shown.
"""

from __future__ import annotations

import hmac
import ipaddress

from fastapi import Request

from pagetier.engine.server.errors import ApiError

MAX_BODY_BYTES = 32 << 20  # a million tokens as JSON numbers are 7 MB
# A page in a browser on this machine, or a proxy on it, reaches loopback for somebody who is elsewhere.
FROM_ELSEWHERE = ("origin", "forwarded", "x-forwarded-for", "via")


def check_key(request: Request, api_key: str | None) -> None:
    """401 unless the request carries `api_key`; None lets everybody in."""
    if api_key is not None and not _bears(request, api_key):
        raise ApiError(
            401,
            "wrong or missing API key; send 'Authorization: Bearer KEY' with the server's --api-key",
            code="invalid_api_key",
        )


def check_admin(request: Request, admin_token: str | None, api_key: str | None) -> None:
    """401 unless the request carries `admin_token`; without one, 403 for all but local programs (and the API key
    counts)."""
    if admin_token is not None:
        if not _bears(request, admin_token):
            raise ApiError(
                401,
                "wrong or missing admin token; send 'Authorization: Bearer TOKEN' with the server's --admin-token",
                code="invalid_admin_token",
            )
        return
    if not _is_local(request):
        raise ApiError(
            403,
            "admin routes answer local programs only, straight over loopback; start the server with --admin-token",
            code="admin_not_allowed",
        )
    check_key(request, api_key)


def _bears(request: Request, secret: str) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), secret.encode())


def _is_local(request: Request) -> bool:
    """Whether both ends of the connection are loopback, and nobody says that it was made for another."""
    server = request.scope.get("server")
    client = request.client.host if request.client is not None else ""
    straight = not any(name in request.headers for name in FROM_ELSEWHERE)
    return straight and server is not None and is_loopback(client) and is_loopback(server[0])


def is_loopback(host: str) -> bool:
    """Whether an address, as a socket tells it, is this machine's loopback."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


async def read_body(request: Request) -> bytes:
    """The whole body; 413 beyond MAX_BODY_BYTES."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body exceeds {MAX_BODY_BYTES} bytes")
    return bytes(data)
