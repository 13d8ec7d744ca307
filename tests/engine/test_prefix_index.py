"""Prefix index and block pool: examples, then a state machine against a plain model."""

from __future__ import annotations

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

    @invariant()
    def consistent(self) -> None:
        self.pool.check()
        held = {block for table in self.running for block in table}
        assert self.pool.num_referenced == len(held)
        assert self.pool.num_available == 10 - len(held)


IndexMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase
