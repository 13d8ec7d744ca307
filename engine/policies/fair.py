"""Fair shares between tenants by virtual token counters (Sheng et al., Fairness in Serving Large Language Models,
OSDI 2024)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from pagetier.engine.policies.base import Rank, SortedQueue
from pagetier.engine.request import Request

OUTPUT_WEIGHT = 2.0  # a token of output costs two of prompt: section 5 of the paper
NO_WEIGHTS: Mapping[str, float] = MappingProxyType({})


class Fair:
    """The tenant that was served least goes first, its requests by arrival.

    A tenant's counter rises with the tokens computed for it, divided by its weight (1 where none is given); what comes
    from the cache is free. A tenant that comes back is lifted to the least counter of those being served: idle time is
    not saved up.
    """

    def __init__(self, weights: Mapping[str, float] = NO_WEIGHTS) -> None:
        self._weights = weights
        self._queues: dict[str, SortedQueue] = {}  # of tenants with waiting requests
        self._unfinished: Counter[str] = Counter()
        self._known: set[Request] = set()
        self._served: dict[str, float] = {}

    def rank(self, request: Request) -> Rank:
        return (request.order,)

    def outranks(self, waiting: Request, running: Request) -> bool:
        return False

    def push(self, request: Request) -> None:
        tenant = request.spec.tenant
        if request not in self._known:
            self._known.add(request)
            if not self._unfinished[tenant]:
                others = [self._served[name] for name, count in self._unfinished.items() if count]
                self._served[tenant] = max(self._served.get(tenant, 0.0), min(others, default=0.0))
            self._unfinished[tenant] += 1
        self._queues.setdefault(tenant, SortedQueue()).push(request)

    def remove(self, request: Request) -> None:
        tenant = request.spec.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            raise ValueError(f"request {request.request_id} does not wait")
        queue.remove(request)
        if not len(queue):
            del self._queues[tenant]

    def candidates(self) -> Iterator[Request]:
        """Counters count as they are when the next one is asked for, so that an admission shows at once."""
        heads: dict[str, Iterator[Request]] = {tenant: queue.candidates() for tenant, queue in self._queues.items()}
        while heads:
            tenant = min(heads, key=lambda name: self._served.get(name, 0.0))  # none: what was yielded was the last
            request = next(heads[tenant], None)
            if request is None:
                del heads[tenant]
            else:
                yield request

    def charge(self, request: Request, num_tokens: int) -> None:
        is_output = request.num_computed_tokens >= request.num_prompt_tokens
        cost = num_tokens * (OUTPUT_WEIGHT if is_output else 1.0)
        tenant = request.spec.tenant
        self._served[tenant] += cost / self._weights.get(tenant, 1.0)

    def finish(self, request: Request) -> None:
        tenant = request.spec.tenant
        self._known.discard(request)
        self._unfinished[tenant] -= 1
        if not self._unfinished[tenant]:
            del self._unfinished[tenant]
        if not self._unfinished:  # counters only matter in comparison: they start anew, and do not pile up
            self._served.clear()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        for queue in self._queues.values():
            yield from queue
