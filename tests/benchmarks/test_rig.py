"""The engine by its parts, on a tiny model: it generates, counts its arithmetic rightly, keeps a clock that adds up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagetier.benchmarks.cpu.bench import draw as draw_cpu
from pagetier.benchmarks.cpu.comparison import RIVALS, rows_not_measured
from pagetier.benchmarks.cpu.invariance import QUICK, invariance_row
from pagetier.benchmarks.cpu.neighbours import busy_thread, inter_token_s
from pagetier.benchmarks.cpu.overhead import non_kernel_row
from pagetier.benchmarks.cpu.shares import attention_bytes_per_s, held_batch, weight_bytes_per_s
from pagetier.benchmarks.profile import CORE_PARTS, RUNNER_PARTS, Clock, TimedRunner, fit_rows, part_rows, steps_of
from pagetier.benchmarks.profile import draw as draw_profile
from pagetier.benchmarks.report import Report, Row
from pagetier.benchmarks.rig import Setup, Weights, open_rig
from pagetier.benchmarks.workload import VOCAB_SIZE, Request, Workload, decode
from pagetier.engine.batch import StepResult
from pagetier.engine.device_pool import DevicePool
from pagetier.engine.models.compiled import CompiledModel
from pagetier.engine.runner.model_runner import Launched
from pagetier.kernels.cpu.library import OpKind
from tests.kernels.cpu.tiny_models import random_tensors, tiny_config

SETUP = Setup(threads=1, num_blocks=256)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def weights(request: pytest.FixtureRequest) -> Weights:
    config = tiny_config(vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=32, tie_word_embeddings=request.param)
    return Weights(config, "float32", random_tensors(config))


def test_every_request_gets_its_tokens(weights: Weights) -> None:
    with open_rig(weights, SETUP) as rig:
        outputs, elapsed_s = rig.generate([Request([5, 6, 7], 4), Request([8], 1), Request(list(range(100)), 2)])
        assert [len(ids) for ids in outputs] == [4, 1, 2]
        assert 0 < rig.kernel_s < elapsed_s
        assert rig.generate([Request([5, 6, 7], 4)])[0] == outputs[:1]


def test_weights_of_a_step_are_those_of_its_matrix_products(weights: Weights) -> None:
    with open_rig(weights, SETUP) as rig:
        products = [op for op in rig.model._ops if op.kind == OpKind.GEMM]
        per_token = sum(op.n * op.k * (1 + op.gated) for op in products if not op.per_sample)
        per_sample = sum(op.n * op.k * (1 + op.gated) for op in products if op.per_sample)
    assert weights.gemm_weights() == (per_token, per_sample)
    assert weights.gemm_bytes == 4 * (per_token + per_sample)
    assert weights.kv_bytes_per_token == 2 * 2 * 2 * 32 * 4


def test_rows_of_ours_have_values(weights: Weights) -> None:
    with open_rig(weights, SETUP) as rig:
        assert weight_bytes_per_s(rig, decode(2, 4)) > 0
        assert attention_bytes_per_s(rig, held_batch(500, 256, 16), 2) > 0
        row = non_kernel_row(rig, 4, "a note")
        assert row.value is not None
        assert 0 < row.value < 1e3
        assert row.note.endswith("ms a step; a note")
        with busy_thread():
            assert len(inter_token_s(rig, 20)) == 11


def test_the_core_is_invariant_and_a_difference_would_be_counted(weights: Weights) -> None:
    assert invariance_row(weights, 6, QUICK, "").value == 0
    assert invariance_row(weights, 6, QUICK, "").note == "of 18, under 3 arrangements"


def test_invariance_counts_rows_that_differ(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "equal", lambda ours, theirs: False)
    row = invariance_row(weights, 3, QUICK[:1], "")
    assert (row.value, row.ok) == (3.0, False)


class Witnessed(TimedRunner):
    """Notes, for each batch that the clock was not set back in, what its parts gained and what time had passed since
    the batch before."""

    def __init__(self, model: CompiledModel, pool: DevicePool, clock: Clock) -> None:
        self.gained_and_passed: list[tuple[float, float]] = []
        super().__init__(model, pool, clock)

    def _outcome(self, launched: Launched) -> StepResult | BaseException:
        seconds, since_s = self._clock.seconds, self._ended_s
        before_s = sum(seconds[part] for part in RUNNER_PARTS)
        outcome = super()._outcome(launched)
        if self._clock.seconds is seconds:
            gained_s = sum(seconds[part] for part in RUNNER_PARTS) - before_s
            self.gained_and_passed.append((gained_s, self._ended_s - since_s))
        return outcome


def test_the_clock_adds_up_on_both_threads(weights: Weights) -> None:
    clock = Clock()
    clock.reset()
    setup = Setup(
        threads=1,
        num_blocks=256,
        max_num_batched_tokens=64,
        make_runner=lambda model, pool: Witnessed(model, pool, clock),
    )
    with open_rig(weights, setup) as rig:
        for workload in (decode(3, 40), Workload("prefill", ((64 * 12, 1),), counts_prompt=True)):
            steps_of(rig, workload, clock, 10)
            values = {row.name.removeprefix("x_"): row.value or 0.0 for row in part_rows("x", clock, "")}
            step = values.pop("step")
            core = sum(values.get(f"core_{part}", 0.0) for part in CORE_PARTS)
            assert core == pytest.approx(step)
            assert isinstance(rig.runner, Witnessed) and len(rig.runner.gained_and_passed) >= 10
            for gained_s, passed_s in rig.runner.gained_and_passed:
                assert gained_s == pytest.approx(passed_s)
            assert values["runner_kernel_gemm"] > 0
            assert values["runner_sampling"] > 0
        fitted = {row.name: row.value or 0.0 for row in fit_rows(rig.model.prefill_model.fit)}
        assert fitted["prefill_model_1000_tokens"] > 0 and fitted["prefill_model_million_pairs"] > 0


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the bench extra is not installed")
    rows = [
        Row("decode_1_pagetier", 50.0, "tok/s"),
        Row("decode_1_vllm", 20.0, "tok/s"),
        Row("decode_1_vs_vllm", 2.5, "ratio", ">= 1.8"),
        Row("memory", 600.0, "MiB", "<= 500"),
        Row("batch_invariance", 0.0, "rows", "== 0"),
        *rows_not_measured(RIVALS[2], tuple(RIVALS[2].targets), "not installed"),
    ]
    report = Report("cpu", "abc", "2026-01-01T00:00:00+00:00", "a machine", "pagetier bench cpu", tuple(rows))
    assert draw_cpu(report, tmp_path).read_bytes().startswith(b"\x89PNG")
    steps = [Row("decode_1_step", 10.0, "ms"), Row("decode_1_core_plan", 1.0, "ms")]
    report = Report("profile", "abc", "2026-01-01T00:00:00+00:00", "a machine", "pagetier bench profile", tuple(steps))
    assert draw_profile(report, tmp_path).name == "profile.png"
