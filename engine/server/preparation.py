"""From a checked request body to engine requests: template, tokens, limits, keys, seeds.

Runs on a small thread pool for long prompts, so that one 100K-token prompt does not hold up everybody's streams.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pagetier.engine.identity import salt_bytes
from pagetier.engine.messages import EngineRequest
from pagetier.engine.ranking import sequence_params
from pagetier.engine.sampling_params import SamplingParams
from pagetier.engine.server.cache_protocol import PrefixFields
from pagetier.engine.server.errors import ApiError
from pagetier.engine.server.protocol import ChatCompletionRequest, CompletionRequest
from pagetier.engine.server.wire import Ready
from pagetier.engine.tokenizer import Tokenizer
from pagetier.kvstore.errors import ConfigError, PagetierError
from pagetier.kvstore.keys import chain_names, hash_named, pack_tokens, root_key

INLINE_LENGTH = 4096  # characters or ids below which a hop to the pool costs more than the work (some 0.5 ms)
NUM_THREADS = 2
SEED_MASK = (1 << 64) - 1  # negative seeds are allowed


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One API request, ready for the engine. Sequence i is number i % k of prompt i // k, where k is
    `params.num_sequences`.

    echo_texts: one per prompt, put before the text of its choices; empty unless asked for.
    """

    request_id: str
    sequences: tuple[EngineRequest, ...]
    params: SamplingParams
    num_prompt_tokens: int
    echo_texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AskedPrefix:
    """A prompt that is asked about. tokens: u32 little-endian."""

    root: bytes
    tokens: bytes


