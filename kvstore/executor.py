"""Where the store's blocking work runs: a bounded thread pool, or the caller's own thread in a seeded order.

Makes the threads that move blocks. A task is a callable that returns its next phase or None. Threads run the
phases back to back; the seeded executor may let other tasks, or the caller, in between them, as a slow medium would.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

MAX_IDLE_PUMPS = 8  # of the seeded executor
# By how much the store's threads give way to those that compute: where cores are short, a load takes longer rather than
# every step of everybody else.
NICENESS = 10

Task = Callable[[], "Task | None"]


class Executor(Protocol):
    """Runs tasks some time after `submit`."""

    def submit(self, task: Task) -> None:
        """Queue a task; any thread, tasks included."""

    def pump(self) -> None:
        """Give tasks a chance to run on this thread. Called by the store's `poll`, on its caller's thread."""

    def close(self, timeout_s: float) -> bool:
        """Run what is queued to its end, then stop; whether that was done in time. Idempotent."""


ExecutorFactory = Callable[[str, int], Executor]  # (name, most tasks at once)


class ThreadPool:
    """At most `num_threads` threads, made when there is work for them. First in, first out."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._name, self._num_threads = name, num_threads
        self._ready = threading.Condition()
        self._tasks: deque[Task] = deque()  # guarded by self._ready, as all below
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._closing = False

    def submit(self, task: Task) -> None:
        with self._ready:
            self._tasks.append(task)
            if self._num_idle >= len(self._tasks):
                self._ready.notify()
            elif len(self._threads) < self._num_threads:
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def pump(self) -> None:
        """Nothing: the threads run by themselves."""

    def close(self, timeout_s: float) -> bool:
        with self._ready:
            self._closing = True
            self._ready.notify_all()
            threads = list(self._threads)
        deadline_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _work(self) -> None:
        _give_way()
        while True:
            with self._ready:
                while not self._tasks:
                    if self._closing:
                        return
                    self._num_idle += 1
                    self._ready.wait()
                    self._num_idle -= 1
                task: Task | None = self._tasks.popleft()
            while task is not None:
                task = _phase(task)


def _give_way() -> None:
    """Of the calling thread alone, which only Linux knows; where it is refused, all are equal."""
    if sys.platform == "linux":
        try:
            main = os.getpriority(
                os.PRIO_PROCESS, os.getpid()
            )  # a thread begins with its maker's, which may be one of us
            os.setpriority(os.PRIO_PROCESS, 0, min(19, main + NICENESS))
        except OSError as error:
            logger.debug("the store's threads run at the engine's priority: %s", error)


class SeededExecutor:
    """Runs tasks only inside `pump`, in an order drawn from `seed`: equal seeds and calls replay exactly.

    eagerness: the chance of each waiting phase to run in a pump; 1.0 runs all of them, follow-ups included, at the
    first. After MAX_IDLE_PUMPS pumps without a phase one is run, so polling always ends. One thread only.
    """

    def __init__(self, seed: int = 0, eagerness: float = 0.5) -> None:
        self._rng, self._eagerness = random.Random(seed), eagerness
        self._tasks: list[Task] = []  # owner: the polling thread, as all below
        self._num_idle_pumps = 0

    @classmethod
    def inline(cls) -> SeededExecutor:
        """All that is queued runs to its end at the next `pump`."""
        return cls(eagerness=1.0)

    def factory(self, name: str, num_threads: int) -> Executor:
        """An `ExecutorFactory` that puts all of a store's work on this one."""
        return self

    @property
    def num_waiting(self) -> int:
        return len(self._tasks)

    def submit(self, task: Task) -> None:
        self._tasks.append(task)

    def pump(self) -> None:
        if self._eagerness >= 1.0:
            self.run_all()
            return
        waiting, self._tasks = self._tasks, []
        self._rng.shuffle(waiting)
        self._num_idle_pumps += 1
        for task in waiting:
            if self._num_idle_pumps > MAX_IDLE_PUMPS or self._rng.random() < self._eagerness:
                self._num_idle_pumps = 0
                self._run(task)
            else:
                self._tasks.append(task)

    def run_all(self) -> None:
        """Run everything, what it submits included, to the end."""
        while self._tasks:
            waiting, self._tasks = self._tasks, []
            self._rng.shuffle(waiting)
            for task in waiting:
                self._run(task)

    def close(self, timeout_s: float) -> bool:
        self.run_all()
        return True

    def _run(self, task: Task) -> None:
        following = _phase(task)
        if following is not None:
            self._tasks.append(following)


def _phase(task: Task) -> Task | None:
    """One phase; a task that raises is our own bug: logged, and the thread lives on."""
    try:
        return task()
    except Exception:
        logger.exception("a task of the KV store failed; its blocks count as misses")
        return None
