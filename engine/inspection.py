"""What people ask of a running engine's cache and do to it: query, top, pin, unpin, pins, purge.

Joins two sides. The device's prefix index belongs to the core thread, so its part of an answer is taken there, at once;
the store's part may wait for tiers and is made on a thread of its own. Fields are plain data (proto: `wire.Question`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from pagetier.engine.block_pool import BlockPool
from pagetier.engine.prefix_index import Match, Node, PrefixIndex
from pagetier.engine.restore_cost import PrefillSeconds
from pagetier.kvstore.admin import Admin, BlockInfo
from pagetier.kvstore.block import KEY_BYTES, BlockName
from pagetier.kvstore.errors import ConfigError, PagetierError
from pagetier.kvstore.keys import Hash, chain_names, unpack_tokens
from pagetier.kvstore.measure import TierSpeed
from pagetier.kvstore.prefixes import Prefix, chain_to, hottest

logger = logging.getLogger(__name__)

DEVICE = "device"
MAX_TOP = 1000

Report = Callable[[dict[str, Any], PagetierError | None], None]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt that is asked about: its chain's root, tokens (u32 LE), names of its full blocks."""

    root: bytes
    tokens: bytes
    names: tuple[BlockName, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


class Inspection:
    """One engine's. `ask` and `close` are the core thread's."""

    def __init__(
        self,
        index: PrefixIndex,
        pool: BlockPool,
        admin: Admin | None,
        *,
        block_size: int,
        block_nbytes: int,
        hash_: Hash,
        prefill_s: PrefillSeconds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """admin: None where there are no lower tiers. prefill_s: the runner's model of its own prefills, None where it
        has none. clock: the index's."""
        self._prefill_s = prefill_s
        self._index, self._pool, self._admin = index, pool, admin
        self._block_size, self._block_nbytes, self._hash, self._clock = block_size, block_nbytes, hash_, clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pagetier-inspect")
        self._verbs: Mapping[str, Callable[[Mapping[str, Any]], Callable[[], dict[str, Any]]]] = {
            "query": self._query,
            "query_keys": self._query_keys,
            "top": self._top,
            "pin": self._pin,
            "unpin": self._unpin,
            "pins": self._pins,
            "purge": self._purge,
            "doctor": self._doctor,
        }

    def ask(self, verb: str, fields: Mapping[str, Any], report: Report) -> None:
        """Answer through `report`, soon and on another thread. Never raises for what was asked."""
        try:
            if verb not in self._verbs:
                raise ConfigError.unknown_name("question", verb, self._verbs)
            finish = self._verbs[verb](fields)
        except (PagetierError, KeyError, TypeError, ValueError) as error:
            report({}, error if isinstance(error, PagetierError) else ConfigError(f"{verb}: {error}"))
            return
        try:
            self._thread.submit(self._finish, verb, finish, report)
        except RuntimeError:
            report({}, PagetierError("the engine is shutting down"))

    def close(self) -> None:
        """End the thread; questions under way are answered first. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _finish(self, verb: str, finish: Callable[[], dict[str, Any]], report: Report) -> None:
        try:
            answer, failure = finish(), None
        except PagetierError as error:
            answer, failure = {}, error
        except Exception as error:
            logger.exception("the question %s was not answered", verb)
            answer, failure = {}, PagetierError(f"{verb}: {type(error).__name__}: {error}")
        report(answer, failure)

    # -- questions: the first half of each on the core thread, what is returned on the other --------------------------

    def _query(self, fields: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        root, tokens = fields["root"], fields["tokens"]
        num_tokens = len(tokens) // 4
        resident = self._index.match(root, tokens, num_tokens)  # what is there, the last token's block included
        match = self._index.match(root, tokens, num_tokens - 1)  # what a request would be served
        devices = self._described(resident.nodes)

        def finish() -> dict[str, Any]:
            prompt = self._prompt(root, tokens)
            below = self._below([name.key for name in prompt.names])
            blocks = [self._joined(name, devices.get(name.key), below.get(name.key)) for name in prompt.names]
            hits = self._hit_tokens(prompt, match, blocks)
            return {
                "num_tokens": prompt.num_tokens,
                "hit_tokens": sum(hits.values()),
                "hit_tokens_by_tier": hits,
                "blocks": [_told(block) for block in blocks],
            }

        return finish

    def _query_keys(self, fields: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        keys = [_checked_key(key) for key in fields["keys"]]
        nodes = self._index.nodes()

        def finish() -> dict[str, Any]:
            wanted = set(keys)
            devices = self._described([node for node in nodes if node.name is not None and node.name.key in wanted])
            names = {node.name.key: node.name for node in nodes if node.name is not None and node.name.key in wanted}
            below = self._below(keys)
            blocks = [self._joined(names.get(key), devices.get(key), below.get(key), key) for key in keys]
            return {
                "num_tokens": sum(0 if block.name is None else block.name.num_tokens for block in blocks),
                "hit_tokens": sum(block.name.num_tokens for block in blocks if block.tiers and block.name is not None),
                "hit_tokens_by_tier": {},
                "blocks": [_told(block) for block in blocks],
            }

        return finish

    def _top(self, fields: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        limit = int(fields.get("limit", 20))
        if not 1 <= limit <= MAX_TOP:
            raise ConfigError.bad_value("limit", limit, f"1 to {MAX_TOP}")
        nodes = self._index.nodes()

        def finish() -> dict[str, Any]:
            devices = self._described(nodes)
            known = {} if self._admin is None else {info.key: info for info in self._admin.known()}
            names = {node.name.key: node.name for node in nodes if node.name is not None}
            names |= {info.key: info.name for info in known.values() if info.name is not None}
            joined = [self._joined(name, devices.get(key), known.get(key)) for key, name in names.items()]
            forest = hottest([(info.name, info) for info in joined if info.tiers and info.name is not None], limit)
            return {"prefixes": [_told_prefix(prefix) for prefix in forest]}

        return finish

    def _pin(self, fields: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        admin, tiers = self._store("pin"), fields.get("tiers")
        nodes = self._index.nodes() if "key" in fields else []

        def finish() -> dict[str, Any]:
            if "key" in fields:
                names = self._chain_to(_checked_key(fields["key"]), nodes)
            else:
                names = self._prompt(fields["root"], fields["tokens"]).names
            return {"pin": admin.pin(names, fields.get("ttl_s"), tiers).as_dict()}

        return finish

    def _unpin(self, fields: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        admin = self._store("unpin")

        def finish() -> dict[str, Any]:
            pin_ids = fields.get("ids")
            if "tokens" in fields:
                names = self._prompt(fields["root"], fields["tokens"]).names
                pin_ids = [name.key.hex() for name in names[-1:]]
            return {"pins": [info.as_dict() for info in admin.unpin(pin_ids)]}

        return finish

    def _pins(self, fields: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        admin = self._admin
        return lambda: {"pins": [] if admin is None else [info.as_dict() for info in admin.pins()]}

    def _purge(self, fields: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        root, tiers = fields.get("root"), fields.get("tiers")
        keys = None if fields.get("keys") is None else [_checked_key(key) for key in fields["keys"]]
        if "tokens" in fields:
            keys, root = [name.key for name in self._prompt(fields["root"], fields["tokens"]).names], None
        known = [DEVICE, *(fields.get("known_tiers") or [])]
        for tier in tiers or ():
            if tier not in known:
                raise ConfigError.unknown_name("tier", tier, known)
        removed: dict[str, int] = {}
        if not tiers or DEVICE in tiers:
            removed[DEVICE] = self._pool.purge(root, None if keys is None else set(keys))
        lower = None if not tiers else [tier for tier in tiers if tier != DEVICE]

        def finish() -> dict[str, Any]:
            if self._admin is None or lower == []:
                return {"removed": removed, "errors": {}}
            result = self._admin.purge(keys=keys, root=root, tiers=lower)
            return {"removed": removed | result.removed, "errors": dict(result.errors)}

        return finish

    def _doctor(self, fields: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        sizes = [self._block_size << i for i in range(16)]
        prefills = {} if self._prefill_s is None else {n: self._prefill_s(n, 0) for n in sizes}
        computed = {n: seconds for n, seconds in prefills.items() if seconds is not None}

        def finish() -> dict[str, Any]:
            measured = {} if self._admin is None else self._admin.measure()
            return {
                "block_size": self._block_size,
                "block_bytes": self._block_nbytes,
                "prefill_s": [[n, seconds] for n, seconds in computed.items()],
                "tiers": {name: self._judged(speed, computed) for name, speed in measured.items()},
            }

        return finish

    def _judged(self, speed: TierSpeed, computed: Mapping[int, float]) -> dict[str, Any]:
        """A tier's speed, and from how many tokens on a load from it is faster than computing them: None when it never
        is, or is not known."""
        faster = [
            n
            for n, seconds in computed.items()
            if (load_s := speed.load_s(n // self._block_size * self._block_nbytes)) is not None and load_s < seconds
        ]
        return speed.as_dict() | {"break_even_tokens": min(faster, default=None)}

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _store(self, verb: str) -> Admin:
        if self._admin is None:
            raise ConfigError(f"{verb}: this server has no tiers below the device; start it with --kv-tier")
        return self._admin

    def _prompt(self, root: bytes, tokens: bytes) -> _Prompt:
        names = chain_names(root, unpack_tokens(tokens), self._block_size, hash_=self._hash)
        return _Prompt(root, tokens, tuple(names))

    def _described(self, nodes: Sequence[Node]) -> dict[bytes, BlockInfo]:
        """Device blocks by key."""
        now_s = self._clock()
        return {
            node.name.key: BlockInfo(
                key=node.name.key,
                tiers=(DEVICE,),
                nbytes=self._block_nbytes,
                name=node.name,
                age_s=now_s - node.born_s,
                idle_s=now_s - node.used_s,
                hits=node.hits,
            )
            for node in nodes
            if node.name is not None
        }

    def _below(self, keys: Sequence[bytes]) -> dict[bytes, BlockInfo]:
        """What the lower tiers say of blocks, by key."""
        return {} if self._admin is None or not keys else {info.key: info for info in self._admin.query(keys)}

    def _joined(
        self, name: BlockName | None, device: BlockInfo | None, below: BlockInfo | None, key: bytes = b""
    ) -> BlockInfo:
        """One block over all tiers. The store's hits contain those on the device, unless it never knew the block."""
        sides = [side for side in (device, below) if side is not None]
        if not sides:
            return BlockInfo(key if name is None else name.key, name=name)
        ages = [side.age_s for side in sides if side.age_s is not None]
        idle = [side.idle_s for side in sides if side.idle_s is not None]
        return replace(
            sides[-1],
            tiers=tuple(tier for side in sides for tier in side.tiers),
            name=name or sides[-1].name,
            nbytes=max(side.nbytes for side in sides),
            age_s=max(ages, default=None),
            idle_s=min(idle, default=None),
            hits=max(side.hits for side in sides),
        )

    def _hit_tokens(self, prompt: _Prompt, match: Match, blocks: Sequence[BlockInfo]) -> dict[str, int]:
        """What a request with this prompt would be served now, by tier: as the scheduler does it."""
        size, num_device = self._block_size, len(match.nodes)
        hits = {DEVICE: num_device * size}
        end = num_device
        for block in blocks[num_device : (prompt.num_tokens - 1) // size]:
            lower = next((tier for tier in block.tiers if tier != DEVICE), None)
            if lower is None:
                break
            hits[lower] = hits.get(lower, 0) + size
            end += 1
        if end == num_device:
            hits[DEVICE] += match.num_partial
        return {tier: count for tier, count in hits.items() if count}

    def _chain_to(self, key: bytes, nodes: Sequence[Node]) -> tuple[BlockName, ...]:
        """The chain that ends in a block, over all tiers."""
        known = {node.name.key: node.name for node in nodes if node.name is not None}

        def name_of(wanted: bytes) -> BlockName | None:
            below = known.get(wanted)
            return below or next((info.name for info in self._below([wanted]).values()), None)

        return chain_to(key, name_of)


def _checked_key(key: Any) -> bytes:
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise ConfigError.bad_value("key", key.hex() if isinstance(key, bytes) else key, f"{2 * KEY_BYTES} hex digits")
    return key


def _told(block: BlockInfo) -> dict[str, Any]:
    """A block as plain data, with its tokens for whoever has a tokenizer."""
    return block.as_dict() | {"token_ids": b"" if block.name is None else block.name.tokens}


def _told_prefix(prefix: Prefix) -> dict[str, Any]:
    """A prefix and those below it as plain data, with its tokens."""
    children = [_told_prefix(child) for child in prefix.children]
    return prefix.as_dict() | {"token_ids": prefix.tokens, "children": children}
