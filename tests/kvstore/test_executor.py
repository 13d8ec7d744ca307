"""Executors run every task, phases in order, bounded threads; the seeded one replays."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable

import pytest

from pagetier.kvstore.executor import MAX_IDLE_PUMPS, NICENESS, Executor, SeededExecutor, Task, ThreadPool


def two_phases(log: list[str], name: str) -> Task:
    def second() -> None:
        log.append(f"{name}2")

    def first() -> Task:
        log.append(f"{name}1")
        return second

    return first


@pytest.mark.parametrize("make", [lambda: ThreadPool("t", 3), lambda: SeededExecutor(1), SeededExecutor.inline])
def test_close_runs_what_is_queued_to_its_end(make: Callable[[], Executor]) -> None:
    executor, log = make(), list[str]()
    for i in range(40):
        executor.submit(two_phases(log, f"{i}."))
    assert executor.close(10.0) and executor.close(10.0)
    assert sorted(log) == sorted(f"{i}.{phase}" for i in range(40) for phase in (1, 2))
    assert all(log.index(f"{i}.1") < log.index(f"{i}.2") for i in range(40))


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux alone")
def test_the_stores_threads_give_way_and_their_caller_does_not() -> None:
    """By as much whoever made them: a pool may be filled by another pool's thread."""
    before, found = os.getpriority(os.PRIO_PROCESS, 0), list[int]()
    outer, inner = ThreadPool("outer", 1), ThreadPool("inner", 1)

    def look() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    def look_and_hand_on() -> None:
        look()
        inner.submit(look)

    outer.submit(look_and_hand_on)
    assert outer.close(10.0) and inner.close(10.0)
    assert found == [min(19, before + NICENESS)] * 2
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_threads_are_bounded_and_made_on_demand() -> None:
    pool, gate, running = ThreadPool("bounded", 2), threading.Event(), threading.Semaphore(0)
    before = threading.active_count()

    def block() -> None:
        running.release()
        gate.wait()

    for _ in range(6):
        pool.submit(block)
    assert running.acquire(timeout=5) and running.acquire(timeout=5)
    assert threading.active_count() == before + 2
    assert not running.acquire(timeout=0.05)
    assert not pool.close(0.05), "two threads are still held"
    gate.set()
    assert pool.close(5.0)
    assert threading.active_count() == before


def test_a_task_that_raises_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    pool, done = ThreadPool("robust", 1), threading.Event()

    def fail() -> None:
        raise RuntimeError("our bug")

    pool.submit(fail)
    pool.submit(done.set)
    assert done.wait(5.0) and pool.close(5.0)
    assert [r.levelno for r in caplog.records] == [logging.ERROR]


def run(seed: int) -> list[str]:
    executor, log = SeededExecutor(seed), list[str]()
    for i in range(20):
        executor.submit(two_phases(log, f"{i}."))
        executor.pump()
    while executor.num_waiting:
        before = len(log)
        for _ in range(MAX_IDLE_PUMPS + 1):
            executor.pump()
        assert len(log) > before, "pumps without progress"
    return log


def test_a_seed_names_one_order() -> None:
    assert run(1) == run(1) != run(2)
    assert any(log.index(f"{i}.2") > log.index(f"{i}.1") + 1 for log in [run(3)] for i in range(20))


def test_inline_runs_all_at_the_first_pump() -> None:
    executor, log = SeededExecutor.inline(), list[str]()
    executor.submit(two_phases(log, "a"))
    assert log == []
    executor.pump()
    assert log == ["a1", "a2"]
