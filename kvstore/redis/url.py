"""`--kv-redis-url`: what a URL says of servers, logins and TLS. Pure: connects to nothing.

One server as redis-py writes it; Sentinel and Cluster, for which redis-py has no URL, in the form that Prefect, limits
and Redis-Sentinel-Url share: `redis+sentinel://user:password@host:port,host:port/service/db`.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import redis
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.places import check_socket_path
from pagetier.kvstore.redis.sockets import Endpoint, maker_of
from redis.connection import parse_url

FLAG = "--kv-redis-url"
URL_FORMS = (
    "redis://[[user]:password@]host[:port][/db], rediss://…, unix:///path/to/socket[?db=n],"
    " redis+sentinel://[[user]:password@]host[:port],…/service[/db], redis+cluster://[[user]:password@]host[:port],…,"
    " or rediss+… for TLS"
)
SENTINEL_PORT, REDIS_PORT = 26379, 6379
# What a URL may say of how to connect. Time-outs and retries are the caller's deadlines, so they are not among these.
_LOGIN_OPTIONS = frozenset(("db", "username", "password"))
_OPTIONS = _LOGIN_OPTIONS | {"host", "port", "path", "socket_keepalive"}
_SENTINEL_OPTIONS = frozenset(("sentinel_username", "sentinel_password"))
_FILE_OPTIONS = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
_SEVERAL = re.compile(r"(rediss?)\+(sentinel|cluster)://(?:([^@/?]*)@)?([^/?]*)(/[^?]*)?(\?.*)?")
_MEMBER = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::(\d{1,5}))?")


class Kind(StrEnum):
    """How the servers of a URL belong together."""

    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class Login:
    """What a new connection introduces itself with."""

    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """`endpoints`: the server, the Sentinels, or some nodes of the Cluster. `service`: the Sentinels' name of it."""

    kind: Kind
    endpoints: tuple[Endpoint, ...]
    login: Login
    service: str = ""
    sentinel_login: Login = Login()


@functools.cache
def parse_redis_url(url: str) -> RedisUrl:
    """Raises ConfigError, which never repeats the URL: it may hold a password."""
    match = _SEVERAL.fullmatch(url)
    if match is None:
        options = _options(url)
        _refuse_unknown(options, _OPTIONS)
        return RedisUrl(Kind.SINGLE, (_endpoint(options),), _login(options))
    scheme, kind, user, members, path, query = match.groups(default="")
    words = [word for word in path.split("/") if word]
    service = words.pop(0) if kind == "sentinel" and words else ""
    if len(words) > 1 or (kind == "sentinel" and not service):
        raise ConfigError(f"{FLAG}: a {kind} URL ends in {_PATHS[kind]}; allowed: {URL_FORMS}")
    base = f"{scheme}://{user}@localhost/{words[0] if words else ''}{query}"
    options = _options(base)
    _refuse_unknown(options, _OPTIONS | (_SENTINEL_OPTIONS if kind == "sentinel" else frozenset()))
    sentinel_login = Login(options.get("sentinel_username"), options.get("sentinel_password"))
    template, login = _endpoint(options), _login(options)
    if kind == "cluster" and login.db:
        raise ConfigError.bad_value(f"database in {FLAG}", login.db, "0: a Cluster has no other")
    default_port = SENTINEL_PORT if kind == "sentinel" else REDIS_PORT
    endpoints = tuple(template.at(*_member(member, default_port)) for member in members.split(","))
    return RedisUrl(Kind(kind), endpoints, login, service, sentinel_login)


_PATHS = {"sentinel": "/service or /service/db", "cluster": "its last host"}


def _options(url: str) -> dict[str, Any]:
    try:
        return dict(parse_url(url))  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise ConfigError(f"{FLAG}: {error}; allowed: {URL_FORMS}") from error


def _refuse_unknown(options: Mapping[str, Any], known: frozenset[str]) -> None:
    for name in options:
        if name not in known and not name.startswith("ssl_") and name != "connection_class":
            raise ConfigError.unknown_name(f"option in {FLAG}", name, known)


def _endpoint(options: Mapping[str, Any]) -> Endpoint:
    tls = tuple((name, value) for name, value in options.items() if name.startswith("ssl_"))
    has_tls = options.get("connection_class") is redis.SSLConnection
    if tls and not has_tls:
        raise ConfigError(f"{FLAG}: {tls[0][0]} is for rediss://")
    for name, value in tls:
        if name in _FILE_OPTIONS and not os.access(value, os.R_OK):
            raise ConfigError.bad_value(f"{name} in {FLAG}", value, "a file that can be read")
    path = str(options.get("path", ""))
    if path:
        check_socket_path(Path(path))
    endpoint = Endpoint(
        host=options.get("host", "localhost"),
        port=options.get("port", REDIS_PORT),
        path=path,
        tls=tls if has_tls else None,
        keepalive=bool(options.get("socket_keepalive", False)),
    )
    try:
        maker_of(endpoint, 1.0)
    except (TypeError, ValueError, redis.RedisError) as error:
        raise ConfigError(f"{FLAG}: {error}; allowed: {URL_FORMS}") from error
    return endpoint


def _login(options: Mapping[str, Any]) -> Login:
    return Login(options.get("username"), options.get("password"), options.get("db", 0))


def _member(text: str, default_port: int) -> tuple[str, int]:
    match = _MEMBER.fullmatch(text)
    if match is None:
        raise ConfigError.bad_value(f"host in {FLAG}", text, "host, host:port or [IPv6]:port, separated by commas")
    return match[1].strip("[]"), int(match[2] or default_port)
