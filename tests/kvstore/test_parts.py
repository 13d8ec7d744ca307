"""Parts divide a block without gap or overlap, and their bytes are slices of the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetier.kvstore.block import KVGroup, Part, Plane
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.parts import PartLayout, divide, pieces_of, sources_of

WHOLE = Part(0, 0, 6, 0, 4)


def test_ranks_and_stages_divide_as_is_usual() -> None:
    assert divide(WHOLE, 1, 1) == (WHOLE,)
    assert divide(WHOLE, 1, 2) == (Part(0, 0, 6, 0, 2), Part(0, 0, 6, 2, 4))
    assert divide(WHOLE, 2, 2)[2] == Part(0, 3, 6, 0, 2)
    assert divide(WHOLE, 4, 1) == tuple(Part(0, a, b, 0, 4) for a, b in ((0, 2), (2, 4), (4, 5), (5, 6)))
    assert divide(WHOLE, 1, 8) == divide(WHOLE, 1, 4), "ranks beyond the heads hold the same ones"
    for stages, ranks in ((0, 1), (7, 1), (1, 0), (1, 3), (1, 6)):
        with pytest.raises(ConfigError, match="got"):
            divide(WHOLE, stages, ranks)


def test_pieces_hold_all_of_a_part_or_are_none() -> None:
    halves = divide(WHOLE, 1, 2)
    assert pieces_of(halves[0], (WHOLE,)) == (WHOLE,)
    assert pieces_of(WHOLE, halves) == halves
    assert pieces_of(WHOLE, halves[:1]) == ()
    assert pieces_of(Part(1, 0, 6, 0, 4), halves) == (), "another KV group"
    assert sources_of(halves[0], [(WHOLE,), halves, divide(WHOLE, 2, 4), halves[1:]]) == [
        (WHOLE,),
        tuple(piece for piece in divide(WHOLE, 2, 4) if piece.end_head <= 2),
    ]


degrees = st.tuples(st.integers(1, 6), st.sampled_from([1, 2, 4]))


@given(degrees, degrees, st.integers(0, 2**32 - 1))
def test_every_part_is_assembled_from_every_division(
    writer: tuple[int, int], reader: tuple[int, int], seed: int
) -> None:
    whole = np.random.default_rng(seed).integers(0, 256, (6, 2, 4, 5), dtype=np.uint8)  # layer, plane, head, run

    def bytes_of(part: Part) -> bytearray:
        cut = whole[part.first_layer : part.end_layer, :, part.first_head : part.end_head]
        return bytearray(np.ascontiguousarray(cut).tobytes())

    layout, division = PartLayout(2, 5), divide(WHOLE, *writer)
    for part in divide(WHOLE, *reader):
        destination = bytearray(b"\xee" * layout.nbytes(part))
        for piece in pieces_of(part, division):
            layout.copy(memoryview(bytes_of(piece)), piece, memoryview(destination), part)
        assert destination == bytes_of(part)


def test_the_layout_follows_from_what_a_rank_knows() -> None:
    group = KVGroup((0, 1), (Plane("k", "bfloat16", (4, 8)), Plane("v", "bfloat16", (4, 8))), None, 256)
    whole, half = Part(0, 0, 2, 0, 4), Part(0, 0, 1, 2, 4)
    assert PartLayout.of(group, whole, 256 * 16) == PartLayout.of(group, half, 64 * 16) == PartLayout(2, 8 * 2 * 16)
    assert PartLayout(2, 256).nbytes(half) == 64 * 16
    unfit: list[tuple[Any, int]] = [
        ((Plane("k", "bfloat16", (4, 8)), Plane("v", "float32", (4, 8))), 4096),
        ((Plane("latent", "bfloat16", (1, 512)), Plane("rope", "bfloat16", (1, 64))), 4096),
        (group.planes, 4097),
    ]
    for planes, nbytes in unfit:
        with pytest.raises(ConfigError, match="planes of one dtype and shape"):
            PartLayout.of(KVGroup((0, 1), planes, None, 256), whole, nbytes)
