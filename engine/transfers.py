"""KV on its way between device blocks and the lower tiers: lookups, loads and saves in progress.

Owns the references that transfers hold on device blocks (a save's sources until its put ended, a load's destinations
until nothing writes to them any more) and every connector ticket. Knows no scheduling.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pagetier.connectors.base import Connector
from pagetier.engine.block_pool import BlockPool
from pagetier.engine.config import TRANSFER_TIMEOUT_S
from pagetier.engine.prefix_index import Node
from pagetier.engine.request import Request
from pagetier.engine.restore_cost import RestoreCost
from pagetier.kvstore.block import BlockName, BlockStatus
from pagetier.kvstore.job import Completion, LoadDone, LoadQuiesced, LookupDone, PutDone

logger = logging.getLogger(__name__)

PATIENCE_S = 2.0  # a transfer under way for longer may be stuck: who needs a block no longer counts on its blocks
SAVED_SHARE = 1 / 8  # of the device pool, the most that saves under way hold; the rest is for those who need blocks
MIN_SAVED_BLOCKS = 64  # two steps of a prefill; of a small pool at most half
SAVED_TIME = 1 / 4  # of the transfer timeout, the most that saves under way may take as fast as they have been
STORED = (BlockStatus.OK, BlockStatus.EXISTS)
NOT_WRITTEN = (BlockStatus.EXISTS, BlockStatus.DROPPED)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load ended for a request that still wants it: its first `len(tiers)` blocks arrived, from these tiers.

    quiesced: the remaining destinations may be reused at once.
    """

    request: Request
    tiers: tuple[str, ...]
    quiesced: bool


@dataclass(slots=True)
class _Swap:
    """What a swapped-out request's blocks are under way in: when all of it has ended, they are looked up, and thereby
    pinned until the request runs again."""

    saves: set[int]
    num_blocks: int


