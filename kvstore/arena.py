"""Host memory for blocks: a memfd of slabs, each cut into slots of one size on demand.

Owns memory and which slots are taken; knows neither keys nor order. One descriptor, so that the whole arena can be
shared with another process or registered with CUDA by address (torch's pinned allocator would round up to a power of
two). Not thread-safe: the owner's lock guards it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass

from pagetier.kvstore.errors import CapacityError, ClosedError

SLAB_BYTES = 32 << 20  # holds 91 blocks of a 135M model
PAGE_BYTES = mmap.PAGESIZE
POISON = 0xEE


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one payload. `offset`: from the start of the arena."""

    slab: int
    index: int
    offset: int
    nbytes: int


class _Slab:
    """A mapped slab cut into slots of `slot_bytes`."""

    def __init__(self, fd: int, number: int, slab_bytes: int, slot_bytes: int) -> None:
        self.map = mmap.mmap(fd, slab_bytes, offset=number * slab_bytes)
        self.view = memoryview(self.map)
        self.slot_bytes = slot_bytes
        self.free = list(range(slab_bytes // slot_bytes - 1, -1, -1))
        self.num_slots = len(self.free)

    def close(self) -> None:
        self.view.release()
        self.map.close()


class Arena:
    """At most `capacity_bytes` in slabs of `slab_bytes`; memory is taken from the system when a slab is first cut.

    Slots start at page boundaries, so that O_DIRECT and CUDA copies take them. A slab whose last slot is freed can be
    cut to another size. Invariants: a slot is free or taken, never both; slots of a slab do not overlap; with `poison`
    the bytes of a free slot are POISON.
    """

    def __init__(self, capacity_bytes: int, *, slab_bytes: int = SLAB_BYTES, poison: bool = False) -> None:
        """Raises CapacityError for a capacity below one page, OSError when the kernel gives no memfd."""
        rounded = min(slab_bytes, capacity_bytes) // PAGE_BYTES * PAGE_BYTES
        if rounded < PAGE_BYTES:
            raise CapacityError(f"a host arena of {capacity_bytes} bytes holds nothing; give it at least {PAGE_BYTES}")
        self.slab_bytes, self._max_slabs = rounded, capacity_bytes // rounded
        self._fd = os.memfd_create("pagetier-host", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # who maps it cannot be hit by a shorter file
        self._slabs: list[_Slab | None] = []
        self._unused: list[int] = []  # numbers of slabs that are mapped to nothing now
        self._roomy: dict[int, list[int]] = {}  # slot size -> numbers of slabs with a free slot
        self._num_taken = 0
        self._poison = poison
        self._is_closed = False

    @property
    def fd(self) -> int:
        """The memfd; grows as slabs are added."""
        return self._fd

    @property
    def capacity_bytes(self) -> int:
        return self._max_slabs * self.slab_bytes

    @property
    def num_taken(self) -> int:
        """Slots given out and not freed."""
        return self._num_taken

    @property
    def mapped_bytes(self) -> int:
        """What the arena takes from the system at most."""
        return sum(slab is not None for slab in self._slabs) * self.slab_bytes

    def slots_of(self, nbytes: int) -> int:
        """How many payloads of `nbytes` fit, were there no others. Raises CapacityError when none ever will."""
        per_slab = self.slab_bytes // _rounded(nbytes)
        if not per_slab:
            raise CapacityError(f"a block of {nbytes} bytes does not fit a slab of {self.slab_bytes}")
        return per_slab * self._max_slabs

    def alloc(self, nbytes: int) -> Slot | None:
        """A slot for `nbytes`, or None when there is no room. CapacityError when there never will be."""
        if self._is_closed:
            raise ClosedError("the host arena is closed")
        size = _rounded(nbytes)
        roomy = self._roomy.setdefault(size, [])
        if not roomy and not self._cut(size):
            self.slots_of(nbytes)
            return None
        number = roomy[-1]
        slab = self._slabs[number]
        assert slab is not None, f"slab {number} has room and no memory"
        index = slab.free.pop()
        if not slab.free:
            roomy.pop()
        self._num_taken += 1
        return Slot(number, index, number * self.slab_bytes + index * size, nbytes)

    def view(self, slot: Slot) -> memoryview:
        """The slot's bytes, writable. Let go of it before `free` and `close`."""
        slab = self._slabs[slot.slab]
        assert slab is not None, f"{slot} is not taken"
        start = slot.index * slab.slot_bytes
        return slab.view[start : start + slot.nbytes]

    def free(self, slot: Slot) -> None:
        """Give a slot back, once."""
        slab = self._slabs[slot.slab]
        assert slab is not None and slot.index not in slab.free[-1:], f"{slot} is not taken"
        if self._poison:
            self._fill(slab, slot.index, 1)
        slab.free.append(slot.index)
        self._num_taken -= 1
        roomy = self._roomy[slab.slot_bytes]
        if len(slab.free) == 1:
            roomy.append(slot.slab)
        if len(slab.free) == slab.num_slots and len(roomy) > 1:
            self._drop(slot.slab)

    def check(self) -> None:
        """Raise AssertionError when slots are counted wrongly or twice. O(slots)."""
        taken = 0
        for number, slab in enumerate(self._slabs):
            if slab is None:
                assert number in self._unused, f"slab {number} is lost"
                continue
            assert len(set(slab.free)) == len(slab.free) <= slab.num_slots, f"slab {number} has a slot free twice"
            assert bool(slab.free) == (number in self._roomy[slab.slot_bytes]), f"slab {number}: wrong room"
            for index in slab.free if self._poison else ():
                data = bytes(slab.view[index * slab.slot_bytes :][: slab.slot_bytes])
                assert data.count(POISON) == len(data), f"slot {index} of slab {number}: written while free"
            taken += slab.num_slots - len(slab.free)
        assert taken == self._num_taken, f"{taken} slots taken, counted {self._num_taken}"

    def close(self) -> None:
        """Unmap everything. Idempotent. Raises BufferError while someone holds a view."""
        if self._is_closed:
            return
        self._is_closed = True
        for slab in self._slabs:
            if slab is not None:
                slab.close()
        self._slabs.clear()
        os.close(self._fd)

    def _cut(self, size: int) -> bool:
        """Give slot size `size` a slab: an unused number, a new one, or an empty slab of another size."""
        if size > self.slab_bytes:
            return False
        if not self._unused and len(self._slabs) >= self._max_slabs:
            empty = next((n for ns in self._roomy.values() for n in ns if self._is_empty(n)), None)
            if empty is None:
                return False
            self._drop(empty)
        if not self._unused:
            self._unused.append(len(self._slabs))
            self._slabs.append(None)
            os.ftruncate(self._fd, len(self._slabs) * self.slab_bytes)
        number = self._unused.pop()
        slab = self._slabs[number] = _Slab(self._fd, number, self.slab_bytes, size)
        if self._poison:
            self._fill(slab, 0, slab.num_slots)
        self._roomy[size].append(number)
        return True

    @staticmethod
    def _fill(slab: _Slab, first: int, count: int) -> None:
        nbytes = slab.slot_bytes * count
        slab.view[first * slab.slot_bytes :][:nbytes] = bytes([POISON]) * nbytes

    def _is_empty(self, number: int) -> bool:
        slab = self._slabs[number]
        return slab is not None and len(slab.free) == slab.num_slots

    def _drop(self, number: int) -> None:
        """Give an empty slab's memory back to the system."""
        slab = self._slabs[number]
        assert slab is not None, f"slab {number} is not mapped"
        self._roomy[slab.slot_bytes].remove(number)
        slab.map.madvise(mmap.MADV_REMOVE)
        slab.close()
        self._slabs[number] = None
        self._unused.append(number)


def _rounded(nbytes: int) -> int:
    return -(-max(nbytes, 1) // PAGE_BYTES) * PAGE_BYTES
