"""What it costs to give a preempted request its KV back: by computing it again, or by way of the lower tiers.

Every figure is learnt from this process's own steps and transfers; until one is known the way through the tiers is
taken, which makes it known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

MEMORY_BLOCKS = 2048.0  # how many blocks a rate goes back: at 360 KiB some 700 MiB, seconds of a fast disk

PrefillSeconds = Callable[[int, int], float | None]  # (new tokens, tokens before them)


@dataclass(slots=True)
class _Rate:
    """Seconds per block over about the last `MEMORY_BLOCKS` blocks."""

    blocks: float = 0.0
    seconds: float = 0.0

    def add(self, num_blocks: int, elapsed_s: float) -> None:
        fade = max(0.0, 1.0 - num_blocks / MEMORY_BLOCKS)
        self.blocks = fade * self.blocks + num_blocks
        self.seconds = fade * self.seconds + elapsed_s

    @property
    def per_block_s(self) -> float | None:
        return self.seconds / self.blocks if self.blocks else None


@dataclass(slots=True)
class RestoreCost:
    """prefill_s: the runner's model of its own prefills, None where it has none. Owner: core thread."""

    prefill_s: PrefillSeconds | None = None
    _loads: _Rate = field(default_factory=_Rate)
    _saves: _Rate = field(default_factory=_Rate)

    def observe_load(self, num_blocks: int, elapsed_s: float) -> None:
        """A load of so many blocks, from its submission to its end."""
        self._loads.add(num_blocks, elapsed_s)

    def observe_save(self, num_blocks: int, elapsed_s: float) -> None:
        """A save likewise, less the time in which it waited for others."""
        self._saves.add(num_blocks, elapsed_s)

    def num_saved_in(self, seconds: float) -> int | None:
        """Blocks that saves write in that time; None: not known yet."""
        per_block_s = self._saves.per_block_s
        return int(seconds / per_block_s) if per_block_s else None

    def recompute_s(self, num_tokens: int, context: int = 0) -> float | None:
        """Seconds of prefill after `context` tokens; None: not known yet."""
        return None if self.prefill_s is None else self.prefill_s(num_tokens, context)

    def swap_s(self, num_blocks: int, num_unsaved: int) -> float | None:
        """Seconds to save what the tiers do not have and to load all blocks again; None: not known yet. A load of
        which nothing is known is taken to be as fast as a save."""
        save_s = self._saves.per_block_s
        load_s = self._loads.per_block_s if self._loads.blocks else save_s
        if load_s is None or (num_unsaved and save_s is None):
            return None
        return load_s * num_blocks + (save_s or 0.0) * num_unsaved

    def prefers_swap(self, num_tokens: int, num_blocks: int, num_unsaved: int) -> bool:
        """Whether the tiers bring it back sooner than the model does."""
        recompute_s, swap_s = self.recompute_s(num_tokens), self.swap_s(num_blocks, num_unsaved)
        return recompute_s is None or swap_s is None or swap_s < recompute_s

    def prefers_load(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether to load the first `num_blocks` of so many tokens is quicker than to compute these."""
        recompute_s, load_s = self.recompute_s(num_tokens), self.swap_s(num_blocks, 0)
        return recompute_s is None or load_s is None or load_s < recompute_s
