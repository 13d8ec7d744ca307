"""Which running request gives up its blocks when another finds none."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pagetier.engine.block_pool import BlockPool
from pagetier.engine.request import Request
from pagetier.engine.restore_cost import RestoreCost

MAX_CANDIDATES = 8  # to price every running request in a step that lacks a block would be the longest part of it


def choose_victim(candidates: Sequence[Request], pool: BlockPool, cost: RestoreCost, may_swap: bool) -> Request:
    """Of the last few candidates (by rank) the one whose KV is cheapest to bring back for each block that only it
    holds."""
    candidates = candidates[-MAX_CANDIDATES:]
    return min(reversed(candidates), key=lambda one: _restore_s(one, pool, cost, may_swap))


def _restore_s(request: Request, pool: BlockPool, cost: RestoreCost, may_swap: bool) -> float:
    """Seconds for each block that comes free; the same for all while nothing is measured."""
    num_exclusive = sum(pool.references(block) == 1 for block in request.block_ids)
    ways = [cost.recompute_s(request.num_computed_tokens)]
    if may_swap:
        ways.append(cost.swap_s(len(request.block_ids), len(request.block_ids)))
    seconds = min((way for way in ways if way is not None), default=1.0)
    return seconds / num_exclusive if num_exclusive else math.inf
