"""A radix tree over the *device* blocks of finished computation: which prefix of a prompt is already in the pool.

Owns the tree, its recency and the choice of what to evict. Knows neither reference counts nor lower tiers: the
block pool says when a block gains its first or loses its last reference. Nodes hold one full block each; children
are found by their tokens, so a match is exact and needs no trust in a hash.

Invariants (`check()`):
 - a block is in at most one node, and `_nodes` maps exactly the blocks of the tree;
 - `node.active` counts its own reference (0 or 1) plus its children with active > 0; a node is evictable iff it is 0,
   hence a subtree below an evictable node is evictable as a whole;
 - a parent is never colder than its child.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pagetier.kvstore.block import TOKEN_BYTES, BlockName
from pagetier.kvstore.residency import Residency

CHANGES_PER_VERSION = 64
MAX_PARTIAL_CANDIDATES = 32  # siblings looked at for a partly matching block; bounds the time of a match


@dataclass(slots=True, eq=False)
class Node:
    """One full block of the tree. `saved`: the state of the lower tiers (`Transfers.tiers_state`) in which it was
    handed to them and not refused, 0 for never. `hits`: times a request used it again. `born_s`, `used_s`: on the
    index's clock."""

    name: BlockName | None  # None: a root
    block: int
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)
    by_first_token: dict[bytes, list[Node]] = field(default_factory=dict)
    active: int = 0
    referenced: bool = False
    last_used: int = 0
    saved: int = 0
    hits: int = 0
    born_s: float = 0.0
    used_s: float = 0.0
    attached: bool = True


@dataclass(frozen=True, slots=True)
class Match:
    """nodes: fully matching blocks in order. partial: a block whose first `num_partial` tokens match further, or
    None.
    """

    nodes: tuple[Node, ...]
    partial: Node | None = None
    num_partial: int = 0


class ChangeListener(Protocol):
    """Told of blocks, on the core thread: it must be quick and must not raise."""

    def entered(self, names: Sequence[BlockName]) -> None:
        """These are in the index now, head first."""

    def left(self, names: Sequence[BlockName]) -> None:
        """These no longer are, in no order."""


