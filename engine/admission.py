"""Why a request can never run, however long it waits."""

from __future__ import annotations

from pagetier.engine.config import EngineConfig
from pagetier.engine.messages import EngineRequest
from pagetier.engine.request import Request


def refusal(spec: EngineRequest, config: EngineConfig) -> str:
    """One line with the numbers, or "" for a request that can run."""
    num_prompt, limit = len(spec.prompt_ids), config.max_model_len
    room = config.num_blocks * config.block_size
    if num_prompt == 0:
        return "the prompt is empty; give at least one token"
    if config.vocab_size is not None and (min(spec.prompt_ids) < 0 or max(spec.prompt_ids) >= config.vocab_size):
        wrong = next(token for token in spec.prompt_ids if not 0 <= token < config.vocab_size)
        return f"the prompt has token id {wrong}; allowed: 0 to {config.vocab_size - 1}"
    if num_prompt >= limit:
        return f"the prompt has {num_prompt} tokens, but prompt and output together may have {limit}"
    if num_prompt > room:
        return f"the prompt has {num_prompt} tokens, but the KV cache holds {room}; raise --kv-cache-memory"
    return ""


def has_outgrown(request: Request, config: EngineConfig) -> bool:
    """Whether even alone it could not run any more: it was preempted with the last token that it had room for."""
    return request.num_tokens > config.num_blocks * config.block_size