class Preparer:
    """Knows the tokenizer and the engine's facts. Thread-safe; owner of its pool: event loop thread."""

    def __init__(self, tokenizer: Tokenizer, facts: Callable[[], Ready], seed: int | None = None) -> None:
        """facts: what the engine is now; its identity may change. seed: of the seeds drawn for requests that name none;
        None: from the system."""
        self._tokenizer, self._facts = tokenizer, facts
        self._hash = hash_named(facts().hash_name)
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="pagetier-tokenize")

    async def completion(self, body: CompletionRequest, request_id: str) -> PreparedRequest:
        if sum(map(len, body.prompts)) < INLINE_LENGTH:
            return self._completion(body, request_id)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._completion, body, request_id)

    async def chat(self, body: ChatCompletionRequest, request_id: str) -> PreparedRequest:
        if sum(len(str(message.content or "")) for message in body.messages) < INLINE_LENGTH:
            return self._chat(body, request_id)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._chat, body, request_id)

    async def prefix(self, body: PrefixFields) -> AskedPrefix:
        """The tokens and the root of a prompt that is asked about, as a request with it would have them."""
        length = len(body.prompt or "") + sum(len(str(message.content or "")) for message in body.messages or ())
        if length < INLINE_LENGTH:
            return self._prefix(body)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._prefix, body)

    def root(self, salt: str) -> bytes:
        """The root key of a tenant's chains. Raises ApiError."""
        return self._root(self._ready, salt)

    @property
    def _ready(self) -> Ready:
        return self._facts()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _completion(self, body: CompletionRequest, request_id: str) -> PreparedRequest:
        params = body.params()
        prompts = [
            self._encode(prompt, body.add_special_tokens) if isinstance(prompt, str) else self._checked_ids(prompt)
            for prompt in body.prompts
        ]
        echo: tuple[str, ...] = ()
        if body.echo:
            echo = tuple(
                prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt) for prompt in body.prompts
            )
        return self._prepared(body, request_id, prompts, params, "prompt", echo)

    def _chat(self, body: ChatCompletionRequest, request_id: str) -> PreparedRequest:
        return self._prepared(body, request_id, [self._chat_ids(body)], body.params(), "messages", ())

    def _chat_ids(self, body: ChatCompletionRequest) -> list[int]:
        messages = body.template_messages()
        try:
            text = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=body.add_generation_prompt, **(body.chat_template_kwargs or {})
            )
        except (PagetierError, TypeError) as error:  # TypeError: a keyword that the template takes as something else
            raise ApiError(400, f"messages: {error}", param="messages") from None
        return self._encode(text, body.add_special_tokens)

    def _prefix(self, body: PrefixFields) -> AskedPrefix:
        if body.messages is not None:
            chat = ChatCompletionRequest(
                messages=body.messages,
                add_generation_prompt=body.add_generation_prompt,
                chat_template_kwargs=body.chat_template_kwargs,
            )
            ids = self._chat_ids(chat)
        elif body.prompt is not None:
            ids = self._encode(body.prompt, body.add_special_tokens)
        else:
            ids = self._checked_ids(body.tokens or [])
        if not ids:
            raise ApiError(400, "prompt: no tokens; allowed: at least one", param="prompt")
        return AskedPrefix(self.root(body.cache_salt or ""), pack_tokens(ids))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ApiError(400, "prompt: contains half of a surrogate pair, which is no text", param="prompt") from None
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _checked_ids(self, ids: list[int]) -> list[int]:
        vocab_size = self._ready.vocab_size
        if min(ids) < 0 or max(ids) >= vocab_size:
            wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
            raise ApiError(400, f"prompt: got token id {wrong}; allowed: 0 to {vocab_size - 1}", param="prompt")
        return ids

    def _prepared(
        self,
        body: CompletionRequest | ChatCompletionRequest,
        request_id: str,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        field: str,
        echo: tuple[str, ...],
    ) -> PreparedRequest:
        named_ids = (("stop_token_ids", params.stop_token_ids), ("logit_bias", tuple(dict(params.logit_bias))))
        for name, token_ids in named_ids:
            for token_id in token_ids:
                if not 0 <= token_id < self._ready.vocab_size:
                    allowed = f"0 to {self._ready.vocab_size - 1}"
                    raise ApiError(400, f"{name}: got token id {token_id}; allowed: {allowed}", param=name)
        for ids in prompts:
            self._check_length(len(ids), params, field)
        salt, ready = body.cache_salt or "", self._ready
        root = self._root(ready, salt)
        seed = (params.seed if params.seed is not None else self._seeds.getrandbits(63)) & SEED_MASK
        now_s = time.monotonic()
        sequences, count = [], params.num_sequences
        for index, ids in enumerate(prompts):
            names = chain_names(root, ids, ready.block_size, hash_=self._hash)
            keys = b"".join(name.key for name in names)
            sequences += [
                EngineRequest(
                    request_id=f"{request_id}-{index * count + choice}",
                    prompt_ids=tuple(ids),
                    params=sequence_params(params),
                    seed=seed,
                    choice=choice,
                    eos_token_ids=self._ready.eos_token_ids,
                    cache_salt=salt,
                    keys=keys,
                    root=root,
                    priority=body.priority,
                    arrival_s=now_s,
                    tenant=body.user or "",
                    group=f"{request_id}/{index}" if count > 1 else "",
                )
                for choice in range(count)
            ]
        return PreparedRequest(request_id, tuple(sequences), params, sum(map(len, prompts)), echo)

    def _check_length(self, num_tokens: int, params: SamplingParams, field: str) -> None:
        limit, wanted = self._ready.max_len_tokens, params.max_tokens
        if num_tokens == 0:
            raise ApiError(400, f"{field}: no tokens; allowed: at least one", param=field)
        if num_tokens + (wanted or 1) <= limit:
            return
        asked = f"{num_tokens} prompt tokens" + (f" plus max_tokens {wanted}" if wanted else " plus at least one more")
        raise ApiError(
            400,
            f"This server's maximum length is {limit} tokens, but {asked} were asked for; "
            "shorten the prompt or lower max_tokens",
            param=field,
            code="context_length_exceeded",
        )

    def _root(self, ready: Ready, salt: str) -> bytes:
        try:
            return root_key(ready.domain, salt_bytes(salt), self._hash)
        except ConfigError as error:
            raise ApiError(400, str(error), param="cache_salt") from None