class PrefixIndex:
    """See the module docstring. Owner: core thread."""

    def __init__(self, block_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.residency = Residency()
        self.listener: ChangeListener | None = None  # told of whatever comes and goes
        self._now_s = clock
        self._block_size = block_size
        self._step = block_size * TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}
        self._nodes: dict[int, Node] = {}
        self._heap: list[tuple[int, int]] = []  # (last_used, block) of evictable leaves; stale entries are skipped
        self._clock = 0
        self._num_evictable = 0
        self._num_changes = 0

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def num_evictable(self) -> int:
        """Blocks that `evict` could free now."""
        return self._num_evictable

    @property
    def version(self) -> int:
        """Changes with every `CHANGES_PER_VERSION` blocks that came or went: for answers that may be a little old."""
        return self._num_changes // CHANGES_PER_VERSION

    def nodes(self) -> list[Node]:
        """All of them, as a copy: another thread may look at their names, hits and times, which may be a little old."""
        return list(self._nodes.values())

    def node_of(self, block: int) -> Node | None:
        return self._nodes.get(block)

    def unreferenced_blocks(self) -> set[int]:
        """Blocks that only the index keeps."""
        return {block for block, node in self._nodes.items() if not node.referenced}

    def match(self, root: bytes, tokens: bytes, max_tokens: int) -> Match:
        """The longest indexed prefix of `tokens` (u32 LE), at most `max_tokens` long, part of the next block included.

        Changes nothing; recency is renewed by `touch`.
        """
        node = self._roots.get(root)
        nodes: list[Node] = []
        if node is None or max_tokens <= 0:
            return Match(())
        step, position = self._step, 0
        while position + self._block_size <= max_tokens:
            start = position * TOKEN_BYTES
            child = node.children.get(tokens[start : start + step])
            if child is None:
                break
            nodes.append(child)
            node, position = child, position + self._block_size
        rest = tokens[position * TOKEN_BYTES : min(position + self._block_size, max_tokens) * TOKEN_BYTES]
        partial, num_partial = self._best_partial(node, rest)
        return Match(tuple(nodes), partial, num_partial)

    def match_tokens(self, root: bytes, tokens: bytes) -> int:
        """How many leading tokens of `tokens` (u32 LE) whole indexed blocks hold."""
        node, step, start = self._roots.get(root), self._step, 0
        while node is not None:
            node = node.children.get(tokens[start : start + step])
            start += step
        return max(0, start // step - 1) * self._block_size

    def _best_partial(self, node: Node, rest: bytes) -> tuple[Node | None, int]:
        best, best_length = None, 0
        for child in node.by_first_token.get(rest[:TOKEN_BYTES], ())[:MAX_PARTIAL_CANDIDATES]:
            assert child.name is not None
            length = _common_tokens(child.name.tokens, rest)
            if length > best_length:
                best, best_length = child, length
        return best, best_length

    def insert(
        self, chain: Sequence[BlockName], blocks: Sequence[int], first: int, end: int, tip: Node | None
    ) -> list[Node]:
        """Index blocks[first:end] under the names chain[first:end]; `tip` is the node of chain[first - 1], None at 0.

        A name that is already indexed keeps its block: compare `node.block` of the answer. Blocks that enter, and the
        tip, must be referenced by the caller. Returns the nodes of chain[first:end].
        """
        node = self._root(chain[0].root) if tip is None else tip
        now_s, nodes = self._now_s(), []
        added: list[BlockName] = []
        for i in range(first, end):
            child = node.children.get(chain[i].tokens)
            if child is None:
                assert blocks[i] not in self._nodes, f"block {blocks[i]} is indexed elsewhere"
                child = self._add(node, chain[i], blocks[i])
                child.born_s = child.used_s = now_s
                added.append(chain[i])
            nodes.append(child)
            node = child
        self._renew(node)
        if self.listener is not None and added:
            self.listener.entered(added)
        return nodes

    def _root(self, root: bytes) -> Node:
        node = self._roots.get(root)
        if node is None:
            node = self._roots[root] = Node(None, -1, None)
        return node

    def _add(self, parent: Node, name: BlockName, block: int) -> Node:
        node = Node(name, block, parent)
        parent.children[name.tokens] = node
        parent.by_first_token.setdefault(name.tokens[:TOKEN_BYTES], []).append(node)
        self._nodes[block] = node
        self._num_evictable += 1
        self._num_changes += 1
        self.activate(block)
        return node

    def touch(self, node: Node) -> None:
        """A request used the chain that ends in `node`."""
        self._renew(node)
        self._count_use(node)

    def touch_part(self, node: Node) -> None:
        """A request used a part of `node`, and all before it, which is counted by `touch`."""
        self._renew(node)

    def _count_use(self, tip: Node) -> None:
        now_s, gaps_s, node = self._now_s(), [], tip
        while node.parent is not None:
            node.hits += 1
            gaps_s.append(now_s - node.used_s)
            node.used_s = now_s
            node = node.parent
        self.residency.reused(gaps_s)

    def _renew(self, tip: Node) -> None:
        """Tail first, so that no parent is colder than its child."""
        node = tip
        while node.parent is not None:
            self._clock += 1
            node.last_used = self._clock
            node = node.parent
        self._offer(tip)

    def activate(self, block: int) -> None:
        """`block` gained its first reference."""
        node = self._nodes[block]
        assert not node.referenced, block
        node.referenced = True
        self._raise_active(node)

    def _raise_active(self, node: Node | None) -> None:
        while node is not None and node.parent is not None:
            node.active += 1
            if node.active > 1:
                return
            self._num_evictable -= 1
            node = node.parent

    def deactivate(self, block: int) -> None:
        """`block` lost its last reference."""
        node: Node | None = self._nodes[block]
        assert node is not None and node.referenced, block
        node.referenced = False
        tip = node
        while node is not None and node.parent is not None:
            node.active -= 1
            if node.active > 0:
                break
            self._num_evictable += 1
            node = node.parent
        self._offer(tip)

    def _offer(self, node: Node) -> None:
        """Make `node` a candidate for eviction if it can be one now."""
        if node.active or node.children or node.parent is None:
            return
        heapq.heappush(self._heap, (node.last_used, node.block))
        if len(self._heap) > 2 * len(self._nodes) + 64:  # mostly stale by now
            leaves = (n for n in self._nodes.values() if not n.active and not n.children)
            self._heap = [(n.last_used, n.block) for n in leaves]
            heapq.heapify(self._heap)

    def evict(self, num_blocks: int) -> list[int] | None:
        """Remove the `num_blocks` coldest evictable blocks, children before parents; their ids, or None and no change
        when there are not that many."""
        if num_blocks > self._num_evictable:
            return None
        gone: list[Node] = []
        while len(gone) < num_blocks:
            last_used, block = heapq.heappop(self._heap)
            node = self._nodes.get(block)
            if node is None or node.last_used != last_used or node.active or node.children:
                continue
            gone.append(node)
            self._remove(node)
        return self._told_gone(gone)

    def purge(self, root: bytes | None = None, keys: Collection[bytes] | None = None) -> list[int]:
        """Remove all blocks, those below `root`, or those of `keys` and what comes after them, as far as no request
        uses them; the ids of what was removed."""
        if keys is not None:
            tops = [n for n in self._nodes.values() if n.name is not None and n.name.key in keys]
        elif root is not None:
            tops = [self._roots[root]] if root in self._roots else []
        else:
            tops = list(self._roots.values())
        found: dict[int, Node] = {}
        while tops:
            node = tops.pop()
            if node.block not in found:
                if node.name is not None:
                    if root is not None and node.name.root != root:
                        continue
                    found[node.block] = node
                tops.extend(node.children.values())
        gone = []
        for node in sorted(found.values(), key=_position, reverse=True):  # children first
            if not node.active and not node.children:
                gone.append(node)
                self._remove(node)
        return self._told_gone(gone)

    def _told_gone(self, gone: Sequence[Node]) -> list[int]:
        """The blocks of removed nodes, after they were counted and told of."""
        now_s = self._now_s()
        for node in gone:
            self.residency.evicted(now_s - node.born_s, now_s - node.used_s)
        if self.listener is not None and gone:
            self.listener.left([node.name for node in gone if node.name is not None])
        return [node.block for node in gone]

    def _remove(self, node: Node) -> None:
        parent, name = node.parent, node.name
        assert parent is not None and name is not None
        del parent.children[name.tokens]
        siblings = parent.by_first_token[name.tokens[:TOKEN_BYTES]]
        siblings.remove(node)
        if not siblings:
            del parent.by_first_token[name.tokens[:TOKEN_BYTES]]
        del self._nodes[node.block]
        node.attached = False
        self._num_evictable -= 1
        self._num_changes += 1
        if parent.parent is not None:
            self._offer(parent)
        elif not parent.children:
            del self._roots[name.root]

    def check(self) -> None:
        """Raise AssertionError with ids when an invariant of the class is broken. Costs a walk over the tree."""
        blocks: list[int] = []
        evictable = 0
        stack = list(self._roots.values())
        while stack:
            parent = stack.pop()
            is_root, active = parent.parent is None, int(parent.referenced)
            for node in parent.children.values():
                assert node.attached and node.parent is parent, f"block {node.block}: bad parent"
                assert is_root or parent.last_used >= node.last_used, (
                    f"block {parent.block} colder than its child {node.block}"
                )
                blocks.append(node.block)
                if node.active:
                    active += 1
                else:
                    evictable += 1
                if node.children:
                    stack.append(node)
                else:
                    assert node.active == node.referenced, f"block {node.block}: active {node.active}, counted none"
            assert is_root or parent.active == active, f"block {parent.block}: active {parent.active}, counted {active}"
        assert len(set(blocks)) == len(blocks), f"blocks {[b for b, n in Counter(blocks).items() if n > 1]} twice"
        assert self._nodes.keys() == set(blocks), f"lost blocks {self._nodes.keys() ^ set(blocks)}"
        assert evictable == self._num_evictable, f"evictable {self._num_evictable}, counted {evictable}"


def _position(node: Node) -> int:
    return -1 if node.name is None else node.name.position


def _common_tokens(a: bytes, b: bytes) -> int:
    """Length in tokens of the common prefix of two u32 LE runs."""
    n = min(len(a), len(b)) // TOKEN_BYTES
    if a[: n * TOKEN_BYTES] == b[: n * TOKEN_BYTES]:
        return n
    different = np.frombuffer(a, "<u4", n) != np.frombuffer(b, "<u4", n)
    return int(different.argmax())
