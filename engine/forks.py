"""The choices of one prompt (`n`, `best_of`): computed once, its blocks shared until the choices differ.

The first choice that is admitted computes the prompt. The others wait for it and then fork: they take references to its
full blocks, a copy of the part of the last one that the prompt fills, and compute the last prompt token alone, each for
a sample of its own. A choice that ended or was preempted is nobody's source; the next one then takes its place. One
that ends with its first tokens, before anybody could fork, leaves its blocks to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagetier.engine.request import Following, Request, RequestState


@dataclass(frozen=True, slots=True)
class Fork:
    """What a choice takes from `source`: its first `num_full` blocks, and a copy of `num_partial` slots of the next."""

    source: Request
    num_full: int
    num_partial: int


class Forks:
    """Unfinished choices by group. Owner: core thread. Works without the prefix index."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._groups: dict[str, list[Request]] = {}

    def add(self, request: Request) -> None:
        """A request arrived. It joins its group if it has the same prompt as the others there."""
        group = request.spec.group
        if not group:
            return
        members = self._groups.setdefault(group, [])
        if not members or _is_same_prompt(members[0], request):
            members.append(request)

    def remove(self, request: Request) -> None:
        """A request ended."""
        members = self._groups.get(request.spec.group, [])
        if request in members:
            members.remove(request)
        if not members:
            self._groups.pop(request.spec.group, None)

    def fork_of(self, request: Request) -> Fork | None:
        """What a waiting choice can take from another one, or None."""
        num_shared = self._num_shared(request)
        for other in self._others(request):
            if other.state is RequestState.RUNNING and other.num_committed_tokens >= num_shared:
                return Fork(other, *self.shared_by(request))
        return None

    def follow(self, request: Request) -> bool:
        """Let a waiting choice wait for an earlier one that is computing the prompt; whether there is one."""
        num_shared = self._num_shared(request)
        for other in self._others(request):
            is_seated = other.state in (RequestState.RUNNING, RequestState.LOADING)
            if is_seated and other.order < request.order and other.num_committed_tokens < num_shared:
                request.following = Following(other, other.epoch, num_shared)
                return True
        return False

    def heir_of(self, request: Request) -> Request | None:
        """Who waits for a running choice that is about to end, and takes over its blocks then; None while others run,
        from which one can fork."""
        others = self._others(request)
        if any(other.state is RequestState.RUNNING for other in others):
            return None
        waiting = (other for other in others if other.state is RequestState.WAITING and not other.num_placeholders)
        return next((other for other in waiting if request.num_committed_tokens >= self._num_shared(other)), None)

    def shared_by(self, request: Request) -> tuple[int, int]:
        """Full blocks, and slots of the next, that a choice may share."""
        return divmod(self._num_shared(request), self._block_size)

    def _others(self, request: Request) -> list[Request]:
        members = self._groups.get(request.spec.group, [])
        return [other for other in members if other is not request] if request in members else []

    def _num_shared(self, request: Request) -> int:
        """Tokens that it may share: of the prompt, and one is always left to compute."""
        return min(request.num_prompt_tokens, request.num_tokens - 1)

    def check(self, requests: set[Request]) -> None:
        """Raise AssertionError when a group is empty or knows a request that ended."""
        for group, members in self._groups.items():
            assert members and requests.issuperset(members), f"group {group} holds an ended request, or none"


def _is_same_prompt(a: Request, b: Request) -> bool:
    return a.root == b.root and a.spec.prompt_ids == b.spec.prompt_ids
