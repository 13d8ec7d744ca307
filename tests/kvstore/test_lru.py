"""The chain-aware LRU against a model that sorts, with the parent rule checked after every step."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagetier.kvstore.lru import ChainLRU

Chain = tuple[int, ...]


def filled(*chains: str) -> ChainLRU[str]:
    """An LRU with each chain's prefixes as keys: "abc" has keys a, ab, abc."""
    lru: ChainLRU[str] = ChainLRU()
    for chain in chains:
        for end in range(1, len(chain) + 1):
            if chain[:end] not in lru:
                lru.add(chain[:end], chain[: end - 1])
    lru.check()
    return lru


def test_evicts_suffixes_of_the_coldest_chain() -> None:
    lru = filled("abc", "xyz")
    assert lru.evict(2) == ["abc", "ab"]
    lru.touch(["a"])
    assert lru.evict(10) == ["xyz", "xy", "x", "a"]
    assert len(lru) == 0


def test_touching_a_tail_renews_its_ancestors() -> None:
    lru = filled("abc", "xyz")
    lru.touch(["abc"])
    assert list(lru) == ["xyz", "xy", "x", "abc", "ab", "a"]


def test_a_shared_head_outlives_its_branches() -> None:
    lru = filled("ab", "ac", "ad")
    assert lru.evict(3)[-1] != "a" and list(lru) == ["a"]


def test_pinned_keys_and_so_their_ancestors_stay() -> None:
    lru = filled("abc", "xy")
    lru.pin("ab")
    assert lru.evict(10) == ["abc", "xy", "x"]
    assert list(lru) == ["ab", "a"] and lru.num_pinned == 1
    lru.unpin("ab")
    assert lru.evict(10) == ["ab", "a"] and lru.num_pinned == 0


def test_a_pin_is_not_a_use() -> None:
    lru = filled("a", "b")
    lru.pin("a")
    lru.unpin("a")
    assert lru.evict(1) == ["a"]


def test_refilling_a_hole_keeps_the_parent_rule() -> None:
    lru = filled("abc", "x")
    lru.remove("ab")
    lru.touch(["abc"])
    lru.add("ab", "a")
    lru.check()
    assert list(lru)[-1] == "a"


def test_adding_twice_is_a_bug() -> None:
    lru = filled("a")
    with pytest.raises(AssertionError, match="already"):
        lru.add("a", "")


class LRUMachine(RuleBasedStateMachine):
    """Keys are tuples, parents their prefixes. The model knows what is present and pinned, and when each was used."""

    def __init__(self) -> None:
        super().__init__()
        self.lru: ChainLRU[Chain] = ChainLRU()
        self.pins: dict[Chain, int] = {}

    keys = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)

    @rule(key=keys)
    def add(self, key: Chain) -> None:
        if key not in self.pins:
            self.lru.add(key, key[:-1])
            self.pins[key] = 0

    @rule(key=keys)
    def touch_chain(self, key: Chain) -> None:
        chain = [key[:end] for end in range(1, len(key) + 1)]
        self.lru.touch(chain)
        if all(link in self.pins for link in chain):
            assert list(self.lru)[-len(chain) :] == chain[::-1], "a touched chain is the hottest, its head most"

    @rule(keys=st.lists(keys, max_size=4))
    def touch_any(self, keys: list[Chain]) -> None:
        self.lru.touch(keys)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.pins)))
        assert self.lru.remove(key)
        del self.pins[key]

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.pins)))
        self.lru.pin(key)
        self.pins[key] += 1

    @rule(key=keys)
    def unpin(self, key: Chain) -> None:
        self.lru.unpin(key)
        if self.pins.get(key):
            self.pins[key] -= 1

    @rule(num_keys=st.integers(0, 6))
    def evict(self, num_keys: int) -> None:
        order = list(self.lru)
        taken = self.lru.evict(num_keys)
        assert len(taken) == len(set(taken)) <= num_keys
        model = dict(self.pins)
        for key in taken:
            assert not model[key], "a pinned key was evicted"
            assert not any(other[:-1] == key for other in model), "a parent went before its child"
            del model[key]
        assert [key for key in order if key in model] == list(self.lru)
        if len(taken) < num_keys:
            assert all(self._held(key) for key in model), "evictable keys were left"
        self.pins = model

    def _held(self, key: Chain) -> bool:
        return any(n and other[: len(key)] == key for other, n in self.pins.items()) or any(
            other[:-1] == key for other in self.lru
        )

    @invariant()
    def is_consistent(self) -> None:
        self.lru.check()
        assert set(self.lru) == set(self.pins)
        assert self.lru.num_pinned == sum(1 for n in self.pins.values() if n)


TestLRUMachine = LRUMachine.TestCase
TestLRUMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
