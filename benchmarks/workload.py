"""The requests that every side of a comparison gets: token ids in, a fixed number of greedy tokens out, EOS ignored."""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_ORDINARY_ID = 100  # below lie special tokens
VOCAB_SIZE = 49_152


@dataclass(frozen=True, slots=True)
class Request:
    prompt_ids: list[int]
    num_new: int


@dataclass(frozen=True, slots=True)
class Workload:
    """`lengths`: (prompt tokens, new tokens) of each request. Its speed is `num_counted` tokens over the time of all
    requests together: prompt tokens where `counts_prompt`, else new ones, their prefill within the time."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    counts_prompt: bool = False

    @property
    def num_counted(self) -> int:
        return sum(prompt if self.counts_prompt else new for prompt, new in self.lengths)

    def requests(self, seed: int) -> list[Request]:
        """Random ids without a common prefix; a new seed, new prompts of the same lengths."""
        ids = random.Random(f"{self.name}-{seed}")
        return [
            Request([ids.randrange(FIRST_ORDINARY_ID, VOCAB_SIZE) for _ in range(prompt)], new)
            for prompt, new in self.lengths
        ]


def decode(batch: int, num_new: int) -> Workload:
    """Prompts of 16 tokens, so that their prefill is a step among many."""
    return Workload(f"decode_{batch}", ((16, num_new),) * batch)


def mixed(num_requests: int = 64) -> Workload:
    """Log-normal lengths, seed 1: 8,801 prompt and 14,947 new tokens for 64 requests."""
    draw = random.Random(1)
    lengths = []
    for _ in range(num_requests):
        prompt = min(1024, max(4, int(draw.lognormvariate(4.6, 1.0))))
        lengths.append((prompt, min(512, max(4, int(draw.lognormvariate(5.2, 0.8))))))
    return Workload(f"mixed_{num_requests}", tuple(lengths))


PREFILL = Workload("prefill_2000", ((2000, 1),), counts_prompt=True)
