"""What the requests that do not run are waiting for, in counts."""

from __future__ import annotations

from collections import Counter

from pagetier.engine.leaders import is_following
from pagetier.engine.queues import Queues
from pagetier.engine.request import Request

REASONS = ("turn", "leader", "lookup", "load", "swapped", "preempted")


def count_reasons(queues: Queues) -> dict[str, int]:
    """By reason. turn: their turn, seats or blocks; leader: what another request is computing; lookup: a lower tier's
    answer; load: its bytes; swapped, preempted: to run again, by way of the lower tiers or by computing."""
    counts = Counter(map(_reason, queues.waiting))
    counts["load"] = len(queues.loading)
    return {reason: counts[reason] for reason in REASONS}


def _reason(request: Request) -> str:
    if request.preempted_by:
        return "swapped" if request.preempted_by == "swap" else "preempted"
    if is_following(request):
        return "leader"
    return "lookup" if request.ticket is not None and request.lookup_tiers is None else "turn"
