"""A hit that cost more than it saved is counted as what it was."""

from __future__ import annotations

import random

import pytest

from pagetier.connectors.local import LocalConnector
from pagetier.engine.config import EngineConfig
from pagetier.engine.core import EngineCore
from pagetier.kvstore.memory import Faults
from tests.engine.ledger import LedgerBlocks, LedgerRunner, expected_tokens
from tests.engine.test_ledger import Clock
from tests.engine.test_scheduler import request, root_of, store_of
from tests.engine.trace import VOCAB_SIZE

STEP_S = 0.001


class Prefills(LedgerRunner):
    """Knows what a prefill takes."""

    per_token_s: float | None = None

    def prefill_s(self, num_new: int, context: int) -> float | None:
        return None if self.per_token_s is None else self.per_token_s * num_new


@pytest.mark.parametrize(
    ("per_token_s", "num_harmful"), [(None, 0), (1.0, 0), (STEP_S / 8, 0), (STEP_S / 33, 1), (0.0, 1)]
)
def test_a_hit_is_harmful_when_its_load_took_longer_than_its_prefill(
    per_token_s: float | None, num_harmful: int
) -> None:
    """Some of 32 tokens come back in one step; the engine's model says what they would take."""
    rng, clock = random.Random(0), Clock()
    first, other = ([rng.randrange(VOCAB_SIZE) for _ in range(33)] for _ in range(2))
    requests = [request(name, ids, 1) for name, ids in (("first", first), ("other", other), ("again", first))]
    config = EngineConfig(num_blocks=10, max_model_len=40, block_size=4, paranoid=True)
    blocks = LedgerBlocks(config.num_blocks, config.block_size)
    runner = Prefills(
        blocks, VOCAB_SIZE, {r.request_id: expected_tokens(r.prompt_ids, 1, VOCAB_SIZE) for r in requests}, lazy=True
    )
    runner.per_token_s = per_token_s
    core = EngineCore(
        config, runner, LocalConnector(store_of(blocks, clock, Faults()), blocks), root_of=root_of, clock=clock
    )
    for each in requests:
        core.add_request(each)
        while core.has_work():
            clock.sleep(STEP_S)
            core.step()
    stats = core.stats()
    loaded = sum(tier["hit_tokens"] for name, tier in stats["tiers"].items() if name != "device")
    assert 8 < loaded <= 32
    assert stats["harmful_hits"] == num_harmful
    core.close()
