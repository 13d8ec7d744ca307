"""Who gets an answer: the key guards every route but two, admin routes their own, and secrets are never shown."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from pagetier.engine.server.app import create_app
from tests.engine.server.cached_engine import FACTORY
from tests.engine.server.stack import Stack, running_stack
from tests.lint.source_tree import product_files, relative, tree_of

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
            assert guarded.http.get(path, headers=KEY).status_code in (200, 400, 404), path


ADMIN = {"/admin/weights_version", "/top", "/pins", "/pin", "/unpin", "/purge", "/events", "/doctor"}


def test_admin_routes_ask_for_the_admin_token_and_nothing_less() -> None:
    with running_stack(api_key="the key", admin_token="the token") as stack:
        for verb, path in routes(stack):
            if path in OPEN:
                continue
            expected = 401 if path in ADMIN else 200
            body: dict[str, Any] | None = {} if verb == "POST" else None
            answer = stack.http.request(verb, path, headers=KEY, json=body)
            assert answer.status_code in (expected, 400, 404), (verb, path, answer.status_code)
            assert (answer.status_code == 401) is (path in ADMIN), path
            forwarded = stack.http.request(verb, path, headers={"Origin": "http://page.example"}, json=body)
            assert forwarded.status_code == 401


def test_a_page_or_a_proxy_on_the_machine_is_no_administrator() -> None:
    with running_stack() as stack:
        for verb, path in routes(stack):
            if path in ADMIN:
                for header in ("Origin", "X-Forwarded-For"):
                    answer = stack.http.request(verb, path, headers={header: "x"}, json={} if verb == "POST" else None)
                    assert answer.status_code == 403, (verb, path)


def test_what_a_server_makes_is_the_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0o000)  # the most careless of users
    try:
        paths: dict[str, Any] = {"nvme_path": str(tmp_path / "nvme"), "pins_path": str(tmp_path / "pins" / "pins")}
        with running_stack(factory=FACTORY, **paths) as stack:
            stack.post("/v1/completions", {"prompt": "abcdefghijklmnop", "max_tokens": 1})
            stack.post("/pin", {"prompt": "abcdefgh"})
            made = [stack.service.client.directory, *stack.service.client.directory.rglob("*")]
            made += [path for folder in (tmp_path / "nvme", tmp_path / "pins") for path in (folder, *folder.rglob("*"))]
            modes = {str(path): stat.S_IMODE(path.lstat().st_mode) for path in made}
    finally:
        os.umask(before)
    sockets = [path for path in modes if path.endswith(".sock")]
    assert len(modes) > 8 and len(sockets) == 2
    inside = {path for path in modes if Path(path).parent == stack.service.client.directory}
    open_to_others = {path for path, mode in modes.items() if mode & 0o077 and path not in inside}
    assert not open_to_others, "sockets lie in a folder that nobody else can enter"


def test_nothing_is_pickled() -> None:
    """No format that carries code, on any wire or disk."""
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle"}
    found = []
    for path in product_files():
        for node in ast.walk(tree_of(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [relative(path) for name in names if name.split(".")[0] in forbidden]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                found.append(relative(path))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
                owner = node.func.value
                if isinstance(owner, ast.Name) and owner.id == "torch":
                    found.append(relative(path))
    assert not found
