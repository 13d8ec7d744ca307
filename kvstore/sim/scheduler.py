"""One seeded scheduler of everything that could run: the phases of all processes' tasks, and their polls.

All runs on one thread. What would be parallel is interleaved where it matters: between tasks, and *inside* them at
every operation on a file or a socket, where other tasks run before the operation goes on. A task whose process holds a
lock there is not run, as it would have to wait for it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from pagetier.kvstore.executor import Task
from pagetier.kvstore.nvme.crash_fs import Killed

MAX_DEPTH = 3  # of tasks inside tasks


class Host(Protocol):
    """Whose tasks they are: a simulated process."""

    is_dead: bool
    num_running: int

    def may_run(self, *, writes: bool) -> bool:
        """Whether a task could run now without waiting for a lock. writes: it is one that writes."""

    def note_crash(self, error: BaseException) -> None:
        """A task raised, which none may."""


class SimulatedExecutor:
    """Implements `executor.Executor`: at most `num_threads` tasks at once, begun in their order."""

    def __init__(self, host: Host, scheduler: Scheduler, name: str, num_threads: int) -> None:
        self.host, self._scheduler = host, scheduler
        self.writes = name.endswith("-write")
        self._num_threads = num_threads
        self._waiting: deque[Task] = deque()
        self._begun: list[Task] = []  # their next phases
        self._num_running = 0

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._begun or self._num_running)

    @property
    def num_ready(self) -> int:
        """Phases that a thread is free for."""
        free = self._num_threads - len(self._begun) - self._num_running
        return len(self._begun) + (free > 0 and bool(self._waiting))

    def submit(self, task: Task) -> None:
        self._waiting.append(task)

    def pump(self) -> None:
        """Nothing: the scheduler runs tasks when it likes."""

    def close(self, timeout_s: float) -> bool:
        """Run what is queued to its end."""
        while self.num_ready and not self.host.is_dead:
            self.run(0)
        return self.is_idle

    def run(self, rank: int) -> None:
        """One phase: of a begun task, or of the first waiting one."""
        task = self._begun.pop(rank) if rank < len(self._begun) else self._waiting.popleft()
        self._num_running += 1
        self.host.num_running += 1
        try:
            with suppress(Killed):
                following = task()
                if following is not None:
                    self._begun.append(following)
        except Exception as error:
            # a task of the store must not raise, whatever its tiers do: that is a finding
            self.host.note_crash(error)
        finally:
            self._num_running -= 1
            self.host.num_running -= 1


class Scheduler:
    """Picks who runs. `rng` decides; the caller replaces it to make a part of a run independent of what came before."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.is_off = False  # nobody runs inside of others
        self._executors: list[SimulatedExecutor] = []
        self._others: list[tuple[Host, Callable[[], None]]] = []
        self._depth = 0

    def make_executor(self, host: Host, name: str, num_threads: int) -> SimulatedExecutor:
        executor = SimulatedExecutor(host, self, name, num_threads)
        self._executors.append(executor)
        return executor

    def add(self, host: Host, turn: Callable[[], None]) -> None:
        """`turn` is another thing that a process does now and then; it is called when the process may run."""
        self._others.append((host, turn))

    def forget(self, host: Host) -> None:
        """A process that has ended has nothing to run."""
        self._executors = [executor for executor in self._executors if executor.host is not host]
        self._others = [other for other in self._others if other[0] is not host]

    def step(self) -> bool:
        """Run one thing that is ready; whether a task was."""
        ready = [
            executor
            for executor in self._executors
            if (executor._waiting or executor._begun)
            and executor.num_ready
            and not executor.host.is_dead
            and executor.host.may_run(writes=executor.writes)
        ]
        rng = self.rng
        if ready and (not self._others or rng.random() < 0.8):
            executor = ready[int(rng.random() * len(ready))]
            executor.run(int(rng.random() * executor.num_ready))
            return True
        if self._others:
            host, turn = self._others[int(rng.random() * len(self._others))]
            if not host.is_dead and host.may_run(writes=False):
                with suppress(Killed):  # then it is gone; whoever runs around it goes on
                    turn()
        return bool(ready)

    def let_others_run(self) -> None:
        """At an operation of some task: perhaps others run now, before it."""
        if self.is_off or self._depth >= MAX_DEPTH or self.rng.random() > 0.12:
            return
        self._depth += 1
        try:
            for _ in range(int(self.rng.random() * 4)):
                if not self.step():
                    break
        finally:
            self._depth -= 1
