"""What is known decides between computing and loading; what is unknown is tried."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagetier.engine.restore_cost import MEMORY_BLOCKS, RestoreCost

rates = st.floats(1e-6, 1.0)


@given(load=rates, save=rates, prefill=rates, num_blocks=st.integers(1, 500), data=st.data())
def test_the_cheaper_way_is_taken(
    load: float, save: float, prefill: float, num_blocks: int, data: st.DataObject
) -> None:
    num_unsaved = data.draw(st.integers(0, num_blocks))
    cost = RestoreCost(lambda num_new, context: prefill * num_new)
    cost.observe_load(10, 10 * load)
    cost.observe_save(10, 10 * save)
    swap_s = load * num_blocks + save * num_unsaved
    assert abs(cost.swap_s(num_blocks, num_unsaved) - swap_s) < 1e-9 + 1e-6 * swap_s  # type: ignore[operator]
    recompute_s = prefill * 16 * num_blocks
    if abs(swap_s - recompute_s) > 1e-6 * swap_s:
        assert cost.prefers_swap(16 * num_blocks, num_blocks, num_unsaved) == (swap_s < recompute_s)
    if abs(load * num_blocks - recompute_s) > 1e-6 * recompute_s:
        assert cost.prefers_load(16 * num_blocks, num_blocks) == (load * num_blocks < recompute_s)


def test_what_is_not_known_is_tried() -> None:
    assert RestoreCost().prefers_swap(100, 7, 7)
    cost = RestoreCost(lambda num_new, context: 1e-9)
    assert cost.prefers_swap(100, 7, 7), "the tiers were never used"
    cost.observe_save(1, 1.0)
    assert not cost.prefers_swap(100, 7, 7), "a load is taken to be as slow as a save"
    assert RestoreCost(lambda num_new, context: None).prefers_swap(100, 7, 7)


def test_a_tier_that_became_fast_is_found_out() -> None:
    cost = RestoreCost()
    cost.observe_load(1000, 100.0)
    for _ in range(int(4 * MEMORY_BLOCKS / 100)):
        cost.observe_load(100, 0.1)
    assert cost.swap_s(1, 0) < 0.005  # type: ignore[operator]
