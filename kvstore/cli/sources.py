"""Where a command looks when it does not ask a live server: an NVMe folder or a Redis.

Joins the tokenizer and the stored identity to what such a place says of keys, and answers in the shapes of a server.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pagetier.kvstore import places
from pagetier.kvstore.admin import BlockInfo
from pagetier.kvstore.block import BlockName
from pagetier.kvstore.cli.asked import Asked, LoadTextModel, TextModel
from pagetier.kvstore.config import EMBEDDED, URL_SCHEMES, without_login
from pagetier.kvstore.errors import ConfigError, ProtocolError
from pagetier.kvstore.identity import CacheIdentity, domain_of
from pagetier.kvstore.keys import chain_names, hash_named, root_key, unpack_tokens
from pagetier.kvstore.nvme.reading import FolderReading
from pagetier.kvstore.prefixes import Prefix, hottest
from pagetier.kvstore.redis.reading import RedisReading
from pagetier.kvstore.redis.rendezvous import Rendezvous

TOP_TOKENS = 64  # of a prefix, that are shown as text


class Place(Protocol):
    """What holds blocks and can say which."""

    @property
    def shown(self) -> str: ...

    def identities(self) -> dict[bytes, bytes]: ...

    def blocks(self, domain: bytes, keys: Sequence[bytes]) -> list[BlockInfo]: ...

    def known(self, domain: bytes) -> list[BlockInfo]: ...

    def purge(self, domain: bytes, keys: Collection[bytes] | None, root: bytes | None) -> int: ...

    def close(self) -> None: ...


@contextlib.contextmanager
def opened_place(nvme: Path | None, redis: str | None) -> Iterator[Place]:
    """The place that the options name. Raises ConfigError for both, and for what is none."""
    if nvme is not None and redis is not None:
        raise ConfigError("give one of --nvme DIR and --redis URL")
    for name in ("pagetier.kvstore.nvme", "pagetier.kvstore.redis"):
        logging.getLogger(name).addHandler(logging.NullHandler())  # the command's own line says it
    place: Place = FolderReading(nvme.expanduser()) if nvme is not None else RedisReading(redis_address(str(redis)))
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
        """As `GET /query`; hits are None, since places do not count them."""
        names = [] if asked.keys is not None else self._names(asked)
        keys = list(asked.keys) if asked.keys is not None else [name.key for name in names]
        infos = self.place.blocks(self.domain, keys)
        named: list[BlockName | None] = [*names] or [info.name for info in infos]
        blocks = [
            _told(BlockInfo(info.key, info.tiers, info.nbytes, name, info.age_s)) | {"text": self._text(name)}
            for info, name in zip(infos, named, strict=True)
        ]
        num_tokens = sum(block["num_tokens"] or 0 for block in blocks)
        usable, hits = len(blocks), 0
        if asked.has_prompt:
            num_tokens = len(asked.token_ids(self.model))
            usable = (num_tokens - 1) // self.identity.block_size
        for block in blocks[:usable]:
            if not block["tiers"] and asked.has_prompt:
                break
            hits += block["num_tokens"] or 0 if block["tiers"] else 0
        return {"domain": self.domain.hex(), "num_tokens": num_tokens, "hit_tokens": hits, "blocks": blocks}

    def top(self, limit: int) -> dict[str, Any]:
        """As `GET /top`: the longest prefixes first, since nobody counts hits here."""
        infos = self.place.known(self.domain)
        forest = hottest([(info.name, info) for info in infos if info.name is not None], limit)
        return {"domain": self.domain.hex(), "prefixes": [self._told_prefix(prefix) for prefix in forest]}

    def purge(self, asked: Asked) -> int:
        """Remove a prompt's blocks, those of keys, a tenant's, or all; how many records."""
        if asked.has_prompt:
            return self.place.purge(self.domain, {name.key for name in self._names(asked)}, None)
        root = None if asked.salt is None else self._root(asked.salt)
        return self.place.purge(self.domain, None if asked.keys is None else set(asked.keys), root)

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
        told = prefix.as_dict() | {"hits": None}
        ids = unpack_tokens(prefix.tokens)[:TOP_TOKENS].tolist()
        told["text"] = None if self.model is None else self.model.decode(ids, skip_special_tokens=False)
        told["children"] = [self._told_prefix(child) for child in prefix.children]
        return told


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
    return Reader(place, bytes.fromhex(name), identity, None if model is None else load(model))


def _told(info: BlockInfo) -> dict[str, Any]:
    return info.as_dict() | {"hits": None}
