"""Slots of shared memory on loan to sessions: who has which, how many at most, and their return.

Owns the window's arena. Loop thread only. A slot that a client may write to is free again only when the client said so
or its lease socket closed: until then it may still be writing.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from pagetier.kvstore.arena import PAGE_BYTES, Arena, Slot
from pagetier.kvstore.errors import CapacityError
from pagetier.kvstore.host import HostTier, Loan

WINDOW_BYTES = 256 << 20
SESSION_SHARE = 4  # a session may have one part in so many of the window
WINDOW_ARENA, HOST_ARENA = 0, 1
MAX_ENDED_JOBS = 1024  # remembered, of each session


@dataclass(slots=True)
class _Waiter:
    nbytes: int
    holder: Holder
    granted: asyncio.Future[Slot]


class Window:
    """The staging memory of a service. Fair: slots are given in the order they were asked for, but nobody waits for a
    holder that has its share already.

    Invariant: the bytes of all holders are those of the slots taken.
    """

    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        self.arena = Arena(window_bytes, slab_bytes=min(window_bytes, 32 << 20))
        self.share_bytes = max(PAGE_BYTES, self.arena.capacity_bytes // SESSION_SHARE)
        self._waiters: deque[_Waiter] = deque()
        self.held_bytes = 0

    async def take(self, nbytes: int, holder: Holder) -> Slot:
        """A slot, as soon as there is one. Raises CapacityError when there never will be. May be cancelled."""
        self.arena.slots_of(nbytes)
        if not self._waiters and (slot := self._grant(nbytes, holder)) is not None:
            return slot
        waiter = _Waiter(nbytes, holder, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._serve()
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled():
                self.free(waiter.granted.result(), holder)
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            raise

    def has_room(self, nbytes: int, holder: Holder) -> bool:
        """Whether `take` would not wait, as far as the holder's share goes."""
        return not self._waiters and (not holder.held_bytes or holder.held_bytes + nbytes <= self.share_bytes)

    def free(self, slot: Slot, holder: Holder) -> None:
        """Nobody reads or writes it any more."""
        self.arena.free(slot)
        holder.held_bytes -= slot.nbytes
        self.held_bytes -= slot.nbytes
        self._serve()

    def close(self) -> None:
        for waiter in self._waiters:
            waiter.granted.cancel()
        self._waiters.clear()
        self.arena.close()

    def check(self) -> None:
        """Raise AssertionError when slots are lost."""
        self.arena.check()
        assert (self.held_bytes == 0) == (self.arena.num_taken == 0), (
            f"{self.held_bytes} bytes are held and {self.arena.num_taken} slots taken"
        )

    def _grant(self, nbytes: int, holder: Holder) -> Slot | None:
        if holder.held_bytes and holder.held_bytes + nbytes > self.share_bytes:
            return None
        slot = self.arena.alloc(nbytes)
        if slot is not None:
            holder.held_bytes += slot.nbytes
            self.held_bytes += slot.nbytes
        return slot

    def _serve(self) -> None:
        later: deque[_Waiter] = deque()
        while self._waiters:
            waiter = self._waiters.popleft()
            if waiter.granted.cancelled():
                continue
            slot = self._grant(waiter.nbytes, waiter.holder)
            if slot is None:
                later.append(waiter)
            else:
                waiter.granted.set_result(slot)
        self._waiters = later


class Holder:
    """What one session has on loan, by the numbers that its client knows."""

    def __init__(self, window: Window, host: HostTier | None) -> None:
        self._window, self._host = window, host
        self.held_bytes = 0  # of the window; owner: Window
        self._next = 1
        self._returns: dict[int, Callable[[], None]] = {}
        self._jobs: dict[int, int] = {}  # lease -> the client's job
        self._ended: OrderedDict[int, None] = OrderedDict()  # jobs whose client touches no slot any more

    @property
    def num_leases(self) -> int:
        return len(self._returns)

    def has_ended(self, job: int) -> bool:
        """Whether the client has done with this job: nothing may be lent for it."""
        return job in self._ended

    def lend_slot(self, slot: Slot, job: int) -> int:
        """A slot of the window is the client's now; the lease's number."""
        return self._enter(lambda: self._window.free(slot, self), job)

    def lend_block(self, loan: Loan, job: int) -> int:
        """A block of the host tier, to be read."""
        host = self._host
        assert host is not None, "a loan comes from a host tier"
        return self._enter(lambda: host.give_back(loan), job)

    def take_back(self, lease: int) -> bool:
        """The client is done with it; False for a number it does not have."""
        give_back = self._returns.pop(lease, None)
        if give_back is None:
            return False
        del self._jobs[lease]
        give_back()
        return True

    def end_job(self, job: int) -> None:
        """The client is done with all that this job was given, or will be."""
        self._ended[job] = None
        if len(self._ended) > MAX_ENDED_JOBS:
            self._ended.popitem(last=False)
        for lease in [lease for lease, own in self._jobs.items() if own == job]:
            self.take_back(lease)

    def keep(self, lease: int) -> bool:
        """The client filled it: it is ours to read and to free again, and no lease any more."""
        self._jobs.pop(lease, None)
        return self._returns.pop(lease, None) is not None

    def end(self) -> int:
        """The client is gone: everything it had comes back; how many leases that were."""
        returns, self._returns, self._jobs = list(self._returns.values()), {}, {}
        for give_back in returns:
            give_back()
        return len(returns)

    def _enter(self, give_back: Callable[[], None], job: int) -> int:
        lease, self._next = self._next, self._next + 1
        self._returns[lease], self._jobs[lease] = give_back, job
        return lease


def refuse_large(nbytes: int, window: Window) -> None:
    """Raise CapacityError, with what to do, for blocks that the window cannot hold one of."""
    try:
        window.arena.slots_of(nbytes)
    except CapacityError:
        raise CapacityError(
            f"a block of {nbytes} bytes does not fit the service's window; start it with a larger --window-size"
        ) from None
