"""Sizes, order and pins of a memory tier's records agree whatever happens, and pins cannot leak or be stolen."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from pagetier.kvstore.block import Address
from pagetier.kvstore.residents import Lease, Residents
from tests.kvstore.tier_contract import PART

MAX_PINNED = 30
CHAINS, LENGTH = 3, 5
ROOT = Address(b"\xff" * 32, PART)


def at(chain: int, i: int) -> Address:
    return Address(bytes([chain, i]) + bytes(30), PART)


positions = st.tuples(st.integers(0, CHAINS - 1), st.integers(0, LENGTH - 1))


class ResidentsMachine(RuleBasedStateMachine):
    """Against a dict of sizes and the list of leases that are out."""

    leases: Bundle[Lease] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.residents = Residents(MAX_PINNED)
        self.sizes: dict[Address, int] = {}
        self.births: dict[Address, int] = {}
        self.out: dict[int, tuple[Lease, list[tuple[Address, int]]]] = {}
        self.serial = 0

    @property
    def pinned(self) -> set[Address]:
        return {a for _, held in self.out.values() for a, birth in held if self.births.get(a) == birth}

    def forget(self, address: Address) -> None:
        del self.sizes[address], self.births[address]

    @rule(where=positions, nbytes=st.integers(1, 12))
    def add(self, where: tuple[int, int], nbytes: int) -> None:
        address = at(*where)
        assert (address in self.residents) == (address in self.sizes)
        if address not in self.sizes:
            self.serial += 1
            self.residents.add(address, at(where[0], where[1] - 1) if where[1] else ROOT, nbytes)
            self.sizes[address], self.births[address] = nbytes, self.serial

    @rule(where=positions)
    def remove(self, where: tuple[int, int]) -> None:
        address = at(*where)
        assert self.residents.remove(address) == (address in self.sizes)
        if address in self.sizes:
            self.forget(address)

    @rule(target=leases, chain=st.integers(0, CHAINS - 1), length=st.integers(0, LENGTH))
    def pin(self, chain: int, length: int) -> Lease:
        wanted = [at(chain, i) for i in range(length)]
        lease = self.residents.pin(wanted)
        held = wanted[: len(lease)]
        assert all(address in self.sizes for address in held)
        self.out[id(lease)] = (lease, [(address, self.births[address]) for address in held])
        rest = wanted[len(lease) :]
        if rest and rest[0] in self.sizes:
            taken = sum(self.sizes[address] for address in self.pinned)
            assert rest[0] not in self.pinned and taken + self.sizes[rest[0]] > MAX_PINNED, "refused without reason"
        return lease

    @rule(lease=leases)
    def unpin(self, lease: Lease) -> None:
        """Any number of times."""
        self.residents.unpin(lease)
        assert not lease
        self.out.pop(id(lease), None)

    @rule(num=st.integers(0, 4))
    def evict(self, num: int) -> None:
        pinned = self.pinned
        for address in self.residents.evict(num):
            assert address not in pinned, "a pinned record was evicted"
            self.forget(address)

    @rule(where=positions, is_head=st.booleans())
    def evict_for(self, where: tuple[int, int], is_head: bool) -> None:
        parent, pinned = at(*where), self.pinned
        victim = self.residents.evict_for(parent, is_head=is_head)
        if victim is not None:
            assert victim != parent and victim not in pinned
            assert is_head or parent in self.sizes, "something was evicted for an orphan"
            self.forget(victim)

    @rule(chain=st.integers(0, CHAINS - 1), length=st.integers(0, LENGTH))
    def touch(self, chain: int, length: int) -> None:
        self.residents.touch([at(chain, i) for i in range(length)])

    @invariant()
    def agrees(self) -> None:
        self.residents.check()
        assert len(self.residents) == len(self.sizes)
        assert self.residents.nbytes == sum(self.sizes.values())
        assert self.residents.num_pinned == len(self.pinned)

    def teardown(self) -> None:
        for lease, _ in list(self.out.values()):
            self.residents.unpin(lease)
        assert self.residents.num_pinned == 0, "pins leaked"
        assert len(self.residents.evict(CHAINS * LENGTH)) == len(self.sizes), "something cannot leave any more"


TestResidentsMachine = ResidentsMachine.TestCase
TestResidentsMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_lease_of_a_record_that_is_gone_leaves_its_successors_pins_alone() -> None:
    residents, root = Residents(100), ROOT
    residents.add(at(0, 0), root, 10)
    old = residents.pin([at(0, 0)])
    residents.remove(at(0, 0))
    residents.add(at(0, 0), root, 10)
    new = residents.pin([at(0, 0)])
    residents.unpin(old)
    assert residents.num_pinned == 1 and not residents.evict(1)
    residents.unpin(new)
    assert residents.num_pinned == 0
