"""Where each unfinished request is: running, loading from a lower tier, or waiting."""

from __future__ import annotations

import bisect

from pagetier.engine.policies.base import Policy
from pagetier.engine.request import Request, RequestState


class Queues:
    """`running` is sorted by the policy's rank; `waiting` is the policy, preempted requests included. Owner: core
    thread."""

    def __init__(self, policy: Policy) -> None:
        self.running: list[Request] = []
        self.loading: list[Request] = []
        self.waiting = policy

    @property
    def num_seated(self) -> int:
        """Requests that hold one of the seats of `max_num_seqs`."""
        return len(self.running) + len(self.loading)

    def leave(self, request: Request) -> None:
        """Take it out of the queue that its state names."""
        match request.state:
            case RequestState.RUNNING:
                self.running.remove(request)
            case RequestState.LOADING:
                self.loading.remove(request)
            case _:
                self.waiting.remove(request)

    def start(self, request: Request) -> None:
        """A request that is in no queue runs."""
        request.state = RequestState.RUNNING
        bisect.insort(self.running, request, key=self.waiting.rank)

    def load(self, request: Request) -> None:
        """A request that is in no queue waits for bytes of a lower tier, with its blocks."""
        request.state = RequestState.LOADING
        self.loading.append(request)

    def wait(self, request: Request) -> None:
        """A request that is in no queue waits for its turn."""
        request.state = RequestState.WAITING
        request.passed_since_s = None
        self.waiting.push(request)

    def check(self, requests: set[Request]) -> None:
        """Raise AssertionError when they are not exactly these, or out of order."""
        queued = {*self.running, *self.waiting, *self.loading}
        assert queued == requests, "a request is in no queue, or a queue holds a finished one"
        ranks = [self.waiting.rank(request) for request in self.running]
        assert ranks == sorted(ranks), "running order"
