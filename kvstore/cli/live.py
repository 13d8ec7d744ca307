"""A live server as the commands see it: GET and POST of JSON, and every failure as one line with the next step."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import httpx

from pagetier.kvstore.cli.asked import Asked
from pagetier.kvstore.config import without_login
from pagetier.kvstore.errors import ConfigError, PagetierError

TIMEOUT_S = 20.0  # more than the server gives its engine to answer
PURGE_TIMEOUT_S = 90.0
HINTS = {
    401: "give the server's --api-key (or PAGETIER_API_KEY)",
    403: "ask from the server's own machine, or start it with --admin-token and give the same here",
    404: "give the address of a Pagetier server of this version with --url",
}


class LiveServer:
    """One server. `url` may end in /v1, as OpenAI's clients write it.

    api_key, admin_token: sent where they are needed. All methods raise PagetierError, one line.
    """

    def __init__(self, url: str, api_key: str | None = None, admin_token: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._api_key, self._admin_token = api_key, admin_token

    @property
    def shown(self) -> str:
        """The address as it may be shown."""
        return without_login(self.url)

    def get(
        self, path: str, *, admin: bool = False, timeout_s: float = TIMEOUT_S, **params: str | int | float
    ) -> dict[str, Any]:
        """The JSON object at a path."""
        return self._object(path, lambda: self._ask("GET", path, admin=admin, params=params, timeout=timeout_s))

    def post(
        self, path: str, body: Mapping[str, Any], *, admin: bool = False, timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        """The JSON object that answers a JSON object."""
        return self._object(path, lambda: self._ask("POST", path, admin=admin, json=dict(body), timeout=timeout_s))

    def text(self, path: str) -> str:
        """What is at a path that answers no JSON."""
        with self._told(path):
            return self._ask("GET", path, admin=False).text

    def lines(self, path: str, *, admin: bool = False, **params: str | int | float) -> Iterator[dict[str, Any]]:
        """The JSON objects of a stream with one a line, until it ends."""
        timeout = httpx.Timeout(TIMEOUT_S, read=None)
        with (
            self._told(path),
            httpx.stream(
                "GET", f"{self.url}{path}", headers=self._headers(admin), params=params, timeout=timeout
            ) as answer,
        ):
            if answer.is_error:
                answer.read()
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.strip():
                    yield json.loads(line)

    def _ask(self, verb: str, path: str, *, admin: bool, **more: Any) -> httpx.Response:
        more.setdefault("timeout", TIMEOUT_S)
        answer = httpx.request(verb, f"{self.url}{path}", headers=self._headers(admin), **more)
        answer.raise_for_status()
        return answer

    def _headers(self, admin: bool) -> dict[str, str]:
        secret = self._admin_token if admin and self._admin_token is not None else self._api_key
        return {} if secret is None else {"Authorization": f"Bearer {secret}"}

    def _object(self, path: str, ask: Any) -> dict[str, Any]:
        with self._told(path):
            fields = ask().json()
            if not isinstance(fields, dict):
                raise ValueError("not an object")
        return fields

    @contextlib.contextmanager
    def _told(self, path: str) -> Iterator[None]:
        """Turn every failure of a request into one line."""
        try:
            yield
        except httpx.HTTPStatusError as error:
            raise self._refused(error.response, path) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise PagetierError(
                f"no Pagetier server answers at {self.shown} ({reason}); start one with 'pagetier serve', or give "
                "--url or --store"
            ) from None
        except ValueError:
            raise PagetierError(
                f"{self.shown}{path} is not a Pagetier server's answer; give its address with --url"
            ) from None

    def _refused(self, response: httpx.Response, path: str) -> PagetierError:
        status = response.status_code
        told = _message(response)
        hint = f"; {HINTS[status]}" if status in HINTS and (told is None or status != 403) else ""
        text = f"{self.shown} answered {status} to {path}: {told or response.reason_phrase}{hint}"
        return ConfigError(text) if status in (400, 422) else PagetierError(text)


class LiveCache:
    """The cache of a live server. domain: which cache identity a purge is meant for; None: whichever it has."""

    def __init__(self, server: LiveServer, domain: str | None = None) -> None:
        self._server, self._domain = server, domain

    def query(self, asked: Asked) -> dict[str, Any]:
        return self._server.post("/query", asked.body())

    def top(self, limit: int) -> dict[str, Any]:
        return self._server.get("/top", admin=True, limit=limit)

    def pin(self, asked: Asked, ttl_s: float | None, tiers: Collection[str]) -> dict[str, Any]:
        body = asked.body() | ({} if ttl_s is None else {"ttl_s": ttl_s}) | _tiers(tiers)
        return self._server.post("/pin", body, admin=True)

    def pins(self) -> dict[str, Any]:
        return self._server.get("/pins", admin=True)

    def unpin(self, asked: Asked | None) -> dict[str, Any]:
        """All pins for None."""
        body: dict[str, Any] = {"all": True} if asked is None else asked.body()
        if "keys" in body:
            body["ids"] = body.pop("keys")
        return self._server.post("/unpin", body, admin=True)

    def purge(self, asked: Asked, tiers: Collection[str]) -> dict[str, Any]:
        """A prompt's blocks, those of keys, a tenant's, or all."""
        body = asked.body() | _tiers(tiers)
        if not asked.body():
            body["all"] = True
        body |= {} if self._domain is None else {"domain": self._domain}
        return self._server.post("/purge", body, admin=True, timeout_s=PURGE_TIMEOUT_S)


def _tiers(tiers: Collection[str]) -> dict[str, Any]:
    return {"tiers": list(tiers)} if tiers else {}


def _message(response: httpx.Response) -> str | None:
    """What a Pagetier server says is wrong; None when it was none that answered."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None
