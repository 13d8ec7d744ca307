"""Who gives up blocks, when, and by which way it gets their content back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pagetier.engine.admission import has_outgrown
from pagetier.engine.block_pool import BlockPool
from pagetier.engine.config import EngineConfig
from pagetier.engine.plan import StepPlan
from pagetier.engine.queues import Queues
from pagetier.engine.request import Request, RequestState
from pagetier.engine.tables import BlockTables
from pagetier.engine.transfers import Transfers
from pagetier.engine.victims import choose_victim


class Preemption:
    """Owner: core thread.

    is_held_up: whether a waiting request could not be admitted yet, whatever room there was. send_back: a running
    request waits again, without KV. end: a request ends for lack of room. num_preemptions, num_swaps: of any kind since
    start; those of them by way of the lower tiers.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        tables: BlockTables,
        transfers: Transfers,
        queues: Queues,
        launched: deque[StepPlan],
        is_held_up: Callable[[Request], bool],
        send_back: Callable[[Request], None],
        end: Callable[[Request], None],
    ) -> None:
        self.num_preemptions = self.num_swaps = 0
        self._config, self._pool, self._tables = config, pool, tables
        self._transfers, self._queues, self._launched = transfers, queues, launched
        self._is_held_up, self._send_back, self._end = is_held_up, send_back, end

    def find_blocks(self, request: Request, num_tokens: int) -> bool:
        """Give a running request blocks for `num_tokens` tokens, those of later ones if need be; False when it has to
        wait, or was itself preempted or ended."""
        while not self._tables.grow(request, num_tokens):
            if not self._make_room(request) or request.state is not RequestState.RUNNING:
                return False
        return True

    def _make_room(self, request: Request) -> bool:
        """The request found no block. Wait if some are coming free; else preempt the last by rank, or end a request
        that is alone and has outgrown the pool. Whether one was preempted."""
        if self._transfers.holds_blocks or any(step.release_after for step in self._launched):
            return False
        running = self._queues.running
        if len(running) > 1:
            self._preempt(choose_victim(request, running, self._pool, self._transfers.cost, self._may_swap))
            return True
        if not request.num_in_flight and not self._queues.loading:
            self._end(request)
        return False

    def make_way(self) -> bool:
        """Preempt running requests, the last by rank first, for a waiting one that outranks them and finds no seat or
        no blocks; whether any was. It is admitted when their blocks have come free, a step or two later."""
        running, waiting = self._queues.running, self._queues.waiting
        request = next(waiting.candidates(), None)
        if request is None or not running or not waiting.outranks(request, running[-1]):
            return False
        if has_outgrown(request, self._config) or self._is_held_up(request):
            return False  # others would take what it was given
        num_missing = -(-request.num_tokens // self._config.block_size) - len(self._tables.match(request).nodes)
        num_preemptions = self.num_preemptions
        while running and waiting.outranks(request, running[-1]):
            num_coming = self._pool.num_available + sum(len(step.release_after) for step in self._launched)
            has_seat = self._queues.num_seated < self._config.max_num_seqs
            if has_seat and num_coming >= num_missing + len(running):
                break
            self._preempt(running[-1])
        return self.num_preemptions > num_preemptions

    @property
    def _may_swap(self) -> bool:
        return self._transfers.enabled and self._config.preemption_mode != "recompute"

    def _preempt(self, request: Request) -> None:
        """Take all blocks of a running request. It gets their content back when its turn comes again: from the device
        while it lasts, from the lower tiers, which are given it now if that is the cheaper way, or by computing it."""
        self.num_preemptions += 1
        request.num_preemptions += 1
        if self._may_swap and request.tip is not None:
            unsaved = self._transfers.unsaved(request.tip)
            always = self._config.preemption_mode == "swap"
            num_tokens = request.num_indexed_blocks * self._config.block_size
            if always or self._transfers.cost.prefers_swap(num_tokens, request.num_indexed_blocks, len(unsaved)):
                self.num_swaps += 1
                self._transfers.save(unsaved)
        self._send_back(request)
