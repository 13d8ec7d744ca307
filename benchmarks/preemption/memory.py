"""W1: how much of the KV memory holds tokens, and how many requests a second that is worth. In virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pagetier.benchmarks.preemption.baselines import oracle, power_of_two, reserving, whole_length
from pagetier.benchmarks.preemption.virtual import BLOCK_SIZE, StepModel, VirtualEngine, chats, serve
from pagetier.benchmarks.report import Row
from pagetier.engine.config import EngineConfig
from pagetier.engine.tables import BlockTables

MAX_LEN = 2048
POOL_TOKENS = 8 * MAX_LEN  # eight sequences of whole length: 360 MiB of the default model
SLOWDOWN = 4.0  # the latency per token at which rates are compared, over that of a request alone
ALLOCATIONS: dict[str, Callable[..., BlockTables]] = {
    "paged": BlockTables,
    "contiguous_max": reserving(whole_length(MAX_LEN)),
    "contiguous_pow2": reserving(power_of_two),
    "contiguous_oracle": reserving(oracle),
}


def engine(model: StepModel, allocation: str) -> VirtualEngine:
    config = EngineConfig(
        num_blocks=POOL_TOKENS // BLOCK_SIZE,
        max_model_len=MAX_LEN,
        max_num_seqs=128,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        pipeline_depth=1,
    )
    return VirtualEngine(config, model, ALLOCATIONS[allocation])


def memory_rows(model: StepModel, num_requests: int, num_halvings: int, note: str) -> Iterator[Row]:
    for allocation in ALLOCATIONS:
        served = serve(engine(model, allocation), chats(num_requests, None, seed=1))
        target = ">= 0.96" if allocation == "paged" else None
        how = f"{served.most_running} at once at most; {note}"
        yield Row(f"w1_filled_share_{allocation}", served.filled_share, "ratio", target, note=how)
    bound_s = SLOWDOWN * alone_s(model)
    how = f"{1e3 * bound_s:.0f} ms a token on average, {num_requests} requests; {note}"
    rates = {}
    for name in ALLOCATIONS:
        rates[name] = rate_at(model, name, bound_s, num_requests, num_halvings)
        yield Row(f"w1_requests_per_s_{name}", rates[name], "1/s", note=how)
    for other in list(rates)[1:]:
        target = ">= 2" if other == "contiguous_max" else None
        yield Row(f"w1_rate_vs_{other}", rates["paged"] / rates[other], "ratio", target, note=how)


def alone_s(model: StepModel) -> float:
    """Seconds a token of requests that never meet."""
    return serve(engine(model, "paged"), chats(12, 0.01, seed=3)).mean_per_token_s


def rate_at(model: StepModel, allocation: str, bound_s: float, num_requests: int, num_halvings: int) -> float:
    """Requests a second at which the mean latency a token reaches the bound: doubled till it is passed, then halved."""

    def latency_s(rate: float) -> float:
        return serve(engine(model, allocation), chats(num_requests, rate, seed=2)).mean_per_token_s

    low, high = 0.0, 0.5
    while latency_s(high) < bound_s and high < 64:
        low, high = high, 2 * high
    for _ in range(num_halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if latency_s(middle) < bound_s else (low, middle)
    return low or high / 2
