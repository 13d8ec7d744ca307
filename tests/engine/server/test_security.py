"""Who gets an answer: the key guards every route but two, admin routes their own, and secrets are never shown."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.routing import Route

from pagetier.engine.server.app import create_app
from tests.engine.server.stack import Stack, running_stack

OPEN = {"/health", "/ready"}
KEY = {"Authorization": "Bearer the key"}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Stack]:
    with running_stack(api_key="the key") as stack:
        yield stack


def routes(stack: Stack) -> list[tuple[str, str]]:
    """Every verb and path of the application."""
    app = create_app(stack.service)
    return [
        (verb, route.path.replace("{name:path}", "double"))
        for route in app.routes
        if isinstance(route, Route)
        for verb in sorted((route.methods or set()) - {"HEAD"})
    ]


def test_the_key_guards_every_route_but_health_and_ready(guarded: Stack) -> None:
    listed = routes(guarded)
    assert {path for _, path in listed} >= OPEN | {"/stats", "/metrics", "/v1/models", "/admin/weights_version"}
    for verb, path in listed:
        for headers in ({}, {"Authorization": "Bearer another"}, {"Authorization": "the key"}):
            answer = guarded.http.request(verb, path, headers=headers, json={} if verb == "POST" else None)
            assert answer.status_code == (200 if path in OPEN else 401), (verb, path)
            assert "the key" not in answer.text
        if path not in OPEN and verb == "GET" and path != "/events":
            assert guarded.http.get(path, headers=KEY).status_code in (200, 400), path
