"""The prefill-time model finds the costs that steps were made with and follows their change; a real model feeds it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagetier.engine.models.compiled import CompiledModel
from pagetier.engine.prefill_model import QUERY_PAIRS, PrefillFit, PrefillModel, num_pairs
from pagetier.kernels.cpu.library import OpKind
from tests.kernels.cpu.tiny_models import Setting, library, prompts, random_tensors, rig, tiny_config


def run_steps(model: PrefillModel, truth: PrefillFit, num_steps: int, noise: float = 0.0, seed: int = 0) -> None:
    """Chunks, mixed steps and decodes, as serving mixes them; their times as `truth` has them, give or take `noise`."""
    rng = np.random.default_rng(seed)
    outside_s = truth.per_token_s - QUERY_PAIRS * truth.per_pair_s  # of a token's time
    for _ in range(num_steps):
        num_decodes = int(rng.integers(1, 9))
        other_s = truth.per_step_s + outside_s * num_decodes
        off = 1 + noise * rng.standard_normal(2)
        if rng.random() < 0.7:
            model.observe_decode(num_decodes, other_s * off[0])
            continue
        num_new, context = int(rng.choice([512, 512, 512, 200, 30])), int(rng.integers(0, 8000))
        pairs = num_pairs(num_new, context) + num_decodes * num_pairs(1, 1000)
        attention_s = truth.per_pair_s * (pairs + QUERY_PAIRS * (num_new + num_decodes))
        other_s += outside_s * num_new
        model.observe_prefill(num_new + num_decodes, pairs, attention_s * off[1], other_s * off[0])


TRUTH = PrefillFit(per_step_s=4e-3, per_token_s=2e-4, per_pair_s=1e-8)


def test_exact_steps_give_their_costs_back() -> None:
    model = PrefillModel()
    run_steps(model, TRUTH, 50)
    assert model.fit is not None
    assert model.fit.per_step_s == pytest.approx(TRUTH.per_step_s)
    assert model.fit.per_token_s == pytest.approx(TRUTH.per_token_s)
    assert model.fit.per_pair_s == pytest.approx(TRUTH.per_pair_s)
    assert model.seconds(100, 1000) == pytest.approx(4e-3 + 2e-2 + 1e-8 * 100 * 1050)


@pytest.mark.parametrize("seed", range(5))
def test_noise_averages_out(seed: int) -> None:
    model = PrefillModel()
    run_steps(model, TRUTH, 600, noise=0.2, seed=seed)
    for num_new, context in ((512, 0), (512, 8000), (2000, 0), (64, 100_000)):
        assert model.seconds(num_new, context) == pytest.approx(TRUTH.seconds(num_new, context), rel=0.1)


def test_a_machine_that_became_slower_is_followed() -> None:
    model, slower = PrefillModel(), PrefillFit(8e-3, 6e-4, 5e-8)
    run_steps(model, TRUTH, 300)
    run_steps(model, slower, 1200)
    assert model.seconds(512, 4000) == pytest.approx(slower.seconds(512, 4000), rel=0.02)


def test_what_was_not_seen_is_unknown_and_no_cost_is_negative() -> None:
    model = PrefillModel()
    assert model.fit is None and model.seconds(1, 0) is None
    model.observe_decode(4, 0.01)
    assert model.fit is None
    model.observe_prefill(100, num_pairs(100, 0), 0.001, 0.009)  # quicker than the decode: the line would fall
    pair_s = 0.001 / (5000 + 100 * QUERY_PAIRS)
    assert model.fit == PrefillFit(0.009, QUERY_PAIRS * pair_s, pair_s)
    alone = PrefillModel()
    alone.observe_prefill(100, num_pairs(100, 0), 0.001, 0.01)
    assert alone.fit is not None and alone.fit.per_step_s == pytest.approx(0.0, abs=1e-15)
    assert alone.seconds(200, 0) == pytest.approx(0.02 + pair_s * (20_000 + 200 * QUERY_PAIRS))


def test_short_prompts_foretell_long_ones() -> None:
    """Measured on SmolLM2, one core: tokens of a prompt, and us a token in attention and outside it."""
    model = PrefillModel()
    for num_new, attention_us, other_us in ((8, 22.0, 910.0), (16, 19.2, 778.0), (64, 32.9, 629.0)):
        pairs = num_pairs(num_new, 0)
        model.observe_prefill(num_new, pairs, 1e-6 * attention_us * num_new, 1e-6 * other_us * num_new)
    assert model.seconds(2000, 0) == pytest.approx(2000 * (364 + 663) * 1e-6, rel=0.1)


def test_steps_of_a_real_model_are_learnt_from_its_counters() -> None:
    """Decodes tell nothing of prefill; a first prefill is predicted as it was measured."""
    config = tiny_config()
    with rig(config, random_tensors(config), Setting(library().best_isa(), num_blocks=64)) as run:
        assert isinstance(run.model, CompiledModel)
        first, second = (run.add(ids) for ids in prompts(np.random.default_rng(0), [1, 200], config.vocab_size))
        run.step([(first, 1)])
        assert run.model.prefill_model.fit is None
        before = run.model.counters.copy()
        run.step([(second, 200)])
        step_s = (run.model.counters - before) / 1e9
        assert run.model.prefill_model.seconds(200, 0) == pytest.approx(float(step_s.sum()))
        fit = run.model.prefill_model.fit
        assert fit is not None and fit.per_pair_s == pytest.approx(float(step_s[OpKind.ATTENTION]) / 30_000)
        first.token_ids += [1] * 5
        run.step([(first, 5)])
        assert run.model.prefill_model.fit != fit
        third, fourth = run.add([2] * 20), run.add([2] * 20)
        run.step([(third, 10)])
        fit, fourth.blocks[:] = run.model.prefill_model.fit, third.blocks
        run.step([(third, 10), (fourth, 20)])  # rows that share are quicker than one alone: nothing is learnt
        assert run.model.prefill_model.fit == fit
        assert torch.isfinite(torch.cat(run.logits())).all()
