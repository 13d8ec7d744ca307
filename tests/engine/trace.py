"""A trace of requests with shared prefixes, and a random configuration to run it under on the ledger model."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class TraceSize:
    """Of the longest prompt and the outputs in tokens, of the time in which requests arrive in steps."""

    max_prompt: int = 120
    outputs: tuple[int, ...] = (1, 2, 5, 17, 40)
    num_steps: int = 60


LONG, SHORT = TraceSize(), TraceSize(16, (1, 4, 12, 20, 20), 9)


def make_trace(rng: random.Random, num_requests: int, abort_rate: float, size: TraceSize = LONG) -> list[TracedRequest]:
    """Requests that share prefixes of a few documents, end at different lengths, some by an EOS token; some are choices
    of one prompt."""
    documents = [[rng.randrange(VOCAB_SIZE) for _ in range(size.max_prompt)] for _ in range(4)]
    trace: list[TracedRequest] = []
    while len(trace) < num_requests:
        document = rng.choice(documents)
        shared = rng.randrange(0, size.max_prompt - 8)
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((0, 1, 3, 8)))]
        prompt = (document[:shared] + own) or [rng.randrange(VOCAB_SIZE)]
        num_choices = rng.choice((1, 1, 1, 1, 1, 2, 4, 9))
        spec = _request(rng, f"r{len(trace)}", prompt, size)
        first = TracedRequest(spec, rng.randrange(size.num_steps), None, (), "")
        for choice in range(min(num_choices, num_requests - len(trace))):
            group = first.request.request_id if num_choices > 1 else ""
            request = replace(
                _request(rng, f"r{len(trace)}", prompt, size),
                group=group,
                choice=choice,
                priority=first.request.priority,
                tenant=first.request.tenant,
            )
            arrives = first.arrives + (rng.randrange(size.num_steps // 3) if rng.random() < 0.1 else 0)
            aborts = arrives + rng.randrange(40) if rng.random() < abort_rate else None
            trace.append(_answered(TracedRequest(request, arrives, aborts, (), "")))
    return sorted(trace, key=lambda t: t.arrives)


def _request(rng: random.Random, name: str, prompt: list[int], size: TraceSize) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=rng.choice(size.outputs), ignore_eos=rng.random() < 0.5)
    return EngineRequest(
        name,
        tuple(prompt),
        params,
        seed=0,
        eos_token_ids=(EOS,),
        priority=rng.randrange(3),
        tenant=rng.choice("abc"),
    )


def _answered(traced: TracedRequest) -> TracedRequest:
    """With the output and the finish reason that the ledger model must give it."""
    prompt, params = traced.request.prompt_ids, traced.request.params
    assert params.max_tokens is not None
    output, reason = expected_tokens(prompt, params.max_tokens, VOCAB_SIZE)[len(prompt) :], "length"
    if not params.ignore_eos and EOS in output:
        output, reason = output[: output.index(EOS) + 1], "stop"
    return replace(traced, output=tuple(output), finish_reason=reason)
