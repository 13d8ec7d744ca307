"""Parts of a block: how ranks divide one, which parts together hold another, and moving bytes between them.

A block's bytes are `[layer][plane][head][token][head_dim]`: one layer, plane and head is a contiguous run, and a part
is the runs of its layers and heads in the same order. Pure; knows no tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagetier.kvstore.block import KVGroup, Part
from pagetier.kvstore.errors import ConfigError

Division = tuple[Part, ...]  # parts that do not overlap and together are the whole block


def divide(whole: Part, num_stages: int, num_ranks: int) -> Division:
    """The parts of `num_stages` pipeline stages times `num_ranks` tensor ranks.

    Stages take equal numbers of layers, the first ones one more where that does not come out even. Ranks take equal
    numbers of heads; more ranks than heads hold the same ones several times, which are one part here. Raises
    ConfigError when that cannot be.
    """
    num_layers, num_heads = whole.end_layer - whole.first_layer, whole.end_head - whole.first_head
    if not 1 <= num_stages <= num_layers:
        raise ConfigError.bad_value("pipeline stages", num_stages, f"1 to {num_layers}, one layer each at least")
    if num_ranks < 1 or (num_heads % num_ranks and num_ranks % num_heads):
        raise ConfigError.bad_value("tensor ranks", num_ranks, f"a divisor or a multiple of {num_heads} KV heads")
    layers = _ranges(whole.first_layer, num_layers, num_stages)
    heads = _ranges(whole.first_head, num_heads, min(num_ranks, num_heads))
    return tuple(Part(whole.group, *stage, *rank) for stage in layers for rank in heads)


def _ranges(first: int, count: int, num_ranges: int) -> list[tuple[int, int]]:
    size, rest = divmod(count, num_ranges)
    ends = [first + size * i + min(i, rest) for i in range(num_ranges + 1)]
    return list(zip(ends[:-1], ends[1:], strict=True))


def pieces_of(part: Part, division: Division) -> Division:
    """The members of `division` that hold something of `part`; empty when they do not hold all of it."""
    pieces = tuple(piece for piece in division if _shared_runs(piece, part))
    return pieces if sum(_shared_runs(piece, part) for piece in pieces) == _shared_runs(part, part) else ()


def _shared_runs(a: Part, b: Part) -> int:
    """How many layers times heads two parts have in common."""
    if a.group != b.group:
        return 0
    num_layers = min(a.end_layer, b.end_layer) - max(a.first_layer, b.first_layer)
    num_heads = min(a.end_head, b.end_head) - max(a.first_head, b.first_head)
    return max(0, num_layers) * max(0, num_heads)


@dataclass(frozen=True, slots=True)
class PartLayout:
    """num_planes: k and v are two. run_bytes: of one layer, plane and head of a whole block."""

    num_planes: int
    run_bytes: int

    @classmethod
    def of(cls, group: KVGroup, part: Part, payload_bytes: int) -> PartLayout:
        """From what a rank knows. Raises ConfigError for KV that heads do not divide."""
        shapes = {(plane.dtype, plane.shape) for plane in group.planes}
        num_runs = len(group.planes) * _shared_runs(part, part)
        if len(shapes) != 1 or not num_runs or payload_bytes % num_runs:
            allowed = "planes of one dtype and shape, and whole heads"
            raise ConfigError.bad_value("KV group to assemble parts of", group.planes, allowed)
        return cls(len(group.planes), payload_bytes // num_runs)

    def nbytes(self, part: Part) -> int:
        """Size of the part's payload."""
        return _shared_runs(part, part) * self.num_planes * self.run_bytes

    def copy(self, source: memoryview, held: Part, destination: memoryview, wanted: Part) -> None:
        """Copy what two parts of one block have in common from the one's payload into the other's."""
        first_layer, end_layer = max(held.first_layer, wanted.first_layer), min(held.end_layer, wanted.end_layer)
        first_head, end_head = max(held.first_head, wanted.first_head), min(held.end_head, wanted.end_head)

        def runs(view: memoryview, part: Part) -> np.ndarray:
            shape = (part.end_layer - part.first_layer, self.num_planes, part.end_head - part.first_head, -1)
            layers = slice(first_layer - part.first_layer, end_layer - part.first_layer)
            heads = slice(first_head - part.first_head, end_head - part.first_head)
            return np.frombuffer(view, np.uint8).reshape(shape)[layers, :, heads]

        runs(destination, wanted)[...] = runs(source, held)


def sources_of(part: Part, divisions: Sequence[Division]) -> list[Division]:
    """Of each division, the pieces to assemble `part` from; those first that need the fewest. Not `part` itself."""
    found = {pieces_of(part, division) for division in divisions} - {(), (part,)}
    return sorted(found, key=lambda pieces: (len(pieces), pieces))
