"""Whom a command asks: a live server, a store service, or an NVMe folder or a Redis without anybody who serves it.

All but the server know blocks by their keys alone. What is here joins the tokenizer and the stored identity to that,
and answers in the shapes of a server.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from pagetier.kvstore import places
from pagetier.kvstore.admin import BlockInfo, PinInfo, PurgeResult
from pagetier.kvstore.block import BlockName
from pagetier.kvstore.cli.asked import Asked, LoadTextModel, TextModel
from pagetier.kvstore.cli.live import LiveCache, LiveServer
from pagetier.kvstore.cli.options import CacheFlags, OfflineFlags, ServerFlags, all_of
from pagetier.kvstore.config import EMBEDDED, URL_SCHEMES, without_login
from pagetier.kvstore.errors import ConfigError, ProtocolError
from pagetier.kvstore.identity import CacheIdentity, domain_of
from pagetier.kvstore.keys import chain_names, hash_named, root_key, unpack_tokens
from pagetier.kvstore.nvme.reading import FolderReading
from pagetier.kvstore.prefixes import Prefix, chain_to, hottest
from pagetier.kvstore.redis.reading import RedisReading
from pagetier.kvstore.redis.rendezvous import Rendezvous

TOP_TOKENS = 64  # of a prefix, that are shown as text


class Source(Protocol):
    """One cache, wherever it is. Answers have the shapes of the server's routes of the same names."""

    def query(self, asked: Asked) -> dict[str, Any]: ...

    def top(self, limit: int) -> dict[str, Any]: ...

    def purge(self, asked: Asked, tiers: Collection[str]) -> dict[str, Any]: ...


class PinSource(Source, Protocol):
    """One that keeps pins."""

    def pin(self, asked: Asked, ttl_s: float | None, tiers: Collection[str]) -> dict[str, Any]: ...

    def pins(self) -> dict[str, Any]: ...

    def unpin(self, asked: Asked | None) -> dict[str, Any]: ...


class Place(Protocol):
    """What holds blocks and can say which. counts_hits: whether it also knows how often they were used."""

    @property
    def shown(self) -> str: ...

    @property
    def counts_hits(self) -> bool: ...

    def identities(self) -> dict[bytes, bytes]: ...

    def blocks(self, domain: bytes, keys: Sequence[bytes]) -> list[BlockInfo]: ...

    def known(self, domain: bytes) -> list[BlockInfo]: ...

    def purge(
        self, domain: bytes, keys: Collection[bytes] | None, root: bytes | None, tiers: Collection[str]
    ) -> PurgeResult: ...

    def close(self) -> None: ...


@runtime_checkable
class PinningPlace(Place, Protocol):
    """One that keeps pins."""

    def pin(
        self, domain: bytes, names: Sequence[BlockName], ttl_s: float | None, tiers: Collection[str]
    ) -> PinInfo: ...

    def pins(self, domain: bytes) -> list[PinInfo]: ...

    def unpin(self, domain: bytes, pin_ids: Sequence[str] | None) -> list[PinInfo]: ...


@contextlib.contextmanager
def opened_source(
    server: ServerFlags, cache: CacheFlags, load: LoadTextModel, offline: OfflineFlags | None = None
) -> Iterator[Source]:
    """Whom the options name. Raises ConfigError for several, and for what does not hold the cache."""
    offline = offline or OfflineFlags()
    refuse_several(server, offline)
    if server.store is None and offline.nvme is None and offline.redis is None:
        yield LiveCache(LiveServer(server.url, server.api_key, server.admin_token), cache.domain)
        return
    with opened_place(offline.nvme, offline.redis, server.store) as place:
        yield reader_of(place, cache.domain, cache.model, load)


@contextlib.contextmanager
def opened_pins(server: ServerFlags, cache: CacheFlags, load: LoadTextModel) -> Iterator[PinSource]:
    """The server or the store service that the options name."""
    with opened_source(server, cache, load) as source:
        yield cast(PinSource, source)


