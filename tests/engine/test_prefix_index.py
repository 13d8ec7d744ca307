"""Prefix index and block pool: examples, then a state machine against a plain model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagetier.engine.block_pool import BlockPool
from pagetier.engine.prefix_index import Node, PrefixIndex
from pagetier.kvstore.block import BlockName
from pagetier.kvstore.keys import chain_names, pack_tokens, root_key

ROOT = root_key(b"d" * 32)
BLOCK_SIZE = 4


def names_of(tokens: list[int]) -> list[BlockName]:
    return chain_names(ROOT, tokens, BLOCK_SIZE)


def make(num_blocks: int = 8) -> tuple[PrefixIndex, BlockPool]:
    index = PrefixIndex(BLOCK_SIZE)
    return index, BlockPool(num_blocks, index)


def compute(index: PrefixIndex, pool: BlockPool, tokens: list[int]) -> list[int]:
    """As a request would: allocate, index the full blocks, finish."""
    names = names_of(tokens)
    blocks = pool.allocate(len(names))
    assert blocks is not None
    if names:
        index.insert(names, blocks, 0, len(names), None)
    pool.release(blocks)
    return blocks


def test_match_finds_full_blocks_and_part_of_the_next() -> None:
    index, pool = make()
    blocks = compute(index, pool, list(range(12)))
    match = index.match(ROOT, pack_tokens([*range(10), 99, 98]), 11)
    assert [n.block for n in match.nodes] == blocks[:2]
    assert match.partial is not None and match.partial.block == blocks[2] and match.num_partial == 2


def test_match_never_exceeds_max_tokens() -> None:
    index, pool = make()
    compute(index, pool, list(range(12)))
    for limit in range(13):
        match = index.match(ROOT, pack_tokens(list(range(12))), limit)
        assert len(match.nodes) * BLOCK_SIZE + match.num_partial == limit


def test_other_roots_see_nothing() -> None:
    index, pool = make()
    compute(index, pool, list(range(12)))
    assert index.match(root_key(b"d" * 32, b"tenant"), pack_tokens(list(range(12))), 12).nodes == ()


def test_equal_blocks_keep_the_first() -> None:
    index, pool = make()
    names = names_of(list(range(8)))
    first, second = pool.allocate(2), pool.allocate(2)
    assert first is not None and second is not None
    index.insert(names, first, 0, 2, None)
    nodes = index.insert(names, second, 0, 2, None)
    assert [n.block for n in nodes] == first
    pool.release(second)
    assert pool.num_available == 6
    pool.release(first)
    assert pool.num_available == 8 and len(index) == 2
    pool.check()


def test_eviction_takes_the_coldest_tails_and_never_a_parent_before_its_child() -> None:
    index, pool = make(6)
    cold = compute(index, pool, list(range(12)))
    warm = compute(index, pool, list(range(100, 112)))
    assert index.evict(2) == [cold[2], cold[1]]
    assert index.evict(1) == [cold[0]]
    assert index.evict(2) == [warm[2], warm[1]]


def test_evict_is_all_or_nothing() -> None:
    index, pool = make(4)
    compute(index, pool, list(range(8)))
    held = compute(index, pool, list(range(50, 58)))
    pool.acquire(held)
    assert index.evict(3) is None
    assert len(index) == 4
    assert pool.allocate(3) is None
    pool.check()


def test_a_reference_to_a_child_protects_its_ancestors() -> None:
    index, pool = make(3)
    blocks = compute(index, pool, list(range(12)))
    pool.acquire([blocks[2]])
    assert index.num_evictable == 0
    assert pool.allocate(1) is None
    pool.release([blocks[2]])
    assert index.num_evictable == 3


def test_touching_a_cached_prefix_for_ever_keeps_the_heap_small() -> None:
    index, pool = make(4)
    blocks = compute(index, pool, list(range(8)))
    for _ in range(5000):
        pool.acquire(blocks)
        node = index.node_of(blocks[1])
        assert node is not None
        index.touch(node)
        pool.release(blocks)
    assert len(index._heap) < 200


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Listener:
    def __init__(self) -> None:
        self.told: list[tuple[str, set[bytes]]] = []

    def entered(self, names: Sequence[BlockName]) -> None:
        self.told.append(("entered", {name.key for name in names}))

    def left(self, names: Sequence[BlockName]) -> None:
        self.told.append(("left", {name.key for name in names}))


def test_lives_gaps_and_idle_times_are_counted_for_each_block() -> None:
    clock = Clock()
    index = PrefixIndex(BLOCK_SIZE, clock)
    pool = BlockPool(8, index)
    blocks = compute(index, pool, list(range(12)))
    second, third = (index.node_of(block) for block in blocks[1:])
    assert second is not None and third is not None
    clock.now_s = 2.0
    index.touch(second)  # of the first two blocks
    index.touch_part(third)
    clock.now_s = 7.0
    index.touch(third)
    assert [node.hits for node in index.nodes()] == [2, 2, 1]
    clock.now_s = 50.0
    assert index.evict(3) is not None
    life, idle, gap = (index.residency.lifetime, index.residency.idle_before_evict, index.residency.reuse_gap)
    assert (sum(life.counts), life.total) == (3, 150.0)
    assert (sum(idle.counts), idle.total) == (3, 3 * 43.0)
    assert (sum(gap.counts), gap.total) == (5, 2 * 2.0 + 2 * 5.0 + 7.0)
    assert gap.counts[gap.bounds.index(3)] == 2, "those of 2 s"


def test_a_listener_is_told_of_whatever_comes_and_goes() -> None:
    index, pool = make()
    index.listener = listener = Listener()
    keys = [name.key for name in names_of(list(range(12)))]
    compute(index, pool, list(range(8)))
    compute(index, pool, list(range(12)))
    assert index.evict(2) is not None
    assert listener.told == [("entered", set(keys[:2])), ("entered", {keys[2]}), ("left", set(keys[1:]))]


def test_a_purge_takes_what_nobody_uses_and_nothing_else() -> None:
    tokens, tenant = list(range(12)), root_key(b"d" * 32, b"tenant")
    index, pool = make(16)
    names = names_of(tokens)
    blocks = compute(index, pool, tokens)
    theirs = pool.allocate(3)
    assert theirs is not None
    index.insert(chain_names(tenant, tokens, BLOCK_SIZE), theirs, 0, 3, None)
    pool.release(theirs)
    assert pool.purge(keys={names[1].key, names[2].key}) == 2 and len(index) == 4
    assert pool.purge(keys={names[0].key}, root=tenant) == 0
    pool.acquire([theirs[1]])
    assert pool.purge(root=tenant) == 1, "the two in front are used"
    assert pool.purge(root=root_key(b"e" * 32)) == 0
    pool.release([theirs[1]])
    assert pool.purge() == 3 and len(index) == 0
    assert pool.num_available == 16 and index.node_of(blocks[0]) is None
    pool.check()


def _replace_node(index: PrefixIndex, node: Node, block: int) -> None:
    """Name another block in the tree; `_nodes` follows, as it would."""
    index._nodes[block] = index._nodes.pop(node.block)
    node.block = block


BROKEN: dict[str, Callable[[PrefixIndex, BlockPool, list[Node]], object]] = {
    "a node that left": lambda index, pool, nodes: setattr(nodes[1], "attached", False),
    "another's child": lambda index, pool, nodes: setattr(nodes[1], "parent", nodes[2]),
    "a child under two names": lambda index, pool, nodes: nodes[0].children.update({b"x": nodes[1]}),
    "a circle": lambda index, pool, nodes: nodes[2].children.update({b"x": nodes[0]}),
    "a parent colder than its child": lambda index, pool, nodes: setattr(nodes[2], "last_used", nodes[1].last_used + 1),
    "a reference of a leaf uncounted": lambda index, pool, nodes: setattr(nodes[2], "active", 0),
    "an active child uncounted": lambda index, pool, nodes: setattr(nodes[0], "active", nodes[0].active - 1),
    "a block in two nodes": lambda index, pool, nodes: _replace_node(index, nodes[1], nodes[2].block),
    "a node not found by its block": lambda index, pool, nodes: index._nodes.pop(nodes[2].block),
    "a block of no node": lambda index, pool, nodes: index._nodes.update({pool.num_blocks: nodes[2]}),
    "evictable miscounted": lambda index, pool, nodes: setattr(index, "_num_evictable", index._num_evictable + 1),
    "a referenced free block": lambda index, pool, nodes: pool._references.__setitem__(pool._free[0], 1),
    "a block free twice": lambda index, pool, nodes: pool._free.__setitem__(0, pool._free[1]),
    "free and cached": lambda index, pool, nodes: pool._free.append(next(iter(index.unreferenced_blocks()))),
    "a lost block": lambda index, pool, nodes: pool._free.pop(),
    "a holder without a reference": lambda index, pool, nodes: pool._references.__setitem__(nodes[2].block, 1),
    "one lost, one held and free": lambda index, pool, nodes: pool._free.__setitem__(0, nodes[2].block),
    "references miscounted": lambda index, pool, nodes: setattr(pool, "num_referenced", pool.num_referenced + 1),
}


@pytest.mark.parametrize("what", BROKEN)
def test_check_finds_whatever_is_broken(what: str) -> None:
    index, pool = make()
    blocks = pool.allocate(3)
    assert blocks is not None
    nodes = index.insert(names_of(list(range(12))), blocks, 0, 3, None)
    pool.acquire(blocks[2:])  # a second holder
    compute(index, pool, [*range(4), *range(50, 54)])  # a sibling that nobody holds
    pool.check([blocks, blocks[2:]])
    BROKEN[what](index, pool, nodes)
    with pytest.raises(AssertionError):
        pool.check([blocks, blocks[2:]])


class IndexMachine(RuleBasedStateMachine):
    """Requests come, match, compute and go in any order; the model is the set of prefixes ever indexed."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(2)
        self.pool = BlockPool(10, self.index)
        self.running: list[list[int]] = []

    @rule(tokens=st.lists(st.integers(0, 2), min_size=2, max_size=9))
    def run_request(self, tokens: list[int]) -> None:
        names = chain_names(ROOT, tokens, 2)
        match = self.index.match(ROOT, pack_tokens(tokens), len(tokens) - 1)
        nodes: list[Node] = list(match.nodes)
        for node, name in zip(nodes, names, strict=False):
            assert node.name == name
        matched = [node.block for node in nodes]
        self.pool.acquire(matched)
        blocks = self.pool.allocate(len(names) - len(matched))
        if blocks is None:
            self.pool.release(matched)
            return
        table = matched + blocks
        if len(names) > len(matched):
            new = self.index.insert(names, table, len(matched), len(names), nodes[-1] if nodes else None)
            for i, node in enumerate(new, len(matched)):
                if node.block != table[i]:
                    self.pool.acquire([node.block])
                    self.pool.release([table[i]])
                    table[i] = node.block
        found = self.index.match(ROOT, pack_tokens(tokens), len(tokens))
        assert [node.block for node in found.nodes] == table
        self.running.append(table)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish_request(self, data: st.DataObject) -> None:
        table = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        order = data.draw(st.permutations(table))
        self.pool.release(order)

    @rule(num_blocks=st.integers(1, 10))
    def evict(self, num_blocks: int) -> None:
        before = len(self.index)
        possible = self.index.num_evictable
        blocks = self.pool.allocate(num_blocks)
        if blocks is not None:
            self.pool.release(blocks)
        else:
            assert len(self.index) == before and num_blocks > possible

    @rule(first=st.integers(0, 2))
    def purge(self, first: int) -> None:
        doomed = {n.name.key for n in self.index.nodes() if n.name is not None and n.name.tokens[0] == first}
        self.pool.purge(keys=doomed)
        left = {n.name.key for n in self.index.nodes() if n.name is not None and not n.active}
        assert not left & doomed

    @invariant()
    def consistent(self) -> None:
        self.pool.check()
        held = {block for table in self.running for block in table}
        assert self.pool.num_referenced == len(held)
        assert self.pool.num_available == 10 - len(held)


IndexMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase
