"""Traces repeat by seed and share what they say; caches hold chains whole, within their bounds, whatever the order."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pagetier.benchmarks.policies.bench import Everything, draw, usable_share
from pagetier.benchmarks.policies.caches import CACHES
from pagetier.benchmarks.policies.traces import LONG_BLOCKS, TRACES, Chain
from pagetier.benchmarks.report import Report, Row


def tree_chains(seed: int, num_requests: int) -> list[Chain]:
    """Short chains over a small random tree: every shape of sharing comes up."""
    draw_ = random.Random(seed)
    parents = {0: -1} | {key: draw_.randrange(key) for key in range(1, 60)}
    chains = []
    for _ in range(num_requests):
        key, chain = draw_.randrange(60), []
        while key >= 0:
            chain.append(key)
            key = parents[key]
        chains.append(tuple(reversed(chain)))
    return chains


@pytest.mark.parametrize("trace", TRACES)
def test_a_trace_repeats_by_seed_and_a_block_has_one_parent(trace: str) -> None:
    chains = list(TRACES[trace](60, 1))
    assert chains == list(TRACES[trace](60, 1)) != list(TRACES[trace](60, 2))
    parents: dict[int, int] = {}
    for chain in chains:
        for parent, key in zip((-1, *chain), chain, strict=False):
            assert parents.setdefault(key, parent) == parent, f"{key} has two parents"


def test_the_long_prompt_comes_back_whole() -> None:
    chains = list(TRACES["long"](41, 0))
    assert [len(chain) > LONG_BLOCKS for chain in chains].count(True) == 3
    assert chains[0][:LONG_BLOCKS] == chains[20][:LONG_BLOCKS] == chains[40][:LONG_BLOCKS]


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("seed", range(8))
def test_what_is_found_is_a_prefix_that_was_asked_for_before(name: str, seed: int) -> None:
    cache, all_, num_found = CACHES[name](20), Everything(), 0
    for chain in tree_chains(seed, 200):
        found = cache.serve(chain)
        assert found <= all_.serve(chain), "more was found than was ever there"
        cache.check()
        num_found += found
    assert num_found > 0


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_holds_all_finds_all(name: str) -> None:
    chains = tree_chains(3, 100)
    assert usable_share(CACHES[name](60), chains) == usable_share(Everything(), chains)


@pytest.mark.parametrize("name", CACHES)
def test_a_prompt_larger_than_the_cache_keeps_its_head(name: str) -> None:
    cache = CACHES[name](50)
    cache.serve(tuple(range(80)))
    assert cache.serve(tuple(range(80))) == 50


def test_the_picture_groups_by_trace(tmp_path: Path) -> None:
    rows = tuple(Row(f"{trace}_{name}", 0.5, "share") for trace in TRACES for name in CACHES)
    path = draw(Report("policies", "abc", "2026-01-01", "a machine", "pagetier bench policies", rows), tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
