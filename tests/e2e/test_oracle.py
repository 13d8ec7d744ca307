"""Greedy float32 output equals that of transformers, token for token, all prompts in one continuous batch.

The references were made by the command that their file names; `-m slow` makes them anew and compares.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagetier.engine.llm import LLM
from pagetier.engine.sampling_params import SamplingParams
from tests.e2e.smollm2 import smollm2  # noqa: F401

REFERENCES = Path(__file__).parents[1] / "engine" / "data" / "smollm2_fp32_greedy.json"


@dataclass(frozen=True)
class Case:
    """A prompt, what transformers continues it with, and by how much each token's logit was the best."""

    prompt_ids: list[int]
    output_ids: list[int]
    margins: list[float]


def load_cases() -> list[Case]:
    content = json.loads(REFERENCES.read_text(encoding="utf-8"))
    cases = []
    for case in content["cases"]:
        prompt = case["prompt"]
        start = prompt.get("start", 0)
        ids = prompt.get("ids") or content["text_ids"][start : start + prompt["length"]]
        cases.append(Case(ids, case["output_ids"], case["margins"]))
    return cases


def difference(case: Case, output: list[int]) -> str:
    """Where `output` first differs from the reference, "" if nowhere."""
    if output == case.output_ids:
        return ""
    pairs = zip(output, case.output_ids, strict=False)
    at = next((i for i, (got, wanted) in enumerate(pairs) if got != wanted), None)
    if at is None:
        return f"prompt of {len(case.prompt_ids)}: {len(output)} tokens, not {len(case.output_ids)}"
    return (
        f"prompt of {len(case.prompt_ids)}: token {at} is {output[at]}, not {case.output_ids[at]}; "
        f"top-2 margin there {case.margins[at]}"
    )


@pytest.mark.timeout(600)
def test_thirty_prompts_in_one_batch(smollm2: Path) -> None:  # noqa: F811
    cases = load_cases()
    lengths = sorted(len(case.prompt_ids) for case in cases)
    assert len(cases) == 30 and (lengths[0], lengths[-1]) == (1, 1500)
    assert all(len(case.output_ids) == len(case.margins) == 64 for case in cases)
    with LLM(str(smollm2), dtype="float32", kv_cache_memory="512MiB") as llm:
        answers = llm.generate(
            [case.prompt_ids for case in cases], SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        )
        assert llm.stats()["preemptions"]["recompute"] == 0
    wrong = [difference(case, answer.outputs[0].token_ids) for case, answer in zip(cases, answers, strict=True)]
    assert not any(wrong), "\n".join(filter(None, wrong))
    assert all(answer.outputs[0].finish_reason == "length" for answer in answers)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers renames an argument that older ones lack
def test_references_are_what_transformers_says(smollm2: Path) -> None:  # noqa: F811
    """The committed file, made anew. Skipped where transformers is older or newer than the file's by a major version:
    its tokens may then differ in a near-tie, which is no fault of the engine."""
    import transformers

    from pagetier.benchmarks.oracle_references import references

    content = json.loads(REFERENCES.read_text(encoding="utf-8"))
    if content["versions"]["transformers"].split(".")[0] != transformers.__version__.split(".")[0]:
        pytest.skip(f"made with transformers {content['versions']['transformers']}, here is {transformers.__version__}")
    text = (REFERENCES.parent / "oracle_text.txt").read_text(encoding="utf-8")
    fresh = references(str(smollm2), text, content["command"])
    assert fresh["text_ids"] == content["text_ids"]
    for new, old in zip(fresh["cases"], content["cases"], strict=True):
        assert new["prompt"] == old["prompt"]
        assert new["output_ids"] == old["output_ids"], f"top-2 margins from {min(old['margins'])}"
        assert new["margins"] == pytest.approx(old["margins"], abs=1e-2)
