"""Block traces: what requests ask for, as chains of numbers that stand for keys. Drawn by seed, nothing is computed.

A request is the chain of its prompt's full blocks, head first; a block's number is the same wherever its whole prefix
is. Shapes follow what is served in public: shared system prompts by Zipf's law, chats that come back, agents whose
steps branch, and a prompt of 100,000 tokens that is asked again and again among strangers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import accumulate

Chain = tuple[int, ...]

BLOCK_SIZE = 16
LONG_BLOCKS = 100_000 // BLOCK_SIZE


class Writer:
    """Hands out new blocks; draws lengths."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self._next = 0

    def blocks(self, num_blocks: int) -> Chain:
        first, self._next = self._next, self._next + num_blocks
        return tuple(range(first, self._next))

    def tokens(self, median: float, sigma: float, most: int) -> Chain:
        """New blocks of a log-normal number of tokens, at least one block."""
        num_tokens = min(most, int(self.draw.lognormvariate(0.0, sigma) * median))
        return self.blocks(max(1, num_tokens // BLOCK_SIZE))


def zipf_prompts(num_requests: int, seed: int, num_prompts: int = 1_000) -> Iterator[Chain]:
    """System prompts and documents of some 2,000 tokens, popular by Zipf's law (0.9), each time with another
    question."""
    writer = Writer(seed)
    prompts = [writer.tokens(2_000, 0.8, 16_000) for _ in range(num_prompts)]
    weights = list(accumulate(1 / (rank + 1) ** 0.9 for rank in range(num_prompts)))
    for _ in range(num_requests):
        (prompt,) = writer.draw.choices(prompts, cum_weights=weights)
        yield prompt + writer.tokens(200, 1.0, 4_000)


def chats(num_requests: int, seed: int, num_open: int = 150) -> Iterator[Chain]:
    """Conversations behind one of eight system prompts; a turn repeats all before it. One in eight ends after each
    turn, and another begins; who spoke last is likelier to speak next."""
    writer = Writer(seed)
    systems = [writer.tokens(800, 0.5, 4_000) for _ in range(8)]
    open_chats = [writer.draw.choice(systems) for _ in range(num_open)]
    for _ in range(num_requests):
        at = min(int(writer.draw.expovariate(3.0 / num_open)), num_open - 1)
        turn = open_chats.pop(at) + writer.tokens(400, 1.0, 4_000)
        yield turn
        ends = writer.draw.random() < 1 / 8
        open_chats.insert(0, writer.draw.choice(systems) if ends else turn)


def agent_trees(num_requests: int, seed: int, num_agents: int = 24) -> Iterator[Chain]:
    """Agents of one tool prompt; a step goes on from the last state, or, one in five, from an earlier one. After
    some forty steps an agent starts another task."""
    writer = Writer(seed)
    tools = writer.tokens(3_000, 0.1, 4_000)
    agents = [[tools] for _ in range(num_agents)]
    for _ in range(num_requests):
        states = writer.draw.choice(agents)
        before = writer.draw.choice(states) if writer.draw.random() < 0.2 else states[-1]
        step = before + writer.tokens(500, 1.0, 8_000)
        yield step
        states.append(step)
        if writer.draw.random() < 1 / 40 or len(step) > 2_000:
            states[:] = [tools]


def long_prompt(num_requests: int, seed: int) -> Iterator[Chain]:
    """100,000 tokens, asked about once in 20 requests; between, prompts of 1,000 tokens that nobody asks again."""
    writer = Writer(seed)
    book = writer.blocks(LONG_BLOCKS)
    for number in range(num_requests):
        yield book + writer.tokens(100, 0.5, 500) if number % 20 == 0 else writer.tokens(1_000, 0.8, 8_000)


def mixed(num_requests: int, seed: int) -> Iterator[Chain]:
    """All four, in turn by chance; each keeps its own blocks."""
    draw = random.Random(seed)
    parts = [
        (make(num_requests, seed + 1 + place), place + 1)
        for place, make in enumerate((zipf_prompts, chats, agent_trees, long_prompt))
    ]
    for _ in range(num_requests):
        part, place = draw.choices(parts, weights=(4, 4, 4, 1))[0]
        yield tuple(block * 8 + place for block in next(part))


TRACES: dict[str, Callable[[int, int], Iterator[Chain]]] = {
    "zipf": zipf_prompts,
    "chats": chats,
    "agents": agent_trees,
    "long": long_prompt,
    "mixed": mixed,
}
