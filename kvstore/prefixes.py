"""Stored blocks as a forest of prefixes: runs of blocks that are used alike are one node. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagetier.kvstore.block import BlockName
from pagetier.kvstore.errors import ConfigError

if TYPE_CHECKING:
    from pagetier.kvstore.admin import BlockInfo

MAX_CHAIN_BLOCKS = 65_536  # a million tokens


@dataclass(slots=True)
class Prefix:
    """A run of a chain: consecutive blocks, each the only child of the one before, with equal hits and tiers.

    key: of its last block, so that it can be queried and pinned. position: of its first token. tokens: of the run, u32
    little-endian. nbytes: one copy of each block.
    """

    key: bytes
    root: bytes
    position: int
    num_blocks: int
    tokens: bytes
    hits: int
    nbytes: int
    age_s: float | None
    idle_s: float | None
    tiers: tuple[str, ...]
    pinned: bool = False
    children: list[Prefix] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4

    def as_dict(self) -> dict[str, Any]:
        """The node's entry in `GET /top`, without text."""
        return {
            "key": self.key.hex(),
            "tokens": [self.position, self.position + self.num_tokens - 1],
            "num_tokens": self.num_tokens,
            "num_blocks": self.num_blocks,
            "tiers": list(self.tiers),
            "bytes": self.nbytes,
            "age_s": None if self.age_s is None else round(self.age_s, 3),
            "idle_s": None if self.idle_s is None else round(self.idle_s, 3),
            "hits": self.hits,
            "pinned": self.pinned,
            "children": [child.as_dict() for child in self.children],
        }


def hottest(blocks: Sequence[tuple[BlockName, BlockInfo]], limit: int) -> list[Prefix]:
    """The `limit` prefixes with most hits, and of equal ones those with most tokens, below the prefixes they need.

    A child is never hotter than its parent, so a prefix comes with those above it. Blocks whose parent is not among
    them are shown at the top.
    """
    known = {name.key: (name, info) for name, info in blocks}
    children: dict[bytes, list[bytes]] = {}
    tops: list[bytes] = []
    for name, _ in known.values():
        if name.parent in known and name.parent != name.key:
            children.setdefault(name.parent, []).append(name.key)
        else:
            tops.append(name.key)
    shown: list[Prefix] = []
    numbers = itertools.count()
    waiting: list[tuple[int, int, int, Prefix, list[bytes], list[Prefix]]] = []

    def offer(key: bytes, siblings: list[Prefix]) -> None:
        node, below = _run(key, known, children)
        heapq.heappush(waiting, (-node.hits, -node.num_tokens, next(numbers), node, below, siblings))

    for key in tops:
        offer(key, shown)
    for _ in range(limit):
        if not waiting:
            break
        *_, node, below, siblings = heapq.heappop(waiting)
        siblings.append(node)
        for key in below:
            offer(key, node.children)
    return shown


def _run(
    key: bytes, known: dict[bytes, tuple[BlockName, BlockInfo]], children: dict[bytes, list[bytes]]
) -> tuple[Prefix, list[bytes]]:
    """The run that begins at a block, and the blocks below its end."""
    first, info = known[key]
    tokens, nbytes, count = [first.tokens], info.nbytes, 1
    while len(below := children.get(key, [])) == 1:
        name, following = known[below[0]]
        if (following.hits, following.tiers, following.pinned) != (info.hits, info.tiers, info.pinned):
            break
        key, count, nbytes = below[0], count + 1, nbytes + following.nbytes
        tokens.append(name.tokens)
    node = Prefix(
        key=key,
        root=first.root,
        position=first.position,
        num_blocks=count,
        tokens=b"".join(tokens),
        hits=info.hits,
        nbytes=nbytes,
        age_s=info.age_s,
        idle_s=info.idle_s,
        tiers=info.tiers,
        pinned=info.pinned,
    )
    return node, children.get(key, [])


def chain_to(key: bytes, name_of: Callable[[bytes], BlockName | None]) -> tuple[BlockName, ...]:
    """The chain that ends in a block, head first, as far back as its root. Raises ConfigError where it is not known."""
    names: list[BlockName] = []
    while not names or names[-1].parent != names[-1].root:
        wanted = key if not names else names[-1].parent
        name = name_of(wanted)
        if name is None or len(names) >= MAX_CHAIN_BLOCKS:
            raise ConfigError(f"key {wanted.hex()}: nothing is known of this block; give the prompt instead")
        names.append(name)
    return tuple(reversed(names))
