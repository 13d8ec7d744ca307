"""A trace of requests with shared prefixes, and a random configuration to run it under on the ledger model."""

from __future__ import annotations

import random
from dataclasses import dataclass

from pagetier.engine.messages import EngineRequest
from pagetier.engine.sampling_params import SamplingParams
from tests.engine.ledger import expected_tokens

VOCAB_SIZE = 97
EOS = 7


@dataclass(frozen=True)
class TracedRequest:
    """A request, the step before which it arrives, the step before which it is aborted (None: never), its answer."""

    request: EngineRequest
    arrives: int
    aborts: int | None
    output: tuple[int, ...]
    finish_reason: str


def make_trace(rng: random.Random, num_requests: int, abort_rate: float, max_prompt: int = 120) -> list[TracedRequest]:
    """Requests that share prefixes of a few documents, end at different lengths, some by an EOS token."""
    documents = [[rng.randrange(VOCAB_SIZE) for _ in range(max_prompt)] for _ in range(4)]
    trace = []
    for i in range(num_requests):
        document = rng.choice(documents)
        shared = rng.randrange(0, max_prompt - 8)
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((0, 1, 3, 8)))]
        prompt = (document[:shared] + own) or [rng.randrange(VOCAB_SIZE)]
        max_tokens = rng.choice((1, 2, 5, 17, 40))
        ignore_eos = rng.random() < 0.5
        sequence = expected_tokens(prompt, max_tokens, VOCAB_SIZE)
        output, reason = sequence[len(prompt) :], "length"
        if not ignore_eos and EOS in output:
            output, reason = output[: output.index(EOS) + 1], "stop"
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        request = EngineRequest(
            f"r{i}",
            tuple(prompt),
            params,
            seed=0,
            eos_token_ids=(EOS,),
            priority=rng.randrange(3),
            tenant=rng.choice("abc"),
        )
        arrives = rng.randrange(60)
        aborts = arrives + rng.randrange(40) if rng.random() < abort_rate else None
        trace.append(TracedRequest(request, arrives, aborts, tuple(output), reason))
    return sorted(trace, key=lambda t: t.arrives)