def refuse_several(server: ServerFlags, offline: OfflineFlags) -> None:
    """Raise ConfigError when more than one place is named."""
    given = {"--store URL": server.store, "--nvme DIR": offline.nvme, "--redis URL": offline.redis}
    named = [flag for flag, value in given.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(f"give one of {all_of(list(given))}, got {all_of(named)}")


@contextlib.contextmanager
def opened_place(nvme: Path | None, redis: str | None, store: str | None = None) -> Iterator[Place]:
    """The one place that is named. Raises ConfigError for what is none."""
    for name in ("pagetier.kvstore.nvme", "pagetier.kvstore.redis"):
        logging.getLogger(name).addHandler(logging.NullHandler())  # the command's own line says it
    place: Place
    if store is not None:
        from pagetier.kvstore.cli.store_place import StorePlace  # gRPC takes a while to load

        place = StorePlace(store)
    else:
        place = FolderReading(nvme.expanduser()) if nvme is not None else RedisReading(redis_address(str(redis)))
    with contextlib.closing(place):
        yield place


def redis_address(url: str) -> str:
    """A URL that can be connected to. Raises ConfigError."""
    if url == EMBEDDED:
        return Rendezvous(places.redis_dir()).url
    if not url.startswith(URL_SCHEMES):
        raise ConfigError.bad_value("--redis", without_login(url), f"{', '.join(URL_SCHEMES)} or {EMBEDDED}")
    return url


@dataclass(frozen=True, slots=True)
class Reader:
    """A place, one cache identity in it, and a tokenizer where one was given."""

    place: Place
    domain: bytes
    identity: CacheIdentity
    model: TextModel | None

    def query(self, asked: Asked) -> dict[str, Any]:
        """As `GET /query`; hits are None where they are not counted."""
        names = [] if asked.keys is not None else self._names(asked)
        keys = list(asked.keys) if asked.keys is not None else [name.key for name in names]
        infos = self.place.blocks(self.domain, keys)
        named: list[BlockName | None] = [*names] or [info.name for info in infos]
        blocks = [
            self._told(replace(info, name=name)) | {"text": self._text(name)}
            for info, name in zip(infos, named, strict=True)
        ]
        num_tokens = sum(block["num_tokens"] or 0 for block in blocks)
        usable = len(blocks)
        if asked.has_prompt:
            num_tokens = len(asked.token_ids(self.model))
            usable = (num_tokens - 1) // self.identity.block_size
        hits: Counter[str] = Counter()
        for block in blocks[:usable]:
            if not block["tiers"] and asked.has_prompt:
                break
            for tier in block["tiers"][:1]:
                hits[tier] += block["num_tokens"] or 0
        return {
            "domain": self.domain.hex(),
            "num_tokens": num_tokens,
            "hit_tokens": hits.total(),
            "hit_tokens_by_tier": dict(hits),
            "blocks": blocks,
        }

    def top(self, limit: int) -> dict[str, Any]:
        """As `GET /top`; the longest prefixes first where nobody counts hits."""
        infos = self.place.known(self.domain)
        forest = hottest([(info.name, info) for info in infos if info.tiers and info.name is not None], limit)
        return {"domain": self.domain.hex(), "prefixes": [self._told_prefix(prefix) for prefix in forest]}

    def purge(self, asked: Asked, tiers: Collection[str] = ()) -> dict[str, Any]:
        """Remove a prompt's blocks, those of keys, a tenant's, or all, from these tiers or all."""
        keys, root = None if asked.keys is None else set(asked.keys), None
        if asked.has_prompt:
            keys = {name.key for name in self._names(asked)}
        elif asked.salt is not None:
            root = self._root(asked.salt)
        return self.place.purge(self.domain, keys, root, tiers).as_dict()

    def _root(self, salt: str | None) -> bytes:
        return root_key(self.domain, (salt or "").encode(), hash_named(self.identity.hash_name))

    def _names(self, asked: Asked) -> list[BlockName]:
        hash_ = hash_named(self.identity.hash_name)
        ids = asked.token_ids(self.model)
        return chain_names(self._root(asked.salt), ids, self.identity.block_size, hash_=hash_)

    def _text(self, name: BlockName | None, max_tokens: int | None = None) -> str | None:
        if self.model is None or name is None:
            return None
        return self.model.decode(unpack_tokens(name.tokens)[:max_tokens].tolist(), skip_special_tokens=False)

    def _told_prefix(self, prefix: Prefix) -> dict[str, Any]:
        told = prefix.as_dict() | ({} if self.place.counts_hits else {"hits": None})
        ids = unpack_tokens(prefix.tokens)[:TOP_TOKENS].tolist()
        told["text"] = None if self.model is None else self.model.decode(ids, skip_special_tokens=False)
        told["children"] = [self._told_prefix(child) for child in prefix.children]
        return told

    def _told(self, info: BlockInfo) -> dict[str, Any]:
        return info.as_dict() | ({} if self.place.counts_hits else {"hits": None})


@dataclass(frozen=True, slots=True)
class PinReader(Reader):
    """Where pins are kept, too."""

    place: PinningPlace

    def pin(self, asked: Asked, ttl_s: float | None, tiers: Collection[str]) -> dict[str, Any]:
        """As `POST /pin`."""
        if asked.keys is not None:
            known = {info.key: info.name for info in self.place.known(self.domain)}
            names = chain_to(asked.keys[0], known.get)
        else:
            names = tuple(self._names(asked))
        return {"pin": self.place.pin(self.domain, names, ttl_s, tiers).as_dict()}

    def pins(self) -> dict[str, Any]:
        """As `GET /pins`."""
        return {"pins": [info.as_dict() for info in self.place.pins(self.domain)]}

    def unpin(self, asked: Asked | None) -> dict[str, Any]:
        """As `POST /unpin`; all pins for None."""
        ids: list[str] | None = None
        if asked is not None and asked.keys is not None:
            ids = [key.hex() for key in asked.keys]
        elif asked is not None:
            ids = [name.key.hex() for name in self._names(asked)[-1:]]
        return {"pins": [info.as_dict() for info in self.place.unpin(self.domain, ids)]}


def reader_of(place: Place, domain: str | None, model: str | None, load: LoadTextModel) -> Reader:
    """The place with the identity whose domain begins with `domain`. Raises ConfigError when that is not one."""
    found: dict[str, CacheIdentity] = {}
    for key, encoded in sorted(place.identities().items()):
        with contextlib.suppress(ProtocolError):
            if domain_of(encoded) == key:
                found[key.hex()] = CacheIdentity.decode(encoded)
    chosen = {name: one for name, one in found.items() if name.startswith((domain or "").lower())}
    if len(chosen) != 1:
        listed = ", ".join(f"{name[:12]} ({one.architecture})" for name, one in (chosen or found).items())
        what = "several caches" if len(chosen) > 1 else f"no cache {domain or ''}".rstrip()
        raise ConfigError(f"{place.shown} holds {what}{': ' + listed if listed else ''}; name one with --domain HEX")
    ((name, identity),) = chosen.items()
    text_model = None if model is None else load(model)
    if isinstance(place, PinningPlace):
        return PinReader(place, bytes.fromhex(name), identity, text_model)
    return Reader(place, bytes.fromhex(name), identity, text_model)
