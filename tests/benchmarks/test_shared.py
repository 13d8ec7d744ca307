"""`bench shared` at small sizes: its rows are there, and what is counted rather than timed holds."""

from __future__ import annotations

import pytest

from pagetier.benchmarks.shared import Answers, Sizes, replica_rows, sharing

TINY = Sizes(prefix_tokens=256, num_requests=6, num_runs=1, num_prefixes=3, num_identical=8)


def test_prompts_share_their_beginning_and_nothing_else() -> None:
    prompts = sharing(1, 40, 3)
    assert prompts[0][:40] == prompts[1][:40] == prompts[2][:40]
    assert len({tuple(prompt[40:]) for prompt in prompts}) == 3
    assert sharing(2, 40, 1)[0][:40] != prompts[0][:40]


def test_what_no_tier_served_was_prefilled() -> None:
    answers = Answers(num_prompt=100, cached={"0": {"device": 30, "nvme": 16}, "1": {}})
    assert answers.num_prefilled == 54


@pytest.mark.slow
def test_two_replicas_compute_a_prompt_once_each() -> None:
    (row,) = replica_rows(TINY, "", lambda line: None)
    assert row.value is not None and 1.0 <= row.value <= 2.2
