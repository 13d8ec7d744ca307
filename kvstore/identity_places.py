"""Where a cache identity can be read from: a live server, a store service, an NVMe folder, a Redis. Changes nothing.

A place that holds several identities is told which one by the beginning of its domain: `PLACE#ab12cd`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import redis

from pagetier.kvstore import places
from pagetier.kvstore.block import KEY_BYTES
from pagetier.kvstore.config import EMBEDDED, URL_SCHEMES, without_login
from pagetier.kvstore.errors import ConfigError, ProtocolError
from pagetier.kvstore.identity import CacheIdentity, domain_of
from pagetier.kvstore.nvme.files import Files
from pagetier.kvstore.nvme.folder import Folder
from pagetier.kvstore.record import REDIS_IDENTITIES
from pagetier.kvstore.redis.rendezvous import Rendezvous
from pagetier.kvstore.redis.tier import RedisTier

FORMS = "a server's http:// address, store:URL, an NVMe folder, redis://…, embedded, or a model"
STORE = "store:"  # before a store service's address: unix:// alone is a Redis
TIMEOUT_S = 5.0
_PREFIX = re.compile(r"(.+)#([0-9a-fA-F]{1,64})")
_FIELD = re.compile(rb"[0-9a-f]{64}")
_DOMAIN = re.compile(r"[0-9a-fA-F]{8,64}")


@dataclass(frozen=True, slots=True)
class FoundIdentity:
    """An identity and the place it was read from, as it may be shown: without a password."""

    place: str
    identity: CacheIdentity


def is_domain(text: str) -> bool:
    """Whether `text` is a domain, or its first 8 digits or more, and no place."""
    return _DOMAIN.fullmatch(text) is not None and not Path(text).exists()


def read_identity(text: str, api_key: str | None = None) -> FoundIdentity | None:
    """The identity at a place; None when `text` is none of the forms above and so may be a model.

    Raises ConfigError, one line, when the place cannot be read, holds no identity, or several of which none is named.
    """
    match = _PREFIX.fullmatch(text)
    place, prefix = (match[1], match[2].lower()) if match else (text, "")
    if place.startswith(("http://", "https://")):
        return _chosen(_shown(place), _of_server(place, api_key), prefix)
    if place.startswith(STORE):
        return _chosen(_shown(place), _of_store(place.removeprefix(STORE)), prefix)
    if place == EMBEDDED or place.startswith(URL_SCHEMES):
        return _chosen(_shown(place), _of_redis(place), prefix)
    folder = Path(place).expanduser()
    if folder.is_dir() and ((folder / "identities").is_dir() or not any(folder.glob("*.json"))):
        return _chosen(str(folder), _of_folder(folder), prefix)
    return None


def _of_server(url: str, api_key: str | None) -> dict[bytes, bytes]:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/identity", headers=headers, timeout=TIMEOUT_S)
        answer.raise_for_status()
        encoded = bytes.fromhex(answer.json()["encoded"])
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        hint = "give its --api-key" if status == 401 else "give a Pagetier server's address"
        raise ConfigError(f"{_shown(url)} answered {status} to /identity; {hint}") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"no server answers at {_shown(url)} ({reason}); start it, or name its store") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{_shown(url)}/identity is not a Pagetier server's answer; give its address") from None
    return {domain_of(encoded): encoded}


def _of_store(url: str) -> dict[bytes, bytes]:
    from pagetier.kvstore.service.address import parse_address  # gRPC takes a while to load
    from pagetier.kvstore.service.client import StoreClient

    with StoreClient(parse_address(url, flag=STORE.rstrip(":"))) as client:
        return client.identities()


def _of_redis(url: str) -> dict[bytes, bytes]:
    """A single server is given time to answer; who has several is asked as the tier does it."""
    if "+" in url.partition("://")[0]:
        return _of_redis_servers(url)
    address = Rendezvous(places.redis_dir()).url if url == EMBEDDED else url
    options: dict[str, Any] = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
    try:
        client = redis.Redis.from_url(address, **options)
        try:
            stored: dict[bytes, bytes] = client.hgetall(REDIS_IDENTITIES)  # type: ignore[assignment]
        finally:
            client.close()
    except (redis.RedisError, OSError, ValueError) as error:
        raise _unasked(url, str(error).replace(address, _shown(url))) from None
    return {bytes.fromhex(name.decode()): value for name, value in stored.items() if _FIELD.fullmatch(name)}


def _of_redis_servers(url: str) -> dict[bytes, bytes]:
    tier = RedisTier(url, bytes(KEY_BYTES))
    try:
        found, num_errors = tier.identities(), tier.counters().errors
    finally:
        tier.close()
    if num_errors:
        raise _unasked(url, "no server that has them answered")
    return found


def _unasked(url: str, reason: str) -> ConfigError:
    return ConfigError(f"{_shown(url)} cannot be asked ({reason}); start it, or check the address")


def _of_folder(folder: Path) -> dict[bytes, bytes]:
    try:
        return Folder(Files(), folder).identities()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read ({error.strerror}); give a folder of --kv-nvme-path") from None


def _chosen(place: str, found: dict[bytes, bytes], prefix: str) -> FoundIdentity:
    """The one whose domain begins with `prefix`; records that do not fit their name are no identities."""
    sound: dict[str, CacheIdentity] = {}
    for domain, encoded in sorted(found.items()):
        try:
            identity = CacheIdentity.decode(encoded)
        except ProtocolError:
            continue
        if domain_of(encoded) == domain and domain.hex().startswith(prefix):
            sound[domain.hex()] = identity
    if len(sound) == 1:
        (domain_hex,) = sound
        return FoundIdentity(f"{place}#{domain_hex[:12]}", sound[domain_hex])
    if not sound:
        named = f" that begins with {prefix}" if prefix else ""
        raise ConfigError(f"{place} holds no cache identity{named}; give {FORMS}")
    listed = ", ".join(f"#{name[:12]} ({_summary(identity)})" for name, identity in sound.items())
    raise ConfigError(f"{place} holds {len(sound)} identities: {listed}; name one, such as {place}#{min(sound)[:12]}")


def _summary(identity: CacheIdentity) -> str:
    """A few words that tell it from others."""
    dtypes = sorted({plane.dtype for group in identity.groups for plane in group.planes})
    layers = sum(len(group.layers) for group in identity.groups)
    version = f", version {identity.weights_version}" if identity.weights_version else ""
    return f"{identity.architecture}, {layers} layers, {'/'.join(dtypes)}{version}"


def _shown(url: str) -> str:
    """A URL without what may be secret in it."""
    return without_login(url).partition("?")[0]
