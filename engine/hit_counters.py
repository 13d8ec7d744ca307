"""Lookup tokens and hit tokens by tier: the figures behind every hit rate.

Lookup tokens: prompt tokens minus one of each request when it is first scheduled. Hit tokens: those of them that
were not computed, a partly matching block's included, under the tier that served them. Resumption after preemption
counts nowhere, nor does what a choice takes from another one of the same prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class HitCounters:
    """Counts since start. A partly matching block counts as one hit block."""

    lookup_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)
    hit_blocks: dict[str, int] = field(default_factory=dict)

    def count(self, lookup_tokens: int, cached_tokens: dict[str, int], block_size: int) -> None:
        self.lookup_tokens += lookup_tokens
        for tier, num_tokens in cached_tokens.items():
            self.hit_tokens[tier] = self.hit_tokens.get(tier, 0) + num_tokens
            self.hit_blocks[tier] = self.hit_blocks.get(tier, 0) + -(-num_tokens // block_size)

    def rate(self, tier: str) -> float:
        """Share of the lookup tokens that `tier` served."""
        return self.hit_tokens.get(tier, 0) / self.lookup_tokens if self.lookup_tokens else 0.0

    def as_dict(self) -> dict[str, float]:
        """The `lookup` entry of `GET /stats`."""
        hit_tokens = sum(self.hit_tokens.values())
        rate = hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0
        return {"lookup_tokens": self.lookup_tokens, "hit_tokens": hit_tokens, "hit_rate": rate}
