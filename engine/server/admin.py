"""Admin routes: what changes the server for everybody. Behind `guards.check_admin`."""

from __future__ import annotations

import json
import uuid
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from pagetier.engine.identity import checked_weights_version
from pagetier.engine.server.asking import asking
from pagetier.engine.server.engine_client import EngineClient
from pagetier.engine.server.errors import ApiError
from pagetier.engine.server.guards import check_admin, read_body
from pagetier.kvstore.errors import ConfigError

SET_TIMEOUT_S = 60.0  # it waits for the steps under way; a whole prompt in one of them takes tens of seconds


def add_admin_routes(app: FastAPI, client: EngineClient, admin_token: str | None, api_key: str | None) -> None:
    @app.post("/admin/weights_version")
    async def weights_version(request: Request) -> Response:
        """The weights were changed in place: from now on no KV of before is used, on the device or in any tier."""
        check_admin(request, admin_token, api_key)
        version = _version(await read_body(request))
        with asking(SET_TIMEOUT_S, "it will still do it"):
            await client.set_weights_version(version, SET_TIMEOUT_S)
        return JSONResponse({"weights_version": version, "domain": client.ready.domain.hex()})


def _version(body: bytes) -> str:
    """What `{"weights_version": ...}` says; a new UUID where it says nothing. Raises ApiError."""
    try:
        fields: Any = json.loads(body) if body.strip() else {}
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body is a JSON {type(fields).__name__}; allowed: an object")
    unknown = sorted(fields.keys() - {"weights_version"})
    if unknown:
        raise ApiError(400, f"unknown field {unknown[0]!r}; known: weights_version", param=unknown[0])
    given = fields.get("weights_version")
    if given == "":  # an unset variable of a script; it would name the weights that the server started with
        raise ApiError(400, "weights_version is empty; leave it out for a new one", param="weights_version")
    try:
        return str(uuid.uuid4()) if given is None else checked_weights_version(given)
    except ConfigError as error:
        raise ApiError(400, str(error), param="weights_version") from None
