"""The write policy `second-touch`: a tier holds what was used twice, wherever the second use found it."""

from __future__ import annotations

import random

import pytest

from pagetier.kvstore.block import BlockStatus
from pagetier.kvstore.config import StoreConfig, parse_write_policy
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.executor import SeededExecutor
from tests.kvstore.rig import PAYLOAD_BYTES, Rig, addresses, memory
from tests.kvstore.test_store import Unpinned
from tests.kvstore.tier_contract import chain

OK, EXISTS, DROPPED = BlockStatus.OK, BlockStatus.EXISTS, BlockStatus.DROPPED


def settled(rig: Rig) -> None:
    """Everything that was begun has ended."""
    for _ in range(200):
        rig.seen += rig.store.poll()
    rig.until(lambda: not rig.store.has_work and not rig.executor.num_waiting)


def test_what_is_new_is_not_given_and_what_is_put_again_is() -> None:
    names = chain(6)
    with Rig(memory("redis"), second_touch=["redis"]) as rig:
        assert rig.put(names) == (DROPPED,) * 6
        assert rig.tiers[0].counters().blocks == 0
        assert rig.put(names) == (OK,) * 6
        assert rig.put(names) == (EXISTS,) * 6


def test_a_touch_on_the_device_copies_from_the_tier_that_has_it() -> None:
    names = chain(10)
    nvme, redis = Unpinned("nvme"), memory("redis")
    with Rig(nvme, redis, second_touch=["redis"]) as rig:
        assert rig.put(names) == (OK,) * 10
        assert redis.counters().blocks == 0
        rig.store.touch(names[:7])
        settled(rig)
        assert redis.counters().blocks == 7
        rig.store.touch(names)
        settled(rig)
        assert redis.counters().blocks == 10 and redis.counters().bytes_written == 10 * PAYLOAD_BYTES


def test_a_load_is_a_use_even_after_a_restart() -> None:
    names = chain(8)
    nvme, redis = Unpinned("nvme"), memory("redis")
    with Rig(nvme, redis) as rig:
        rig.put(names)
    redis.delete(addresses(names))
    with Rig(nvme, redis, second_touch=["redis"]) as rig:
        ticket, found = rig.lookup(names)
        assert found == ("nvme",) * 8
        rig.load(ticket, names)
        rig.store.release(ticket)
        settled(rig)
        assert redis.counters().blocks == 8


def test_what_the_other_tier_lost_waits_for_its_next_use() -> None:
    names = chain(4)
    nvme, redis = Unpinned("nvme"), memory("redis")
    with Rig(nvme, redis, second_touch=["redis"]) as rig:
        rig.put(names)
        nvme.delete(addresses(names))
        rig.store.touch(names)
        settled(rig)
        assert redis.counters().blocks == 0
        assert rig.put(names) == (OK,) * 4
        settled(rig)
        assert redis.counters().blocks == 4


@pytest.mark.parametrize("seed", range(40))
def test_the_tier_holds_just_what_was_used_twice(seed: int) -> None:
    rng = random.Random(seed)
    chains = [chain(rng.randint(1, 9), seed=number) for number in range(6)]
    nvme, redis = Unpinned("nvme"), memory("redis")
    uses = [0] * len(chains)
    executor = SeededExecutor(seed, eagerness=rng.choice((0.3, 0.7, 1.0)))
    with Rig(nvme, redis, second_touch=["redis"], executor=executor) as rig:
        for _ in range(rng.randint(3, 14)):
            number = rng.randrange(len(chains))
            names = chains[number]
            kind = rng.choice(("put", "touch", "load")) if uses[number] else "put"
            if kind == "put":
                rig.put(names)
            elif kind == "touch":
                rig.store.touch(names)
            else:
                ticket, found = rig.lookup(names)
                assert len(found) == len(names)
                rig.load(ticket, names)
                rig.store.release(ticket)
            uses[number] += 1
            settled(rig)
        for names, count in zip(chains, uses, strict=True):
            held = redis.lookup(addresses(names), float("inf"))
            assert held == (len(names) if count >= 2 else 0), (count, held, len(names))


@pytest.mark.parametrize(
    ("text", "tiers"),
    [
        ("", ()),
        ("nvme=through", ()),
        ("nvme=through,redis=second-touch", ("redis",)),
        (" redis = second-touch , nvme=second-touch", ("redis", "nvme")),
    ],
)
def test_the_flag_names_tiers_and_policies(text: str, tiers: tuple[str, ...]) -> None:
    assert parse_write_policy(text) == tiers
    assert StoreConfig(tiers=("nvme", "redis"), write_policy=text).second_touch == tiers


@pytest.mark.parametrize(
    "text",
    ["redis", "redis=", "redis=never", "=through", "disk=through", "redis=through,redis=through", "redis=through,"],
)
def test_what_names_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-write-policy"):
        StoreConfig(tiers=("nvme", "redis"), write_policy=text)


def test_a_policy_for_a_tier_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-write-policy: got 'redis'; allowed: tiers of --kv-tier: nvme"):
        StoreConfig(tiers=("nvme",), write_policy="redis=second-touch")
