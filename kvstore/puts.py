"""Writing: one queue per tier, bounded in bytes, emptied head first by one thread; and the job that spans the tiers.

When a queue is full the newest block is dropped, and with it the rest of its chain, now and later: a block whose parent
is missing would never be found. When a tier lets the whole time of a piece pass, what waits behind it is dropped too.
Nothing is copied here: sources belong to the caller until the job is done.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagetier.kvstore.block import Address, BlockStatus, Part
from pagetier.kvstore.config import StoreLimits
from pagetier.kvstore.executor import Task
from pagetier.kvstore.job import PutDone
from pagetier.kvstore.port import TierPort
from pagetier.kvstore.tier import BlockWrite

MAX_REMEMBERED_DROPS = 65_536  # keys whose children are dropped too, per tier; some 7 MB


class PutJob:
    """Collects, per block, what the tiers answered; reports once all have, so that no source is read any more."""

    def __init__(
        self,
        job: int,
        num_blocks: int,
        num_tiers: int,
        report: Callable[[PutDone], None],
        clock: Callable[[], float],
    ) -> None:
        self.job, self._report, self._clock = job, report, clock
        self._lock = threading.Lock()
        self._statuses: list[BlockStatus | None] = [None] * num_blocks  # guarded by self._lock
        self._num_open = num_blocks * num_tiers  # guarded by self._lock
        if not self._num_open:
            report(PutDone(job, (BlockStatus.DROPPED,) * num_blocks, clock()))

    def settle(self, i: int, status: BlockStatus) -> None:
        """One tier is done with block i. Stored somewhere beats there already beats the first failure."""
        with self._lock:
            before = self._statuses[i]
            if before is None or status is BlockStatus.OK:
                self._statuses[i] = status
            elif status is BlockStatus.EXISTS and before is not BlockStatus.OK:
                self._statuses[i] = status
            self._num_open -= 1
            if not self._num_open:
                statuses = tuple(status or BlockStatus.DROPPED for status in self._statuses)
                self._report(PutDone(self.job, statuses, self._clock()))


@dataclass(frozen=True, slots=True)
class QueuedPut:
    """One block on its way to one tier; `job` is None for a promotion, which owns its bytes."""

    write: BlockWrite
    job: PutJob | None
    index: int

    def settle(self, status: BlockStatus) -> None:
        if self.job is not None:
            self.job.settle(self.index, status)


class PutQueue:
    """What waits to be written to one tier. Thread-safe.

    Blocks that were found wrong are taken out of the tier before anything else is written to it.
    Invariants: queued_bytes <= the limit, and is the sum over what is queued or being written; at most one task empties
    the queue, so blocks arrive in the order they were offered.
    """

    def __init__(self, port: TierPort, part: Part, limits: StoreLimits, clock: Callable[[], float]) -> None:
        self.port = port
        self._part, self._limits, self._clock = part, limits, clock
        self._lock = threading.Lock()
        self._queue: deque[QueuedPut] = deque()  # guarded by self._lock, as all below
        self._queued_bytes = 0
        self._condemned: dict[Address, None] = {}  # in order, so that a seeded run replays
        self._is_draining = self._is_closed = False
        self._held: dict[int, list[QueuedPut]] = {}  # promotions of loads under way, by load
        self._dropped: OrderedDict[bytes, None] = OrderedDict()
        self._num_dropped = self._num_promoted = 0

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return not self._queue and not self._is_draining

    @property
    def queued_bytes(self) -> int:
        with self._lock:
            return self._queued_bytes

    @property
    def num_dropped(self) -> int:
        """Blocks refused since start, for room or because their chain was cut."""
        with self._lock:
            return self._num_dropped

    @property
    def num_promoted(self) -> int:
        """Blocks queued since start because a slower tier served them."""
        with self._lock:
            return self._num_promoted

    def has_room(self, nbytes: int) -> bool:
        """Room for a promotion: these may use half of the queue, so that they never push out what was computed."""
        return nbytes <= self.promotion_room

    @property
    def promotion_room(self) -> int:
        """Bytes of promotions that there is room for."""
        with self._lock:
            return 0 if self._is_closed else max(0, self._limits.put_queue_bytes // 2 - self._queued_bytes)

    def hold(self, load: int, puts: Sequence[QueuedPut]) -> None:
        """Keep promotions until `let_go` of their load: written at once, they would compete with its reads."""
        with self._lock:
            nbytes = sum(len(put.write.source) for put in puts)
            if not self._is_closed and self._queued_bytes + nbytes <= self._limits.put_queue_bytes:
                self._held.setdefault(load, []).extend(puts)
                self._queued_bytes += nbytes

    def let_go(self, load: int) -> None:
        """A load is over, and nothing is read for it any more: what came with it may be written now."""
        with self._lock:
            held = self._held.pop(load, [])
            self._queued_bytes -= sum(len(put.write.source) for put in held)
        self.offer(held)

    def offer(self, puts: Sequence[QueuedPut]) -> None:
        """Queue blocks, head first. Those that do not fit are DROPPED at once, with the rest of their chain."""
        refused: list[QueuedPut] = []
        with self._lock:
            for put in puts:
                name, nbytes = put.write.name, len(put.write.source)
                fits = self._queued_bytes + nbytes <= self._limits.put_queue_bytes
                if self._is_closed or not fits or name.parent in self._dropped:
                    refused.append(put)
                    self._remember_drop(name.key)
                    continue
                self._dropped.pop(name.key, None)
                self._queue.append(put)
                self._queued_bytes += nbytes
                self._num_promoted += put.job is None
            self._drain()
        for put in refused:
            put.settle(BlockStatus.DROPPED)

    def condemn(self, addresses: Sequence[Address]) -> None:
        """Take records out of the tier, soon; copies of them that wait here to be promoted are dropped at once."""
        with self._lock:
            self._condemned |= dict.fromkeys(addresses)
            wrong = [put for put in self._queue if put.job is None and put.write.address in self._condemned]
            for put in wrong:
                self._queue.remove(put)
            for load, held in self._held.items():
                wrong += [put for put in held if put.write.address in self._condemned]
                self._held[load] = [put for put in held if put.write.address not in self._condemned]
            for put in wrong:
                self._queued_bytes -= len(put.write.source)
            self._num_dropped += len(wrong)
            self._drain()

    def is_condemned(self, address: Address) -> bool:
        """Whether a record is about to leave the tier."""
        with self._lock:
            return address in self._condemned

    @property
    def _held_bytes(self) -> int:
        """Needs the lock."""
        return sum(len(put.write.source) for held in self._held.values() for put in held)

    def _drain(self) -> None:
        """See to it that the queue is emptied. Needs the lock."""
        if (self._queue or self._condemned) and not self._is_draining:
            self._is_draining = True
            self.port.write_executor.submit(self._take)

    def forget_drop(self, keys: Sequence[bytes]) -> None:
        """These blocks are stored after all, so their children may be again."""
        with self._lock:
            if self._dropped:
                for key in keys:
                    self._dropped.pop(key, None)

    def close(self) -> None:
        """Refuse and drop everything that is not being written now. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._queued_bytes -= self._held_bytes
            self._held.clear()
        for put in self._take_queue():
            put.settle(BlockStatus.DROPPED)

    def _take_queue(self) -> list[QueuedPut]:
        """Everything that is not being written now, as dropped; the caller settles it. Children to come of what is
        dropped here are not refused: when they do come, the tier may be well again."""
        with self._lock:
            taken, self._queue = list(self._queue), deque()
            self._queued_bytes -= sum(len(put.write.source) for put in taken)
            self._num_dropped += len(taken)
        return taken

    def check(self) -> None:
        """Raise AssertionError when the account of bytes is wrong."""
        with self._lock:
            queued = sum(len(put.write.source) for put in self._queue) + self._held_bytes
            assert queued <= self._queued_bytes <= self._limits.put_queue_bytes, (
                f"{self.port.name}: {queued} bytes wait, {self._queued_bytes} counted"
            )
            if not self._is_draining:
                idle = not self._queue and self._queued_bytes == self._held_bytes
                assert idle, f"{self.port.name}: puts wait and nobody writes them"
                assert not self._condemned, f"{self.port.name}: wrong records wait to be taken out"

    def _take(self) -> Task | None:
        """First phase: take a piece off the front."""
        piece: list[QueuedPut] = []
        orphans: list[QueuedPut] = []  # the tier refused their parent while they waited
        nbytes = 0
        with self._lock:
            if self._condemned:
                return functools.partial(self._quarantine, list(self._condemned))
            while self._queue and (not piece or nbytes < self._limits.put_piece_bytes):
                put = self._queue.popleft()
                if put.write.name.parent in self._dropped:
                    orphans.append(put)
                    self._queued_bytes -= len(put.write.source)
                    self._remember_drop(put.write.name.key)
                else:
                    piece.append(put)
                    nbytes += len(put.write.source)
            if not piece:
                self._is_draining = False
        for put in orphans:
            put.settle(BlockStatus.DROPPED)
        return functools.partial(self._write, piece, nbytes) if piece else None

    def _quarantine(self, addresses: list[Address]) -> None:
        """Second phase: take these out of the tier, queue again for what waits."""
        self.port.quarantine(addresses)
        with self._lock:
            for address in addresses:
                self._condemned.pop(address, None)
        self.port.write_executor.submit(self._take)

    def _write(self, piece: list[QueuedPut], nbytes: int) -> Task | None:
        """Second phase: write it, settle its blocks, queue again behind the tier's other work."""
        budget_s = self._limits.put_budget_s + nbytes / self._limits.floor_bytes_per_s
        statuses = self.port.put([put.write for put in piece], self._clock() + budget_s)
        is_silent = all(status is BlockStatus.TIMEOUT for status in statuses)
        behind = self._take_queue() if is_silent else []
        with self._lock:
            self._queued_bytes -= nbytes
            for put, status in zip(piece, statuses, strict=True):
                if status is BlockStatus.DROPPED:
                    self._remember_drop(put.write.name.key)
        for put, status in zip(piece, statuses, strict=True):
            put.settle(status)
        for put in behind:
            put.settle(BlockStatus.DROPPED)
        self.port.write_executor.submit(self._take)
        return None

    def _remember_drop(self, key: bytes) -> None:
        self._num_dropped += 1
        self._dropped[key] = None
        if len(self._dropped) > MAX_REMEMBERED_DROPS:
            self._dropped.popitem(last=False)
