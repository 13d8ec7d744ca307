"""Who gives up blocks, when, and by which way it gets their content back."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from pagetier.engine.admission import has_outgrown
from pagetier.engine.block_pool import BlockPool
from pagetier.engine.coming_free import ComingFree
from pagetier.engine.config import EngineConfig
from pagetier.engine.queues import Queues
from pagetier.engine.request import Request, RequestState
from pagetier.engine.tables import BlockTables
from pagetier.engine.timeline import Timelines
from pagetier.engine.transfers import Transfers
from pagetier.engine.turns import MAX_PASSED, Turns
from pagetier.engine.victims import MAX_CANDIDATES, choose_victim
from pagetier.engine.withheld import Withheld


class Preemption:
    """Owner: core thread.

    is_held_up: whether a waiting request could not be admitted yet, whatever room there was. send_back: a running
    request waits again, without KV. end: a request ends for lack of room. num_preemptions, num_swaps: of any kind since
    start; those of them by way of the lower tiers. recomputed_tokens, swapped_out_blocks, swapped_in_blocks: what
    became of the KV that was taken.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        tables: BlockTables,
        transfers: Transfers,
        queues: Queues,
        coming_free: ComingFree,
        withheld: Withheld,
        turns: Turns,
        timelines: Timelines,
        is_held_up: Callable[[Request], bool],
        send_back: Callable[[Request], None],
        end: Callable[[Request], None],
        fail: Callable[[Request, str], None],
    ) -> None:
        self.num_preemptions = self.num_swaps = 0
        self.recomputed_tokens = self.swapped_out_blocks = self.swapped_in_blocks = 0
        self._config, self._pool, self._tables = config, pool, tables
        self._transfers, self._queues, self._coming_free = transfers, queues, coming_free
        self._withheld, self._turns, self._timelines = withheld, turns, timelines
        self._is_held_up, self._send_back, self._end, self._fail = is_held_up, send_back, end, fail

    def find_blocks(self, request: Request, num_tokens: int) -> bool:
        """Give a running request blocks for `num_tokens` tokens, those of later ones if need be; False when it has to
        wait, or was itself preempted or ended."""
        while not self._tables.grow(request, num_tokens):
            missing = self._tables.num_missing(request, num_tokens)
            if self._pool.num_available + self._coming_free.count() >= missing:
                return False
            if self._withheld.are_missed(num_tokens, request.block_ids):
                self._end_without(request, num_tokens)
                return False
            if not self._make_room(request, num_tokens) or request.state is not RequestState.RUNNING:
                return False
        return True

    def _end_without(self, request: Request, num_tokens: int) -> None:
        """No other's blocks would help the request, so nobody is preempted for it; it ends if that has lasted."""
        complaint = self._withheld.complaint(num_tokens, request.block_ids)
        if complaint and not request.num_in_flight:
            self._fail(request, complaint)

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """The request found no blocks, and not enough are coming free. End it if it has outgrown the pool, since the
        blocks of others would be of no use to it, or is alone; else preempt one of those behind it, or itself. Whether
        one was preempted."""
        running = self._queues.running
        exceeds_pool = num_tokens > self._pool.num_blocks * self._config.block_size
        if len(running) > 1 and not exceeds_pool:
            self._preempt(self._choose(running[running.index(request) + 1 :] or [request]))
            return True
        may_wait = self._queues.loading or self._coming_free.is_pending
        if not request.num_in_flight and (exceeds_pool or not may_wait):
            self._end(request)
        return False

    def start_early(self) -> None:
        """Begin to swap the next victim out at a low-water mark, two steps' growth of all: its blocks come free only
        once they are saved, and till then the others still find some."""
        running, room = self._queues.running, self._pool.num_available
        if not self._may_swap or len(running) < 2 or room >= 2 * len(running):
            return
        growth = sum(self._tables.num_missing(one, min(one.num_tokens + 1, one.max_tokens)) for one in running)
        if room + self._coming_free.count() >= growth:
            return
        victim = self._choose(running[1:])
        if self._is_swapped(victim):
            self._preempt(victim)

    def _choose(self, candidates: list[Request]) -> Request:
        return choose_victim(candidates, self._pool, self._transfers.cost, self._may_swap)

    def make_way(self) -> None:
        """Preempt running requests for a waiting one that outranks them and finds no seat or no blocks. It is admitted
        when their blocks have come free, a step or two later."""
        running, waiting = self._queues.running, self._queues.waiting
        request = self._first_urgent() if running else None
        if request is None:
            return
        if has_outgrown(request, self._config) or self._is_held_up(request):
            return  # others would take what it was given
        num_missing = -(-request.num_tokens // self._config.block_size) - len(self._tables.match(request).nodes)
        while running and waiting.outranks(request, running[-1]):
            num_coming = self._pool.num_available + self._coming_free.count()
            has_seat = self._queues.num_seated < self._config.max_num_seqs
            if has_seat and num_coming >= num_missing + len(running):
                break
            self._preempt(self._choose([one for one in running[-MAX_CANDIDATES:] if waiting.outranks(request, one)]))

    def _first_urgent(self) -> Request | None:
        """The first waiting request that outranks a running one, and does not leave its turn."""
        last, waiting = self._queues.running[-1], self._queues.waiting
        first = itertools.islice(waiting.candidates(), MAX_PASSED)
        urgent = itertools.takewhile(lambda request: waiting.outranks(request, last), first)
        return next(itertools.filterfalse(self._turns.is_passed_over, urgent), None)

    @property
    def _may_swap(self) -> bool:
        """Whether the tiers may be given a victim's blocks; stuck ones would only keep them."""
        transfers = self._transfers
        return transfers.enabled and self._config.preemption_mode != "recompute" and not transfers.is_stuck

    def _is_swapped(self, request: Request) -> bool:
        """Whether a request that is preempted now is given to the lower tiers."""
        if not self._may_swap or request.tip is None:
            return False
        num_unsaved = len(self._transfers.unsaved(request.tip))
        if num_unsaved and not self._transfers.save_room:
            return False  # the tiers still have to write what they were given before
        if self._config.preemption_mode == "swap":
            return True
        num_blocks = request.num_indexed_blocks
        return self._transfers.cost.prefers_swap(num_blocks * self._config.block_size, num_blocks, num_unsaved)

    def _is_loaded(self, request: Request) -> bool:
        """Whether a request that is not swapped out takes from the lower tiers what they happen to have of it."""
        if not self._may_swap or request.tip is None:
            return False
        num_saved = request.num_indexed_blocks - len(self._transfers.unsaved(request.tip))
        return self._transfers.cost.prefers_load(num_saved * self._config.block_size, num_saved)

    def _preempt(self, request: Request) -> None:
        """Take all blocks of a running request. It gets their content back when its turn comes again: from the device
        while it lasts, from the lower tiers, which are given it now if that is the cheaper way, or by computing it."""
        self.num_preemptions += 1
        request.num_preemptions += 1
        tip, num_blocks, num_tokens = request.tip, request.num_indexed_blocks, request.num_committed_tokens
        is_swapped = self._is_swapped(request)
        skips_tiers = not is_swapped and not self._is_loaded(request)
        self._send_back(request)
        request.skips_tiers = skips_tiers
        request.preempted_by, request.num_lost_tokens = "swap" if is_swapped else "recompute", num_tokens
        if is_swapped and tip is not None:
            self.num_swaps += 1
            self.swapped_out_blocks += self._transfers.swap_out(request, tip, num_blocks)
        self._timelines.note(request, "preempted", by=request.preempted_by, tokens=num_tokens)

    def resumed(self, request: Request, num_loaded_blocks: int) -> None:
        """A request runs, for the first time or again, with its computed tokens; so many blocks of them were loaded."""
        if request.preempted_by:
            self.recomputed_tokens += max(0, request.num_lost_tokens - request.num_computed_tokens)
            self.swapped_in_blocks += num_loaded_blocks
            request.preempted_by, request.skips_tiers = "", False
