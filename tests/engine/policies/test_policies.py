"""What each policy promises about order, fairness and giving way."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetier.engine.messages import EngineRequest
from pagetier.engine.policies.base import MAX_FEW, Policy
from pagetier.engine.policies.fair import Fair
from pagetier.engine.policies.lpm import MAX_PASSED, WINDOW, LongestPrefix
from pagetier.engine.policies.make import POLICIES
from pagetier.engine.policies.ranked import Fcfs, Priority
from pagetier.engine.prefix_index import PrefixIndex
from pagetier.engine.request import Request
from pagetier.engine.sampling_params import SamplingParams
from pagetier.kvstore.keys import hash_named, root_key

ROOT = root_key(bytes(32), b"")
PARAMS = SamplingParams(temperature=0.0, max_tokens=4)


def request(order: int, *, priority: int = 0, tenant: str = "", prompt: tuple[int, ...] = (1, 2, 3)) -> Request:
    spec = EngineRequest(str(order), prompt, PARAMS, seed=0, priority=priority, tenant=tenant)
    return Request(spec, order, ROOT, 4, hash_named("sha256"))


def served(policy: Policy, count: int) -> list[Request]:
    """The next `count` to be admitted, each charged for its prompt."""
    admitted = []
    for _ in range(count):
        found = next(policy.candidates())
        policy.remove(found)
        policy.charge(found, found.num_prompt_tokens)
        admitted.append(found)
    return admitted


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data())
def test_a_queue_holds_what_was_pushed_and_not_removed(name: str, data: st.DataObject) -> None:
    policy = POLICIES[name](PrefixIndex(4))
    waiting: set[Request] = set()
    coin: st.SearchStrategy[bool] = st.booleans()
    for order in range(data.draw(st.integers(1, 30))):
        if len(waiting) > 0 and data.draw(coin):
            gone = data.draw(st.sampled_from(sorted(waiting, key=lambda r: r.order)))
            policy.remove(gone)
            waiting.remove(gone)
            if data.draw(coin):  # preempted: it waits again
                policy.push(gone)
                waiting.add(gone)
            else:
                policy.finish(gone)
        else:
            new = request(order, priority=data.draw(st.integers(-2, 2)), tenant=data.draw(st.sampled_from("abc")))
            policy.push(new)
            waiting.add(new)
        assert len(policy) == len(waiting)
        assert set(policy) == set(policy.candidates()) == waiting


@pytest.mark.parametrize("name", POLICIES)
def test_candidates_may_end_as_they_come(name: str) -> None:
    """Down to the last one: what has outgrown the pool is ended in its turn."""
    policy = POLICIES[name](PrefixIndex(4))
    requests = {request(order, tenant="ab"[order % 2]) for order in range(4)}
    for one in requests:
        policy.push(one)
    ended = set()
    for one in policy.candidates():
        policy.remove(one)
        policy.finish(one)
        ended.add(one)
    assert ended == requests and len(policy) == 0


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", ["fcfs", "priority"])
def test_a_long_queue_that_changes_is_walked_in_order(name: str, seed: int) -> None:
    """Who waits from the beginning to its turn comes once, whoever leaves, arrives or is sent back meanwhile."""
    draw, policy = random.Random(f"{name}-{seed}"), POLICIES[name](PrefixIndex(4))
    waiting = [request(order, priority=draw.randrange(4)) for order in range(draw.choice([1, MAX_FEW, 5 * MAX_FEW]))]
    for each in draw.sample(waiting, len(waiting)):
        policy.push(each)
    never_left, came, num_new = set(waiting), [], len(waiting)
    for each in policy.candidates():
        came.append(each)
        if draw.random() < 0.5:
            gone = draw.choice([each, *waiting[-3:]])
            if gone in policy:
                policy.remove(gone)
                never_left.discard(gone)
                if draw.random() < 0.3:
                    policy.push(gone)
        if draw.random() < 0.2:
            num_new += 1
            policy.push(request(num_new, priority=draw.randrange(4)))
    assert [each for each in came if each in never_left] == sorted(never_left, key=policy.rank)
    assert [policy.rank(each) for each in came] == sorted(map(policy.rank, came))


@pytest.mark.parametrize("name", POLICIES)
def test_who_does_not_wait_cannot_be_removed(name: str) -> None:
    policy = POLICIES[name](PrefixIndex(4))
    policy.push(request(1))
    for stranger in (request(1), request(2), request(1, tenant="other")):
        with pytest.raises(ValueError, match="does not wait"):
            policy.remove(stranger)


@pytest.mark.parametrize("name", POLICIES)
def test_ranks_are_fixed_and_different(name: str) -> None:
    policy = POLICIES[name](PrefixIndex(4))
    requests = [request(i, priority=i % 3, tenant="ab"[i % 2]) for i in range(20)]
    assert len({policy.rank(r) for r in requests}) == 20


def test_fcfs_goes_by_arrival_also_after_preemption() -> None:
    policy, requests = Fcfs(), [request(i) for i in range(5)]
    for each in reversed(requests):
        policy.push(each)
    assert served(policy, 5) == requests


def test_priority_goes_first_and_preempts_from_the_gap_on() -> None:
    policy = Priority(gap=2)
    low, middle, high = request(0, priority=5), request(1, priority=4), request(2, priority=2)
    for each in (low, middle, high):
        policy.push(each)
    assert served(policy, 3) == [high, middle, low]
    assert policy.outranks(high, low) and policy.outranks(high, middle)
    assert not policy.outranks(middle, low), "a gap of 1 is less than 2"
    assert not policy.outranks(low, high) and not policy.outranks(high, high)


class Matches:
    """Device matches by request, with a version and a count of the questions."""

    def __init__(self, lengths: dict[int, int]) -> None:
        self.lengths = lengths
        self.version = 0
        self.num_asked = 0

    def policy(self) -> LongestPrefix:
        return LongestPrefix(self._match, lambda: self.version)

    def _match(self, request: Request) -> int:
        self.num_asked += 1
        return self.lengths.get(request.order, 0)


def test_lpm_takes_the_longest_match_and_equal_ones_by_arrival() -> None:
    policy = Matches({1: 8, 3: 8, 4: 16}).policy()
    for order in range(6):
        policy.push(request(order))
    assert [r.order for r in served(policy, 6)] == [4, 1, 3, 0, 2, 5]


def test_lpm_matches_again_only_when_the_index_changed() -> None:
    matches = Matches({})
    policy = matches.policy()
    for order in range(10):
        policy.push(request(order))
    for _ in range(3):
        list(policy.candidates())
    assert matches.num_asked == 10
    matches.version, matches.lengths = 1, {7: 4}
    assert next(policy.candidates()).order == 7
    assert matches.num_asked == 20


def test_lpm_passes_nobody_over_for_ever() -> None:
    matches = Matches(dict.fromkeys(range(1, 10_000), 100))
    policy = matches.policy()
    policy.push(request(0))
    order = 0
    for order in range(1, 10_000):
        policy.push(request(order))
        if served(policy, 1)[0].order == 0:
            break
    assert order == MAX_PASSED + 1


def test_lpm_looks_at_a_window_of_a_long_queue() -> None:
    matches = Matches({5000: 100})
    policy = matches.policy()
    for order in range(10_000):
        policy.push(request(order))
    list(policy.candidates())
    assert matches.num_asked == WINDOW


@given(seed=st.integers(0, 1 << 20), weight=st.sampled_from([1.0, 2.0, 4.0]))
def test_fair_serves_backlogged_tenants_by_weight(seed: int, weight: float) -> None:
    """Within one request of the largest size, whatever the sizes and arrivals."""
    rng = random.Random(seed)
    policy, order, longest = Fair({"a": weight}), 0, 50
    tokens: Counter[str] = Counter()
    for _ in range(300):
        for tenant in "ab":
            if sum(r.spec.tenant == tenant for r in policy) < 3:
                policy.push(request(order, tenant=tenant, prompt=tuple(range(1, rng.randint(2, longest)))))
                order += 1
        for admitted in served(policy, 1):
            tokens[admitted.spec.tenant] += admitted.num_prompt_tokens
            policy.finish(admitted)
    assert abs(tokens["a"] / weight - tokens["b"]) <= 2 * longest


def test_fair_saves_up_no_idle_time() -> None:
    policy = Fair()
    for order in range(20):
        policy.push(request(order, tenant="busy"))
    served(policy, 10)
    for order in range(20, 40):
        policy.push(request(order, tenant="late"))
    first = [r.spec.tenant for r in served(policy, 6)]
    assert Counter(first) == {"busy": 3, "late": 3}


def test_fair_charges_output_twice() -> None:
    policy = Fair()
    a, b = request(0, tenant="a"), request(1, tenant="b")
    for each in (a, b):
        policy.push(each)
        policy.remove(each)
    a.num_computed_tokens = a.num_prompt_tokens
    policy.charge(a, 3)
    policy.charge(b, 5)
    for order, tenant in ((2, "a"), (3, "b")):
        policy.push(request(order, tenant=tenant))
    assert next(policy.candidates()).spec.tenant == "b", "5 is less than 2 x 3"
