"""The host arena gives out memory that never overlaps, and cuts slabs to any size."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pagetier.kvstore.arena import PAGE_BYTES, Arena, Slot
from pagetier.kvstore.errors import CapacityError, ClosedError

SLAB = 8 * PAGE_BYTES


@pytest.fixture
def arena() -> Iterator[Arena]:
    with_two = Arena(2 * SLAB, slab_bytes=SLAB)
    yield with_two
    with_two.check()
    with_two.close()


def take_all(arena: Arena, nbytes: int) -> list[Slot]:
    slots = []
    while (slot := arena.alloc(nbytes)) is not None:
        slots.append(slot)
    return slots


def test_capacity_is_given_out_to_the_last_slot(arena: Arena) -> None:
    slots = take_all(arena, 2 * PAGE_BYTES)
    assert len(slots) == arena.slots_of(2 * PAGE_BYTES) == 8
    assert len({slot.offset for slot in slots}) == 8
    for slot in slots:
        arena.free(slot)
    assert arena.num_taken == 0


def test_memory_is_taken_on_demand(arena: Arena) -> None:
    assert arena.mapped_bytes == os.fstat(arena.fd).st_size == 0
    slot = arena.alloc(100)
    assert slot is not None and arena.mapped_bytes == os.fstat(arena.fd).st_size == SLAB


def test_an_empty_slab_is_cut_to_another_size(arena: Arena) -> None:
    slots = take_all(arena, PAGE_BYTES)
    assert arena.alloc(3 * PAGE_BYTES) is None
    for slot in slots:
        if slot.slab == 1:
            arena.free(slot)
    assert len(take_all(arena, 3 * PAGE_BYTES)) == 2


def test_the_descriptor_shows_the_same_bytes(arena: Arena) -> None:
    arena.alloc(PAGE_BYTES)
    slot = arena.alloc(PAGE_BYTES)
    assert slot is not None
    view = arena.view(slot)
    view[:5] = b"hello"
    view.release()
    assert os.pread(arena.fd, 5, slot.offset) == b"hello"


def test_what_can_never_fit_is_an_error(arena: Arena) -> None:
    with pytest.raises(CapacityError, match="does not fit a slab"):
        arena.alloc(SLAB + 1)
    with pytest.raises(CapacityError, match="holds nothing"):
        Arena(PAGE_BYTES - 1)


def test_a_closed_arena_gives_nothing() -> None:
    arena = Arena(SLAB, slab_bytes=SLAB)
    arena.alloc(10)
    arena.close()
    arena.close()
    with pytest.raises(ClosedError):
        arena.alloc(10)


class ArenaMachine(RuleBasedStateMachine):
    """Every slot holds a pattern of its own; a slot that overlaps another would lose it."""

    slots: Bundle[tuple[Slot, int]] = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(3 * SLAB, slab_bytes=SLAB, poison=True)
        self.taken: dict[int, tuple[Slot, int]] = {}
        self.serial = 0

    @rule(target=slots, num_pages=st.integers(1, 8), less=st.integers(0, PAGE_BYTES - 1))
    def alloc(self, num_pages: int, less: int) -> tuple[Slot, int]:
        slot = self.arena.alloc(num_pages * PAGE_BYTES - less)
        self.serial += 1
        if slot is None:
            assert self.taken, "an empty arena refused a slot"
            return Slot(-1, -1, -1, 0), self.serial
        self.taken[self.serial] = (slot, self.serial % 251)
        view = self.arena.view(slot)
        view[:] = bytes([self.serial % 251]) * slot.nbytes
        view.release()
        return slot, self.serial

    @rule(taken=consumes(slots))
    def free(self, taken: tuple[Slot, int]) -> None:
        slot, serial = taken
        if serial in self.taken:
            self.arena.free(slot)
            del self.taken[serial]

    @invariant()
    def bytes_are_kept(self) -> None:
        self.arena.check()
        assert self.arena.num_taken == len(self.taken)
        for slot, pattern in self.taken.values():
            view = self.arena.view(slot)
            assert view[0] == view[-1] == pattern
            view.release()

    def teardown(self) -> None:
        self.arena.close()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
