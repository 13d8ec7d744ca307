"""The policy interface, and the sorted queue that most policies are."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from typing import Protocol

from pagetier.engine.request import Request

Rank = tuple[int, ...]
MAX_FEW = 128  # requests that are handed out between two looks at the queue


class Policy(Protocol):
    """Holds the waiting requests. Called from the core thread; each call should take microseconds: a queue may be
    10,000 long. Requests are hashable, and `Request.order` rises with arrival.
    """

    def push(self, request: Request) -> None:
        """A request waits: new, or preempted with what it has."""

    def remove(self, request: Request) -> None:
        """A waiting request is admitted or ended. Raises ValueError when it does not wait."""

    def candidates(self) -> Iterator[Request]:
        """Waiting requests, the next to be admitted first; not necessarily all. What is yielded may be removed
        or end meanwhile."""

    def rank(self, request: Request) -> Rank:
        """Fixed from arrival on and no other request's: the smallest of the running gets blocks and budget first, the
        largest is preempted first."""

    def outranks(self, waiting: Request, running: Request) -> bool:
        """Whether the running request is to be preempted when there is no room for the waiting one."""

    def charge(self, request: Request, num_tokens: int) -> None:
        """The next step computes so many tokens of the request."""

    def finish(self, request: Request) -> None:
        """A request, waiting or not, ended; called after `remove`."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class SortedQueue:
    """Waiting requests by rank: a policy that admits in that order and charges nobody.

    Ranks are kept beside them: a search among 10,000 that asked each for its own would take most of an arrival's time.
    """

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self._requests: list[Request] = []
        self._ranks: list[Rank] = []
        for request in requests:
            self.push(request)

    def rank(self, request: Request) -> Rank:
        return (request.order,)

    def outranks(self, waiting: Request, running: Request) -> bool:
        return False

    def push(self, request: Request) -> None:
        rank = self.rank(request)
        index = bisect.bisect(self._ranks, rank)
        self._requests.insert(index, request)
        self._ranks.insert(index, rank)

    def remove(self, request: Request) -> None:
        index = bisect.bisect_left(self._ranks, self.rank(request))
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"request {request.request_id} does not wait")
        del self._requests[index], self._ranks[index]

    def candidates(self) -> Iterator[Request]:
        """A few at a time: most of a long queue is never asked for."""
        few, ranks = self._requests[:MAX_FEW], self._ranks[:MAX_FEW]
        while few:
            yield from few
            first = bisect.bisect(self._ranks, ranks[-1])
            few, ranks = self._requests[first : first + MAX_FEW], self._ranks[first : first + MAX_FEW]

    def first(self, count: int) -> list[Request]:
        """The first `count` by rank."""
        return self._requests[:count]

    def charge(self, request: Request, num_tokens: int) -> None:
        pass

    def finish(self, request: Request) -> None:
        pass

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)
