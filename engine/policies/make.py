"""The policies that ship, by the names of `--scheduling-policy`."""

from __future__ import annotations

from collections.abc import Callable

from pagetier.engine.policies.base import Policy
from pagetier.engine.policies.fair import Fair
from pagetier.engine.policies.lpm import LongestPrefix
from pagetier.engine.policies.ranked import Fcfs, Priority
from pagetier.engine.prefix_index import PrefixIndex
from pagetier.engine.request import Request

MakePolicy = Callable[[PrefixIndex], Policy]


def _longest_prefix(index: PrefixIndex) -> Policy:
    def match(request: Request) -> int:
        return index.match_tokens(request.root, request.packed_tokens())

    return LongestPrefix(match, lambda: index.version)


POLICIES: dict[str, MakePolicy] = {
    "fcfs": lambda index: Fcfs(),
    "priority": lambda index: Priority(),
    "lpm": _longest_prefix,
    "fair": lambda index: Fair(),
}
