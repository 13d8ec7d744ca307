"""The comparison of `bench spine`: same prompts to both sides, a fair count, and what agreement means."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("transformers", reason="the bench extra is not installed")

from pagetier.benchmarks.spine import EQUAL, MIXED, Generate, Outputs, Workload, compare, share_of_equal_tokens

SMALL = Workload("small", (3, 5), 4)


def test_both_sides_get_the_same_prompts_and_new_ones_for_each_pair() -> None:
    seen: dict[str, list[list[list[int]]]] = {"ours": [], "theirs": []}

    def side(name: str, seconds: float) -> Generate:
        def generate(workload: Workload, prompts: list[list[int]]) -> Outputs:
            seen[name].append(prompts)
            time.sleep(seconds)
            return [[1] * workload.num_new_tokens for _ in prompts]

        return generate

    rows = {row.name: row for row in compare(SMALL, "float32", side("ours", 0.01), side("theirs", 0.05), 3, "busy")}
    assert seen["ours"] == seen["theirs"]
    assert len({str(prompts) for prompts in seen["ours"]}) == 3
    assert [len(prompt) for prompt in seen["ours"][0]] == [3, 5]
    ratio = rows["small_float32_vs_transformers"]
    assert ratio.value is not None
    assert ratio.value > 1.5
    assert ratio.ok
    assert (ratio.target, ratio.runs, ratio.note) == (">= 1.00", 3, "busy")
    assert rows["small_float32_same_tokens"].value == 1.0
    assert rows["small_float32_pagetier"].unit == "tokens/s"


def test_an_answer_that_is_too_short_is_not_counted() -> None:
    def short(workload: Workload, prompts: list[list[int]]) -> Outputs:
        return [[1] for _ in prompts]

    with pytest.raises(AssertionError):
        compare(SMALL, "float32", short, short, 1, "")


def test_agreement_ends_at_the_first_difference() -> None:
    assert share_of_equal_tokens([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 9, 3, 4], [5, 6, 7, 8]]) == pytest.approx(5 / 8)


@pytest.mark.parametrize("workload", [EQUAL, MIXED], ids=lambda workload: workload.name)
def test_prompts_share_no_prefix(workload: Workload) -> None:
    prompts = workload.prompts(seed=1)
    assert tuple(map(len, prompts)) == workload.prompt_lengths
    assert len({tuple(prompt[:4]) for prompt in prompts}) == len(prompts) == 16
