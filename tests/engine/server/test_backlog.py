"""How soon there is room again follows from how fast things went, while there was something to do."""

from __future__ import annotations

import random

import pytest

from pagetier.engine.messages import EngineRequest
from pagetier.engine.sampling_params import SamplingParams
from pagetier.engine.server.backlog import MAX_RETRY_S, WINDOW_S, Backlog
from tests.engine.test_ledger import Clock


def request(name: str, num_tokens: int, first: int = 0) -> EngineRequest:
    return EngineRequest(name, tuple(range(first, first + num_tokens)), SamplingParams(), seed=0)


def test_counts_are_what_is_left_whatever_comes_in_whichever_order() -> None:
    rng, clock = random.Random(1), Clock()
    backlog, waiting, open_ = Backlog(clock), dict[str, int](), set[str]()
    for step in range(2000):
        clock.sleep(0.1)
        match rng.choice(("add", "took", "end", "unknown")):
            case "add":
                count = rng.randrange(1, 50)
                backlog.add([request(f"{step}-0", count), request(f"{step}-1", count)])
                waiting[f"{step}-0"] = count
                open_ |= {f"{step}-0", f"{step}-1"}
            case "took" if open_:
                name = rng.choice(sorted(open_))
                backlog.took(name)
                waiting.pop(name, None)
            case "end" if open_:
                name = rng.choice(sorted(open_))
                backlog.end(name)
                open_.remove(name)
                waiting.pop(name, None)
            case _:
                backlog.end("nobody")
                backlog.took("nobody")
        assert (backlog.num_open, backlog.num_tokens) == (len(open_), sum(waiting.values()))


@pytest.mark.parametrize("idle_s", [0.0, 1000.0])
def test_room_comes_as_fast_as_it_did(idle_s: float) -> None:
    """Ten tokens a second, a sequence every two; the time in which nobody was there does not count."""
    clock = Clock()
    backlog = Backlog(clock)
    for i in range(30):
        backlog.add([request(f"r{i}", 20, first=i)])
        clock.sleep(2.0)
        backlog.took(f"r{i}")
        backlog.end(f"r{i}")
        clock.sleep(idle_s)
    backlog.add([request("last", 20)])
    assert backlog.retry_for_tokens_s(100) == 10
    assert backlog.retry_for_sequences_s(3) == 6
    assert backlog.retry_for_tokens_s(10**9) == MAX_RETRY_S
    assert backlog.retry_for_tokens_s(1) == 1


def test_nothing_known_is_a_second() -> None:
    backlog = Backlog(Clock())
    backlog.add([request("r", 20)])
    assert backlog.retry_for_tokens_s(100) == backlog.retry_for_sequences_s(3) == 1


def test_an_engine_that_became_slower_is_believed() -> None:
    clock = Clock()
    backlog = Backlog(clock)
    for seconds, num_requests in ((0.1, 100), (10.0, 30)):
        for i in range(num_requests):
            backlog.add([request(f"r{i}", 20)])
            clock.sleep(seconds)
            backlog.took(f"r{i}")
            backlog.end(f"r{i}")
    backlog.add([request("last", 20)])
    assert WINDOW_S < 300 and 45 <= backlog.retry_for_tokens_s(100) <= 50
