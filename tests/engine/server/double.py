"""A small deterministic engine at the `Core` seam: it answers with its prompt, token by token, then ends.

So the expected text of every request is known, and unicode, stop strings and stop ids are chosen by the prompt. Its
tokenizer is a real byte-level one: every byte is a token, so every non-ASCII character is split over tokens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from pagetier.engine.batch import TokenLogprobs
from pagetier.engine.inspection import Report
from pagetier.engine.messages import TIERS_HANG, EngineRequest, TokenOutput
from pagetier.engine.server.engine_process import ServedEngine
from pagetier.engine.server.wire import Ready
from pagetier.engine.token_bytes import byte_alphabet
from pagetier.engine.tokenizer import Tokenizer, TokenizerFacts
from pagetier.kvstore.block import KEY_BYTES, KVGroup, Plane
from pagetier.kvstore.errors import ConfigError, PagetierError
from pagetier.kvstore.event_forms import KvEvent
from pagetier.kvstore.identity import CacheIdentity
from pagetier.kvstore.keys import pack_tokens
from pagetier.kvstore.residency import Residency

BLOCK_SIZE = 4
GROUP = KVGroup((0,), (Plane("k", "float32", (1, 4)), Plane("v", "float32", (1, 4))), None, 32)
IDENTITY = CacheIdentity("llama", (("rope_theta", 1e4),), (GROUP,), "layout", BLOCK_SIZE, "f" * 64)
DOMAIN = IDENTITY.domain()
EOS, START, END = "<eos>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}|{% endif %}{% endfor %}"
    "{% if messages[0]['role'] == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
)
CRASH = "CRASH"  # a prompt that kills the engine
FAIL = "FAIL"  # a prompt that ends with an error
HANG = "HANG"  # one for which a hung tier leaves no room


def build_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes in the alphabet's order; 256 to 258 the special tokens."""
    vocab = {char: index for index, char in enumerate(sorted(byte_alphabet(), key=byte_alphabet().__getitem__))}
    backend = Backend(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in (EOS, START, END)])
    facts = TokenizerFacts("double", (256,), {"eos_token": EOS, "bos_token": START}, {"default": TEMPLATE})
    return Tokenizer(backend, facts)


@dataclass
class _Running:
    request: EngineRequest
    script: list[int]
    cached_tokens: dict[str, int]
    num_output: int = 0


