"""One prompt is computed once: for its choices, for others that share its beginning, for the next turn of a chat."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pagetier.engine.batch import Batch
from pagetier.engine.config import EngineConfig
from pagetier.engine.core import EngineCore
from pagetier.engine.messages import EngineRequest
from pagetier.engine.sampling_params import SamplingParams
from pagetier.kvstore.keys import root_key
from tests.engine.ledger import LedgerBlocks, LedgerRunner, expected_tokens
from tests.engine.test_ledger import DOMAIN
from tests.engine.trace import VOCAB_SIZE

CONFIG = EngineConfig(
    num_blocks=400, max_model_len=500, block_size=8, max_num_seqs=128, max_num_batched_tokens=64, paranoid=True
)


class CountingRunner(LedgerRunner):
    num_computed = 0

    def launch(self, batch: Batch) -> None:
        self.num_computed += batch.num_tokens
        super().launch(batch)


class Rig:
    """A core on the ledger model without tiers; every answer is checked."""

    def __init__(self, config: EngineConfig, requests: Sequence[EngineRequest]) -> None:
        blocks = LedgerBlocks(config.num_blocks, config.block_size)
        self.expected = {
            r.request_id: expected_tokens(r.prompt_ids, r.params.max_tokens or 0, VOCAB_SIZE) for r in requests
        }
        self.runner = CountingRunner(blocks, VOCAB_SIZE, self.expected, lazy=True)
        self.core = EngineCore(
            config, self.runner, None, root_of=lambda salt: root_key(DOMAIN, salt.encode()), poison=blocks.poison
        )
        self.tokens: dict[str, list[int]] = {r.request_id: list(r.prompt_ids) for r in requests}
        self.cached: dict[str, int] = {}
        self.most_blocks = 0

    def step(self) -> None:
        for output in self.core.step():
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason != "abort":
                self.cached[output.request_id] = sum(output.cached_tokens.values())
        self.most_blocks = max(self.most_blocks, self.core.scheduler.pool.num_referenced)

    def run(self, requests: Sequence[EngineRequest] = ()) -> None:
        for request in requests:
            self.core.add_request(request)
        while self.core.has_work():
            self.step()
        for request in requests:
            assert self.tokens[request.request_id] == self.expected[request.request_id], request.request_id
        assert self.core.scheduler.pool.num_referenced == 0


def make(name: str, prompt: Sequence[int], max_tokens: int, group: str = "") -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(name, tuple(prompt), params, seed=0, group=group)


def make_prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "none"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 200, 203])
def test_choices_compute_their_prompt_once(length: int, depth: int, caching: bool) -> None:
    """Beyond it, each computes the last prompt token for itself; full blocks are shared, the last one is copied."""
    config = replace(CONFIG, pipeline_depth=depth, enable_prefix_caching=caching)
    choices = [make(f"c{i}", make_prompt(length), 20, "g") for i in range(8)]
    rig = Rig(config, choices)
    rig.run(choices)
    overshoot = 8 * (depth - 1)  # a step planned before it was known that it was not needed
    assert rig.runner.num_computed <= length + 7 + 8 * 19 + overshoot
    full, needed = (length - 1) // config.block_size, -(-(length + 20) // config.block_size)
    assert rig.most_blocks <= needed + 7 * (needed - full) + 8
    hits = rig.core.scheduler.hits
    assert (hits.lookup_tokens, hits.as_dict()["hit_tokens"]) == (length - 1, 0), "a prompt is looked up once"


@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "none"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ends", ["by length", "by stop"])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 200, 203])
def test_choices_that_end_at_once_compute_their_prompt_once(length: int, ends: str, depth: int, caching: bool) -> None:
    """The first one ends with its first token, before anybody could fork: it leaves its blocks to the next."""
    config = replace(CONFIG, pipeline_depth=depth, enable_prefix_caching=caching)
    choices = [make(f"c{i}", make_prompt(length), 1, "g") for i in range(8)]
    if ends == "by stop":
        first = expected_tokens(choices[0].prompt_ids, 1, VOCAB_SIZE)[-1]
        choices = [replace(r, params=replace(r.params, max_tokens=20, stop_token_ids=(first,))) for r in choices]
    rig = Rig(config, choices)
    rig.expected = {name: expected[: length + 1] for name, expected in rig.expected.items()}
    rig.run(choices)
    overshoot = 8 * (depth - 1) * (ends == "by stop")
    assert rig.runner.num_computed <= length + 7 + overshoot
    assert rig.core.scheduler.hits.lookup_tokens == length - 1, "a prompt is looked up once"


@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "none"])
@pytest.mark.parametrize("aborts", [1, 2, 4, 8])
def test_a_choice_that_ends_is_replaced(aborts: int, caching: bool) -> None:
    """The one that computes the prompt ends in the middle of it: the next one takes over, and nobody waits for ever."""
    choices = [make(f"c{i}", make_prompt(300), 5, "g") for i in range(4)]
    rig = Rig(replace(CONFIG, enable_prefix_caching=caching), choices)
    for request in choices:
        rig.core.add_request(request)
    for name in ("c0", "c1"):
        for _ in range(aborts):
            rig.step()
        rig.core.abort([name])
    rig.run(())
    assert all(rig.tokens[name] == rig.expected[name] for name in ("c2", "c3"))


def test_a_group_of_different_prompts_is_none() -> None:
    """Whoever names a group wrongly gets right answers all the same."""
    requests = [make(f"c{i}", make_prompt(50, seed=i), 5, "g") for i in range(3)]
    Rig(CONFIG, requests).run(requests)


def test_followers_take_what_their_leader_computes() -> None:
    """Fifty requests share an uncached prefix: it is computed once, and nobody else waits for them."""
    shared = make_prompt(240)
    followers = [make(f"f{i}", [*shared, *make_prompt(5, seed=i)], 3) for i in range(50)]
    stranger = make("stranger", make_prompt(30, seed=99), 3)
    rig = Rig(CONFIG, [*followers, stranger])
    for request in (*followers, stranger):
        rig.core.add_request(request)
    while len(rig.tokens["stranger"]) == 30:
        rig.step()
    waiting = [request for request in followers[1:] if len(rig.tokens[request.request_id]) == 245]
    assert len(waiting) == 49, "the stranger came last, but waits for none of their blocks"
    rig.run()
    assert all(rig.tokens[name] == expected for name, expected in rig.expected.items())
    assert rig.runner.num_computed <= 240 + 50 * (5 + 2) + 30 + 2 + 51


@pytest.mark.parametrize("step", range(1, 8))
def test_a_dead_leader_is_replaced(step: int) -> None:
    """What it had computed is not computed again."""
    shared = make_prompt(240)
    requests = [make(f"f{i}", [*shared, *make_prompt(5, seed=i)], 3) for i in range(4)]
    rig = Rig(CONFIG, requests)
    for request in requests:
        rig.core.add_request(request)
    for _ in range(step):
        rig.step()
    rig.core.abort(["f0"])
    rig.run()
    assert all(rig.tokens[f"f{i}"] == rig.expected[f"f{i}"] for i in range(1, 4))
    lost = 2 * CONFIG.max_num_batched_tokens  # of the steps under way when it died
    assert rig.runner.num_computed <= 240 + 4 * (5 + 3) + lost


def test_the_next_turn_of_a_chat_finds_the_answer() -> None:
    """Blocks of a finished answer, those it shared with other choices included, serve the next prompt."""
    first = [make(f"c{i}", make_prompt(61), 40, "g") for i in range(3)]
    answered = expected_tokens(first[0].prompt_ids, 40, VOCAB_SIZE)
    second = make("second", [*answered, *make_prompt(12, seed=1)], 4)
    rig = Rig(CONFIG, [*first, second])
    rig.run(first)
    rig.run([second])
    assert rig.cached["second"] >= (len(answered) - 1) // CONFIG.block_size * CONFIG.block_size
