"""What crosses between the API side and the engine core: requests down, tokens up. Plain data, msgpack-able."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from pagetier.engine.batch import TokenLogprobs
from pagetier.engine.sampling_params import SamplingParams

NONE_CACHED: Mapping[str, int] = MappingProxyType({})
TIERS_HANG = "the KV tiers hang"  # how an error begins that is theirs, and passes when they do


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to continue.

    keys: the 32-byte keys of the prompt's full blocks, concatenated, hashed by the API side below `root`, the root key
    of the engine's domain and `cache_salt`; the core hashes them itself when they are empty or the domain has changed
    since. choice: index among the n choices of one API request. eos_token_ids end it unless `params.ignore_eos`.
    priority: lower runs first, under `--scheduling-policy priority`. tenant: who asks, for `fair`. group: the same for
    all choices of one prompt, which share its blocks; empty for a request alone.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    choice: int = 0
    eos_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    keys: bytes = b""
    root: bytes = b""
    priority: int = 0
    arrival_s: float = 0.0
    tenant: str = ""
    group: str = ""


class TokenOutput(NamedTuple):
    """New tokens of one request after a step. A tuple: a step makes one a row, and a dataclass takes twice as long.

    finish_reason: None while running; stop, length, abort or error. stop_token_id: the id that ended it, if one did
    (it is the last of token_ids). cached_tokens: prompt tokens not computed, by the tier that served them, set on the
    first output and every later one. error: one line, with finish_reason error.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish_reason: str | None = None
    stop_token_id: int | None = None
    cached_tokens: Mapping[str, int] = NONE_CACHED
    error: str = ""