@dataclass
class DoubleCore:
    """Keeps `Core`. step_s: how long a step takes. tokens_per_output: how many tokens a step brings."""

    step_s: float = 0.0
    tokens_per_output: int = 1
    close_s: float = 0.0
    close_mark: str = ""
    running: dict[str, _Running] = field(default_factory=dict)
    seen: set[bytes] = field(default_factory=set)
    num_aborted: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    follows: bool = False
    events: list[KvEvent] = field(default_factory=list)

    def add_request(self, request: EngineRequest) -> None:
        keys = [request.keys[i : i + KEY_BYTES] for i in range(0, len(request.keys), KEY_BYTES)]
        num_hit = next((i for i, key in enumerate(keys) if key not in self.seen), len(keys))
        cached = min(num_hit * BLOCK_SIZE, len(request.prompt_ids) - 1)
        self.seen.update(keys)
        self.lookup_tokens += len(request.prompt_ids) - 1
        self.hit_tokens += cached
        turn = request.choice % len(request.prompt_ids)
        script = [*request.prompt_ids[turn:], *request.prompt_ids[:turn]]  # choice c starts at the c-th token
        self.running[request.request_id] = _Running(request, script, {"device": cached})

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self.running.pop(request_id, None) is not None:
                self.num_aborted += 1

    def has_work(self) -> bool:
        return bool(self.running)

    @property
    def waits_for_store(self) -> bool:
        return False

    def step(self) -> list[TokenOutput]:
        time.sleep(self.step_s)
        outputs = [self._advance(state) for state in list(self.running.values())]
        for output in outputs:
            if output.finish_reason is not None:
                if self.follows:
                    self.events.append(stored_event(self.running[output.request_id].request))
                del self.running[output.request_id]
        return outputs

    def _advance(self, state: _Running) -> TokenOutput:
        request = state.request
        text = bytes(i for i in request.prompt_ids if i < 256).decode(errors="replace")
        if text == CRASH:
            raise RuntimeError("the double was told to crash")
        if text == FAIL:
            return TokenOutput(request.request_id, (), finish_reason="error", error="the double was told to fail")
        if text == HANG:
            return TokenOutput(request.request_id, (), finish_reason="error", error=f"{TIERS_HANG}: restart")
        token_ids: list[int] = []
        reason, stop_token_id = None, None
        while reason is None and len(token_ids) < self.tokens_per_output:
            token_id = self._next(state)
            token_ids.append(token_id)
            state.num_output += 1
            reason, stop_token_id = self._end(state, token_id)
        logprobs = tuple(map(score, token_ids)) if request.params.logprobs is not None else ()
        return TokenOutput(
            request.request_id, tuple(token_ids), logprobs, reason, stop_token_id, dict(state.cached_tokens)
        )

    def _next(self, state: _Running) -> int:
        ends = not state.request.params.ignore_eos and state.num_output >= state.request.params.min_tokens
        if ends and state.num_output >= len(state.script):
            return state.request.eos_token_ids[0]
        return state.script[state.num_output % len(state.script)]

    def _end(self, state: _Running, token_id: int) -> tuple[str | None, int | None]:
        params = state.request.params
        if state.num_output >= params.min_tokens:
            if token_id in params.stop_token_ids:
                return "stop", token_id
            if token_id in state.request.eos_token_ids and not params.ignore_eos:
                return "stop", token_id
        return ("length" if state.num_output == params.max_tokens else None), None

    def set_weights_version(self, version: str) -> bytes:
        self.seen.clear()
        return replace(IDENTITY, weights_version=version).encode()

    def ask(self, verb: str, fields: Mapping[str, Any], report: Report) -> None:
        """It has no cache to speak of: what was asked is remembered, the answers are empty."""
        self.asked.append((verb, dict(fields)))
        answers: dict[str, dict[str, Any]] = {
            "query": {"num_tokens": len(fields.get("tokens", b"")) // 4, "hit_tokens": 0, "blocks": []},
            "query_keys": {"num_tokens": 0, "hit_tokens": 0, "blocks": []},
            "top": {"prefixes": []},
            "doctor": {"tiers": {}, "prefill_s": [], "block_size": BLOCK_SIZE, "block_bytes": 64},
            "purge": {"removed": {"device": 0}, "errors": {}},
        }
        if fields.get("tiers") == ["nowhere"]:
            report({}, ConfigError.unknown_name("tier", "nowhere", ["device"]))
        elif fields.get("tiers") == ["broken"]:
            report({}, PagetierError("the tier broke"))
        else:
            report(answers.get(verb, {"pins": []}), None)

    def follow_events(self, wanted: bool) -> None:
        self.follows = wanted

    def take_events(self) -> tuple[list[tuple[Any, ...]], int]:
        """One event for each request that ended since, while somebody follows."""
        events, self.events = self.events, []
        return [tuple(event) for event in events], 0

    def stats(self) -> dict[str, Any]:
        rate = self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0
        tier = dict.fromkeys(("blocks", "bytes", "capacity_bytes", "evictions", "errors", "corrupt"), 0)
        tier |= {"quarantined": 0, "scrubbed_bytes": 0, "read_bytes": 0, "written_bytes": 0}
        device = {"hit_blocks": self.hit_tokens // BLOCK_SIZE, "hit_tokens": self.hit_tokens, "hit_rate": rate}
        nvme = {"hit_blocks": 0, "hit_tokens": 0, "hit_rate": 0.0}
        return {
            "lookup": {"lookup_tokens": self.lookup_tokens, "hit_tokens": self.hit_tokens, "hit_rate": rate},
            "tiers": {
                "device": device | tier | {"breaker": None, "referenced_blocks": 3, "capacity_blocks": 12},
                "nvme": nvme | tier | {"breaker": "closed", "residency": Residency().as_dict()},
            },
            "preemptions": {"recompute": 0, "swap": 0},
            "resumptions": {"recomputed_tokens": 0, "swapped_out_bytes": 0, "swapped_in_bytes": 0},
            "waiting": dict.fromkeys(("turn", "leader", "lookup", "load", "swapped", "preempted"), 0),
            "harmful_hits": 0,
            "given_up_loads": 0,
            "verify": {"shadow_one_in": 0, "checked": 0, "differing": 0, "skipped": 0},
            "block_size": BLOCK_SIZE,
            "residency": Residency().as_dict(),
            "requests": {"running": len(self.running), "waiting": 0, "loading": 0, "aborted": self.num_aborted},
        }

    def timelines(self, name: str) -> list[dict[str, Any]]:
        return [{"request_id": key, "events": []} for key in self.running if key.rpartition("-")[0] == name]

    def close(self, timeout_s: float) -> None:
        time.sleep(min(self.close_s, timeout_s))
        if self.close_mark:
            with open(self.close_mark, "w") as file:
                file.write(f"{timeout_s:.3f}")


def stored_event(request: EngineRequest) -> KvEvent:
    """The event of a request's full blocks."""
    num_tokens = len(request.keys) // KEY_BYTES * BLOCK_SIZE
    tokens = pack_tokens(request.prompt_ids[:num_tokens])
    return KvEvent(time.time(), "stored", "device", request.keys, b"", 0, tokens, BLOCK_SIZE)


def score(token_id: int) -> TokenLogprobs:
    """What the double reports for a token: itself first, its neighbour second."""
    return TokenLogprobs(-token_id / 256, 1, ((token_id, -token_id / 256), ((token_id + 1) % 256, -5.0)))


def build(config: Mapping[str, Any]) -> ServedEngine:
    """The factory an `EngineOrder` names. `limits` go to Ready, `fail` is how it fails, the rest goes to DoubleCore."""
    fields = dict(config)
    match fields.pop("fail", None):
        case "usage":
            raise ConfigError("--kv-tier: got 'x'; allowed: nvme, redis")
        case "bug":
            raise RuntimeError("unexpected")
        case "death":
            os._exit(7)
    limits: dict[str, Any] = {"max_len_tokens": 64, "max_num_seqs": 4}
    limits |= {"max_num_queued_reqs": 4, "max_num_queued_tokens": 1000, **fields.pop("limits", {})}
    core = DoubleCore(**fields)
    ready = Ready(
        identity=IDENTITY.encode(),
        block_size=BLOCK_SIZE,
        hash_name="sha256",
        vocab_size=259,
        eos_token_ids=(256,),
        tiers=("device", "nvme"),
        **limits,
    )
    return ServedEngine(core, ready, core.close, core.set_weights_version)
