"""The metrics say what the engine says."""

from __future__ import annotations

import pytest

from pagetier.engine.metrics import ServerMetrics
from pagetier.kvstore.breaker import BreakerState
from tests.engine.server.double import DoubleCore


@pytest.mark.parametrize(("state", "value"), [("closed", 0), ("half-open", 1), ("open", 2)])
def test_every_state_of_a_breaker_has_its_value(state: str, value: int) -> None:
    assert BreakerState(state)
    stats = DoubleCore().stats()
    stats["tiers"]["nvme"]["breaker"] = state
    text = ServerMetrics("m").scrape(stats).decode()
    assert f'pagetier_tier_breaker{{tier="nvme"}} {value}.0' in text


def test_no_state_is_forgotten() -> None:
    assert {str(state) for state in BreakerState} == {"closed", "half-open", "open"}
