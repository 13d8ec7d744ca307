"""Admin routes: who may ask, what they take, and that what they change is true for the next request."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import Request

from pagetier.engine.server.errors import ApiError
from pagetier.engine.server.guards import check_admin, is_loopback
from pagetier.kvstore.identity import CacheIdentity
from tests.engine.server.double import DOMAIN, IDENTITY
from tests.engine.server.stack import running_stack

ROUTE = "/admin/weights_version"
PROMPT: dict[str, Any] = {"prompt": "abcdefgh", "max_tokens": 1}


def cached(http: httpx.Client) -> int:
    answer = http.post("/v1/completions", json=PROMPT).json()
    num_tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return num_tokens


@pytest.mark.parametrize("process", [False, True])
def test_another_version_is_another_domain_for_the_next_request(process: bool) -> None:
    with running_stack(process=process) as stack:
        http = stack.http
        assert (cached(http), cached(http)) == (0, 7)
        answer = http.post(ROUTE, json={"weights_version": "step-100"})
        updated = replace(IDENTITY, weights_version="step-100")
        assert answer.json() == {"weights_version": "step-100", "domain": updated.domain().hex()}
        assert stack.stats()["domain"] == updated.domain().hex() != DOMAIN.hex()
        told = http.get("/identity").json()
        assert told["domain"] == updated.domain().hex()
        assert CacheIdentity.decode(bytes.fromhex(told["encoded"])) == updated
        assert told["identity"]["weights_version"] == "step-100"
        assert (cached(http), cached(http)) == (0, 7), "keys are hashed under the new domain"


@pytest.mark.parametrize("body", [b"", b"{}", b'{"weights_version": null}'])
def test_without_a_version_it_is_a_new_uuid_each_time(body: bytes) -> None:
    with running_stack() as stack:
        versions = [stack.http.post(ROUTE, content=body).json()["weights_version"] for _ in range(2)]
    assert versions[0] != versions[1]
    assert [str(uuid.UUID(version)) for version in versions] == versions


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not JSON"),
        (b"[]", "allowed: an object"),
        (b'{"weights_version": 3}', "weights_version: got 3"),
        (b'{"weights_version": ""}', "weights_version is empty"),
        (b'{"weights_version": "\\ud800"}', "weights_version: got"),
        (b'{"weights_version": "two\\nlines"}', "weights_version: got"),
        (b'{"weights_version": "' + b"x" * 257 + b'"}', "weights_version: got"),
        (b'{"version": "v2"}', "unknown field 'version'; known: weights_version"),
    ],
)
def test_what_is_no_version_is_refused_by_name_and_changes_nothing(body: bytes, words: str) -> None:
    with running_stack() as stack:
        answer = stack.http.post(ROUTE, content=body)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]
        assert stack.stats()["domain"] == DOMAIN.hex()


def test_a_token_is_asked_for_where_there_is_one() -> None:
    with running_stack(api_key="key", admin_token="a secret") as stack:
        for headers in ({}, {"Authorization": "Bearer key"}, {"Authorization": "Basic a secret"}):
            answer = stack.http.post(ROUTE, headers=headers)
            assert answer.status_code == 401 and "secret" not in answer.text
        assert stack.http.post(ROUTE, headers={"Authorization": "Bearer a secret"}).status_code == 200


def test_the_api_key_counts_where_there_is_no_token() -> None:
    with running_stack(api_key="key") as stack:
        assert stack.http.post(ROUTE).status_code == 401
        assert stack.http.post(ROUTE, headers={"Authorization": "Bearer key"}).status_code == 200
        assert stack.http.get("/identity").status_code == 401


@pytest.mark.parametrize("name", ["Origin", "X-Forwarded-For", "Forwarded", "Via"])
def test_pages_and_proxies_on_this_machine_are_not_local_programs(name: str) -> None:
    with running_stack() as stack:
        answer = stack.http.post(ROUTE, headers={name: "http://127.0.0.1"})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (403, "permission_error") and "--admin-token" in error["message"]
        assert stack.stats()["domain"] == DOMAIN.hex()


def asked(client: str | None, server: str | None, **headers: str) -> Request:
    return Request(
        {
            "type": "http",
            "method": "POST",
            "path": ROUTE,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": None if client is None else (client, 1),
            "server": None if server is None else (server, 80),
        }
    )


@pytest.mark.parametrize(
    ("client", "server"),
    [("10.0.0.7", "127.0.0.1"), ("127.0.0.1", "10.0.0.7"), (None, "127.0.0.1"), ("127.0.0.1", None), ("x", "y")],
)
def test_who_is_elsewhere_needs_the_token(client: str | None, server: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        check_admin(asked(client, server), None, None)
    assert refused.value.status == 403
    check_admin(asked(client, server, authorization="Bearer token"), "token", None)


def test_what_loopback_is() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "localhost", "fe80::1")))
    check_admin(asked("::1", "::1"), None, None)
