"""The identity beside the records: every tier has it, also one that began anew."""

from __future__ import annotations

from dataclasses import replace

from pagetier.kvstore.memory import MemoryTier
from pagetier.kvstore.tier import TierCounters
from tests.kvstore.rig import Rig, memory
from tests.kvstore.tier_contract import chain


class Returning(MemoryTier):
    """A medium that begins anew when told to, and forgets what was beside its records."""

    num_restarts = 0

    def restart(self) -> None:
        self.num_restarts += 1
        self._identities.clear()

    def counters(self) -> TierCounters:
        return replace(super().counters(), restarts=self.num_restarts)


def test_a_tier_that_came_back_is_told_the_identity_again() -> None:
    """Else nobody could say, offline, what its records are of."""
    tier, names = Returning(1 << 16, name="redis"), chain(3)
    with Rig(tier, memory("nvme")) as rig:
        rig.store.put_identity(b"d" * 32, b"identity")
        rig.put(names[:1])
        assert tier.identities() == {b"d" * 32: b"identity"}
        tier.restart()
        assert tier.identities() == {}
        rig.put(names[1:])
        assert tier.identities() == {b"d" * 32: b"identity"}
