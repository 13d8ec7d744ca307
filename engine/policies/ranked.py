"""Policies whose order is fixed at arrival: first come first served, and by priority."""

from __future__ import annotations

from pagetier.engine.policies.base import Rank, SortedQueue
from pagetier.engine.request import Request


class Fcfs(SortedQueue):
    """First come, first served; nobody is preempted for one that waits."""


class Priority(SortedQueue):
    """Smaller `priority` values first, equal ones by arrival. A waiting request preempts running ones whose value is
    larger by at least `gap`: with a gap of more than 1, neighbouring classes do not push each other out."""

    def __init__(self, gap: int = 1) -> None:
        super().__init__()
        self._gap = gap

    def rank(self, request: Request) -> Rank:
        return (request.spec.priority, request.order)

    def outranks(self, waiting: Request, running: Request) -> bool:
        return running.spec.priority - waiting.spec.priority >= self._gap