class Transfers:
    """Owner: core thread. `connector` None: there are no lower tiers and nothing ever is in transfer.

    cost: is told how long each load and save took. timeout_s: a load that has no answer by then is given up.
    num_given_up: such loads. num_harmful: loads that served a request, and took longer than it would have taken to
    compute what they brought.
    """

    def __init__(
        self,
        connector: Connector | None,
        pool: BlockPool,
        cost: RestoreCost | None = None,
        clock: Callable[[], float] = time.monotonic,
        timeout_s: float = TRANSFER_TIMEOUT_S,
    ) -> None:
        self.cost = cost or RestoreCost()
        self._connector = connector
        self._pool = pool
        self._clock, self._timeout_s = clock, timeout_s
        self._started_s: dict[int, float] = {}  # of every load and save under way, oldest first
        self._late_s: dict[int, float] = {}  # when loads were answered whose last bytes are yet to land, oldest first
        self._first: dict[int, BlockName] = {}  # of every load under way
        self.num_harmful = self.num_given_up = 0
        self._lookups: dict[int, Request] = {}
        self._tickets: set[int] = set()
        self._loads: dict[int, Request | None] = {}  # None: the request is gone
        self._destinations: dict[int, list[int]] = {}
        self._saves: dict[int, list[Node]] = {}
        self._num_saving = 0  # blocks in all of them
        self._save_ended_s = -math.inf  # the last of them; what was begun before has waited for it
        self._min_saving = min(MIN_SAVED_BLOCKS, -(-pool.num_blocks // 2))
        self._max_saving = max(int(SAVED_SHARE * pool.num_blocks), self._min_saving)
        self._swaps: dict[Request, _Swap] = {}
        self._early: list[Completion] = []  # came with lookups, before they may be taken in

    @property
    def enabled(self) -> bool:
        return self._connector is not None

    @property
    def holds_blocks(self) -> bool:
        """Whether device blocks will come free when transfers end."""
        return bool(self._destinations or self._saves)

    @property
    def tiers_state(self) -> int:
        """Changes when a lower tier came back: what was saved before is offered again when it is touched."""
        return 1 if self._connector is None else 1 + self._connector.num_returns

    def look_up(self, request: Request, first: int, end: int) -> None:
        """Ask the lower tiers for the request's blocks [first, end)."""
        assert self._connector is not None and request.ticket is None
        request.lookup_first, request.lookup_tiers = first, None
        request.lookup_tries += 1
        request.ticket = self._connector.submit_lookup(request.names[first:end])
        self._lookups[request.ticket] = request
        self._tickets.add(request.ticket)

    def load(self, request: Request, first: int, end: int) -> None:
        """Load the request's blocks [first, end), a leading run of its lookup's answer from `first` on."""
        assert self._connector is not None and request.ticket is not None and request.job is None
        self._swaps.pop(request, None)  # its ticket pins what the tiers had of it before all of that was written
        blocks = request.block_ids[first:end]
        self._pool.acquire(blocks)
        request.job = self._connector.submit_load(request.ticket, request.names[first:end], blocks)
        self._loads[request.job], self._first[request.job] = request, request.names[first]
        self._destinations[request.job] = blocks
        self._started_s[request.job] = self._clock()

    def save(self, nodes: Sequence[Node]) -> None:
        """Hand full, committed blocks of one chain, head first, to the lower tiers. With too many on their way the rest
        of the chain stays unsaved; who touches it later tries again."""
        nodes = self._saveable(nodes)
        if self._connector is None or not nodes:
            return
        names = [node.name for node in nodes if node.name is not None]
        blocks = [node.block for node in nodes]
        self._pool.acquire(blocks)
        tiers_state = self.tiers_state
        for node in nodes:
            node.saved = tiers_state
        job = self._connector.submit_save(names, blocks)
        self._saves[job] = list(nodes)
        self._num_saving += len(nodes)
        self._started_s[job] = self._clock()

    def _saveable(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """The first of them for which there is room, if a lower tier was given what comes before: a block whose parent
        is missing would never be found."""
        if not nodes:
            return nodes
        parent = nodes[0].parent
        if parent is not None and parent.parent is not None and not parent.saved:
            return ()
        return nodes[: self.save_room]

    @property
    def save_room(self) -> int:
        """Blocks that may be saved besides those under way: of a slow tier no more than it soon has written, so that it
        is not taken for one that hangs."""
        soon_s = SAVED_TIME * self._timeout_s
        in_time = 0 if self._has_older_than(soon_s) else self.cost.num_saved_in(soon_s)
        most = self._max_saving if in_time is None else min(self._max_saving, max(self._min_saving, in_time))
        return max(0, most - self._num_saving)

    def swap_out(self, request: Request, tip: Node, num_blocks: int) -> int:
        """Give the lower tiers what they do not have of a preempted request's chain, which ends in `tip`, as far as
        there is room for it, and have them keep all of it until the request is loaded again; how many blocks they were
        given.
        """
        num_before = self._num_saving
        self.save(self.unsaved(tip))
        self._swaps[request] = _Swap(set(self._saves), num_blocks)  # write-through of the prompt may be among them
        return self._num_saving - num_before

    def _pin_swapped(self) -> None:
        """Look up what has been swapped out by now."""
        for request, swap in [(request, swap) for request, swap in self._swaps.items() if not swap.saves]:
            self.release(request)  # the answer to an earlier question may be shorter; it also ends the swap
            self.look_up(request, 0, swap.num_blocks)

    def unsaved(self, tip: Node) -> list[Node]:
        """The nodes of the chain that ends in `tip`, head first, that the lower tiers were not given."""
        chain, node, tiers_state = [], tip, self.tiers_state
        while node.parent is not None:
            if node.saved != tiers_state:
                chain.append(node)
            node = node.parent
        return chain[::-1]

    def touch(self, nodes: Sequence[Node]) -> None:
        """A request uses these device blocks: keep their copies below warm."""
        if self._connector is not None and nodes:
            self._connector.touch([node.name for node in nodes if node.name is not None])

    def quarantine(self, names: Sequence[BlockName]) -> None:
        """These blocks were found wrong: take them out of every lower tier."""
        assert self._connector is not None, "what was loaded came from a tier"
        self._connector.quarantine(names)

    def release(self, request: Request) -> None:
        """Give back the request's ticket, if any; whatever it started runs to its end unseen."""
        self._swaps.pop(request, None)
        if request.job is not None:
            self._loads[request.job] = None
            request.job = None
        if request.ticket is not None:
            assert self._connector is not None
            self._lookups.pop(request.ticket, None)
            self._tickets.discard(request.ticket)
            self._connector.release(request.ticket)
            request.ticket = None
        request.lookup_tiers = None

    def poll(self) -> list[Loaded]:
        """Take in what the connector finished; the loads that requests wait for."""
        if self._connector is None:
            return []
        loaded = []
        early, self._early = self._early, []
        for done in (*early, *self._connector.poll()):
            match done:
                case LookupDone():
                    self._end_lookup(done)
                case LoadDone():
                    answer = self._end_load(done)
                    if answer is not None:
                        loaded.append(answer)
                case LoadQuiesced():
                    del self._late_s[done.job]
                    self._pool.release(self._destinations.pop(done.job))
                case PutDone():
                    self._end_save(done)
        self._pin_swapped()
        return loaded + self._give_up()

    def _give_up(self) -> list[Loaded]:
        """Loads that have no answer for too long: whoever waits for one goes on without it."""
        given_up = []
        for job in self._older_than(self._started_s, self._timeout_s):
            request = self._loads.get(job)
            if request is not None:
                self._loads[job] = request.job = None
                logger.warning(
                    "a load of %d blocks has no answer after %.0f s: request %s computes them instead, and they stay "
                    "taken until the tier answers",
                    len(self._destinations[job]),
                    self._clock() - self._started_s[job],
                    request.request_id,
                )
                self.num_given_up += 1
                given_up.append(Loaded(request, (), quiesced=False))
        return given_up

    def poll_lookups(self) -> None:
        """Take in the lookups that are answered, and nothing else: the rest waits for `poll`. For the middle of
        planning, when some were begun a moment ago."""
        if self._connector is None or not self._lookups:
            return
        for done in self._connector.poll():
            if isinstance(done, LookupDone):
                self._end_lookup(done)
            else:
                self._early.append(done)

    def _end_lookup(self, done: LookupDone) -> None:
        request = self._lookups.pop(done.ticket, None)
        if request is not None:
            request.lookup_tiers = done.tiers

    @property
    def is_stuck(self) -> bool:
        """Whether one of them has been under way for so long that more should not be begun without need."""
        return self._has_older_than(PATIENCE_S)

    def _has_older_than(self, age_s: float) -> bool:
        oldest_s = next(iter(self._started_s.values()), None)
        return oldest_s is not None and oldest_s < self._clock() - age_s

    def passing_blocks(self) -> Iterator[list[int]]:
        """Blocks of saves and of loads that began a moment ago, a list for each. Once a load has been answered, nobody
        knows when its late bytes have come."""
        stuck = set(self._older_than(self._started_s, PATIENCE_S))
        return (self._blocks_of(job) for job in self._started_s if job not in stuck)

    def held_blocks(self, held_s: float) -> set[int]:
        """Blocks of saves and loads that began longer ago than that, and of loads that were answered longer ago and
        still write."""
        jobs = itertools.chain.from_iterable(self._older_than(s, held_s) for s in (self._started_s, self._late_s))
        return {block for job in jobs for block in self._blocks_of(job)}

    def _older_than(self, since_s: dict[int, float], age_s: float) -> Iterator[int]:
        begin_s = self._clock() - age_s
        return (job for job, _ in itertools.takewhile(lambda entry: entry[1] < begin_s, since_s.items()))

    def _blocks_of(self, job: int) -> list[int]:
        return self._destinations[job] if job in self._destinations else [node.block for node in self._saves[job]]

    def _end_load(self, done: LoadDone) -> Loaded | None:
        request, first = self._loads.pop(done.job), self._first.pop(done.job)
        started_s, ended_s = self._times_of(done)
        took_s = ended_s - started_s
        if took_s <= self._timeout_s:  # a tier that hung says nothing of what it costs
            self.cost.observe_load(len(done.statuses), took_s)
        if done.quiesced:
            self._pool.release(self._destinations.pop(done.job))
        else:
            self._late_s[done.job] = self._clock()
        if request is None:
            return None
        tiers: list[str] = []
        for status, tier in zip(done.statuses, done.tiers, strict=True):
            if status is not BlockStatus.OK or tier is None:
                break
            tiers.append(tier)
        compute_s = self.cost.recompute_s(len(tiers) * first.num_tokens, first.position)
        self.num_harmful += bool(tiers) and compute_s is not None and took_s > compute_s
        request.job = None
        return Loaded(request, tuple(tiers), done.quiesced)

    def _times_of(self, done: LoadDone | PutDone) -> tuple[float, float]:
        """Its submission and its end, which a step may have passed before anybody asked."""
        started_s, now_s = self._started_s.pop(done.job), self._clock()
        ended_s = now_s if done.ended_s is None else done.ended_s
        return started_s, min(max(ended_s, started_s), now_s)

    def _end_save(self, done: PutDone) -> None:
        nodes = self._saves.pop(done.job)
        self._num_saving -= len(nodes)
        for swap in self._swaps.values():
            swap.saves.discard(done.job)
        started_s, ended_s = self._times_of(done)
        took_s = ended_s - max(started_s, min(self._save_ended_s, ended_s))  # written one after the other
        self._save_ended_s = max(self._save_ended_s, ended_s)
        num_written = sum(status not in NOT_WRITTEN for status in done.statuses)
        if num_written and took_s <= self._timeout_s:
            self.cost.observe_save(num_written, took_s)
        for node, status in zip(nodes, done.statuses, strict=True):
            if status not in STORED:
                node.saved = 0  # a later touch tries again
        self._pool.release([node.block for node in nodes])

    def check(self, loading: Sequence[Request]) -> None:
        """Raise AssertionError when tickets or references leaked, or one that loads waits for something else."""
        assert self._lookups.keys() <= self._tickets, "a lookup without a ticket"
        for request in loading:
            assert request not in self._swaps, f"{request.request_id} loads, and is to be looked up again"
        for job, blocks in self._destinations.items():
            for block in blocks:
                assert self._pool.references(block) > 0, f"job {job} writes to free block {block}"
        assert self._late_s.keys() == self._destinations.keys() - self._loads.keys(), "loads that still write"
        assert self._num_saving == sum(map(len, self._saves.values())), "blocks in saves"
        for job, nodes in self._saves.items():
            for node in nodes:
                assert node.attached and self._pool.references(node.block) > 0, f"job {job} reads block {node.block}"

    @property
    def num_tickets(self) -> int:
        return len(self._tickets)
