"""The identity beside the records: every tier has it, also one that began anew."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagetier.kvstore.kept_identity import RENEW_S
from pagetier.kvstore.memory import MemoryTier
from pagetier.kvstore.tier import TierCounters
from tests.kvstore.rig import Clock, Rig, hit, memory
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


@pytest.mark.parametrize("use", ["put", "hit"])
def test_an_identity_that_was_evicted_in_silence_is_told_again(use: str) -> None:
    """A full Redis with `allkeys-lru` takes what nobody asks for: the identity first of all."""
    clock, names = Clock(), chain(3)
    tier = memory("redis", clock=clock)
    with Rig(tier, clock=clock) as rig:
        rig.store.put_identity(b"d" * 32, b"identity")
        rig.put(names[:2])
        tier._identities.clear()
        rig.store.touch(names[:1])
        rig.put(names[:2])
        assert tier.identities() == {}, "not with every block"
        clock.sleep(RENEW_S)
        if use == "put":
            rig.put(names)
        else:
            hit(rig, names[:2])
            rig.store.touch(names[:2])
            rig.until(lambda: tier.identities() != {})
        assert tier.identities() == {b"d" * 32: b"identity"}
