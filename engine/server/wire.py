"""What the API process and the engine process say to each other: one msgpack array [version, kind, body] per message.

Owns the encoding and its limits; knows no socket. No pickle: everything that arrives is checked field by field, and
what does not fit is a ProtocolError, which both ends answer by dropping the message.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from pagetier.engine.batch import TokenLogprobs
from pagetier.engine.messages import EngineRequest, TokenOutput
from pagetier.engine.sampling_params import SamplingParams
from pagetier.kvstore.block import KEY_BYTES
from pagetier.kvstore.errors import PagetierError, ProtocolError
from pagetier.kvstore.identity import domain_of
from pagetier.kvstore.keys import pack_tokens, unpack_tokens

VERSION = 5
MAX_MESSAGE_BYTES = 64 << 20  # one sequence a message: a million-token prompt with its keys is 6 MB
MAX_ITEMS = 1 << 20  # entries of one msgpack array or map
MAX_TEXT_BYTES = 1 << 16  # ids, salts, error lines


@dataclass(frozen=True, slots=True)
class Submit:
    """Start one sequence."""

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """End sequences; unknown ids are ignored."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StatsQuery:
    """Ask for the core's counters; `ticket` comes back with them."""

    ticket: int


@dataclass(frozen=True, slots=True)
class TimelineQuery:
    """Ask what happened to a request, by its own name or that of its API request; a StatsAnswer whose `sequences` tell
    comes back with the ticket."""

    ticket: int
    request_id: str


@dataclass(frozen=True, slots=True)
class SetWeightsVersion:
    """The weights were changed in place: KV of before must not be used. `ticket` comes back with the answer."""

    ticket: int
    version: str


@dataclass(frozen=True, slots=True)
class Question:
    """Somebody asks what is cached, or changes what is (engine/inspection.py has the verbs and their fields). `ticket`
    comes back with the answer."""

    ticket: int
    verb: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """To a Question: what was asked for; or why not, and whether the question itself was wrong."""

    ticket: int
    fields: dict[str, Any]
    error: str = ""
    usage: bool = False


@dataclass(frozen=True, slots=True)
class Follow:
    """Send what comes into tiers and leaves them from now on, or no longer."""

    wanted: bool


@dataclass(frozen=True, slots=True)
class Events:
    """What came and went, in order (engine/kv_events.py has the form of each). num_lost: events before these that
    nobody will be told of, because they came too fast."""

    events: tuple[tuple[Any, ...], ...]
    num_lost: int = 0


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End what runs, write queued puts, leave: all within `timeout_s` seconds from receipt."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine serves. What the API process must know of it to hash, check and count.

    identity: the encoded cache identity. max_len_tokens: longest prompt + output that can ever run. tiers: those
    configured, device first. tiers_down: those of them that cannot be used at the start.
    """

    identity: bytes
    block_size: int
    hash_name: str
    max_len_tokens: int
    vocab_size: int
    max_num_seqs: int
    max_num_queued_reqs: int
    max_num_queued_tokens: int
    eos_token_ids: tuple[int, ...]
    tiers: tuple[str, ...]
    tiers_down: tuple[str, ...] = ()

    @property
    def domain(self) -> bytes:
        """The 32 bytes that the identity hashes to."""
        return domain_of(self.identity)


@dataclass(frozen=True, slots=True)
class IdentityChanged:
    """The answer to SetWeightsVersion: keys are hashed under this encoded identity from now on."""

    ticket: int
    identity: bytes


@dataclass(frozen=True, slots=True)
class Tokens:
    """What one step brought."""

    outputs: tuple[TokenOutput, ...]


@dataclass(frozen=True, slots=True)
class StatsAnswer:
    """The core's counters, in the shape of GET /stats without model, domain and uptime; or the answer to another
    query."""

    ticket: int
    stats: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine cannot go on. `usage`: because of what the user asked for, not because of a fault."""

    error: str
    usage: bool


Message = (
    Submit
    | Abort
    | StatsQuery
    | Question
    | Answer
    | Follow
    | Events
    | TimelineQuery
    | SetWeightsVersion
    | Shutdown
    | Ready
    | IdentityChanged
    | Tokens
    | StatsAnswer
    | Failed
)

_PARAM_FIELDS = tuple(f.name for f in dataclasses.fields(SamplingParams))


def encode(message: Message) -> bytes:
    """The message's bytes. Raises ProtocolError when they exceed the limit."""
    body = _BODIES[type(message)](message)
    data: bytes = msgpack.packb([VERSION, type(message).__name__, body], use_bin_type=True)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"engine message of {len(data)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    return data


def decode(data: bytes) -> Message:
    """The inverse of `encode`; ProtocolError for anything it could not have made."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"engine message of {len(data)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    try:
        unpacked = msgpack.unpackb(
            data, raw=False, strict_map_key=False, max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS, max_ext_len=0
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"engine message is not msgpack: {error}") from None
    if not isinstance(unpacked, list) or len(unpacked) != 3:
        raise ProtocolError("engine message is not [version, kind, body]")
    version, kind, body = unpacked
    if version != VERSION:
        raise ProtocolError(f"engine message of version {version!r}; this process speaks {VERSION}")
    if not isinstance(kind, str) or kind not in _PARSERS:
        raise ProtocolError(f"engine message of unknown kind {kind!r}")
    if not isinstance(body, list):
        raise ProtocolError(f"{kind}: body is not an array")
    try:
        return _PARSERS[kind](_Fields(kind, body))
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"{kind}: {error}") from None
    except ProtocolError:
        raise
    except PagetierError as error:  # SamplingParams refuses its values
        raise ProtocolError(f"{kind}: {error}") from None


class _Fields:
    """Takes the items of a body one by one, each with its expected type."""

    def __init__(self, kind: str, items: Sequence[Any]) -> None:
        self._kind, self._items, self._at = kind, items, 0

    def _take(self, *types: type) -> Any:
        if self._at >= len(self._items):
            raise ProtocolError(f"{self._kind}: too few fields")
        item = self._items[self._at]
        if not isinstance(item, types) or (isinstance(item, bool) and bool not in types):
            raise ProtocolError(f"{self._kind}: field {self._at} is {type(item).__name__}")
        self._at += 1
        return item

    def end(self) -> None:
        if self._at != len(self._items):
            raise ProtocolError(f"{self._kind}: too many fields")

    def text(self) -> str:
        value: str = self._take(str)
        if len(value) > MAX_TEXT_BYTES:
            raise ProtocolError(f"{self._kind}: text of {len(value)} characters")
        return value

    def data(self) -> bytes:
        value: bytes = self._take(bytes)
        return value

    def number(self) -> int:
        value: int = self._take(int)
        return value

    def real(self) -> float:
        return float(self._take(float, int))

    def flag(self) -> bool:
        value: bool = self._take(bool)
        return value

    def array(self) -> list[Any]:
        value: list[Any] = self._take(list)
        return value

    def mapping(self) -> dict[Any, Any]:
        value: dict[Any, Any] = self._take(dict)
        return value

    def optional_text(self) -> str | None:
        value: str | None = self._take(str, type(None))
        return value

    def optional_number(self) -> int | None:
        value: int | None = self._take(int, type(None))
        return value


def _all(kind: type, values: Sequence[Any], what: str) -> tuple[Any, ...]:
    if not all(type(value) is kind for value in values):
        raise ProtocolError(f"{what}: expected only {kind.__name__}")
    return tuple(values)


def _params_body(params: SamplingParams) -> list[Any]:
    return [getattr(params, name) for name in _PARAM_FIELDS]


def _parse_params(items: list[Any]) -> SamplingParams:
    if len(items) != len(_PARAM_FIELDS):
        raise ProtocolError(f"SamplingParams: {len(items)} fields, expected {len(_PARAM_FIELDS)}")
    values = dict(zip(_PARAM_FIELDS, items, strict=True))
    for name, value in values.items():
        _check_param(name, value)
    values["stop"] = _all(str, values["stop"], "stop")
    values["stop_token_ids"] = _all(int, values["stop_token_ids"], "stop_token_ids")
    values["logit_bias"] = tuple((int(token_id), float(bias)) for token_id, bias in values["logit_bias"])
    return SamplingParams(**values)


_REAL_PARAMS = frozenset(
    ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
)
_OPTIONAL_PARAMS = frozenset(("seed", "max_tokens", "logprobs", "best_of"))
_LIST_PARAMS = frozenset(("stop", "stop_token_ids", "logit_bias"))


def _check_param(name: str, value: Any) -> None:
    if name in _REAL_PARAMS:
        ok = isinstance(value, float | int) and not isinstance(value, bool)
    elif name in _LIST_PARAMS:
        ok = isinstance(value, list)
    elif name == "ignore_eos":
        ok = isinstance(value, bool)
    else:
        ok = (value is None and name in _OPTIONAL_PARAMS) or type(value) is int
    if not ok:
        raise ProtocolError(f"SamplingParams: {name} is {type(value).__name__}")


def _submit_body(message: Submit) -> list[Any]:
    r = message.request
    return [
        r.request_id,
        pack_tokens(r.prompt_ids),
        _params_body(r.params),
        r.seed,
        r.choice,
        list(r.eos_token_ids),
        r.cache_salt,
        r.keys,
        r.root,
        r.priority,
        r.arrival_s,
        r.tenant,
        r.group,
    ]


def _parse_submit(fields: _Fields) -> Submit:
    request_id, prompt = fields.text(), fields.data()
    params = _parse_params(fields.array())
    seed, choice = fields.number(), fields.number()
    eos_token_ids = _all(int, fields.array(), "eos_token_ids")
    salt, keys, root, priority, arrival_s = fields.text(), fields.data(), fields.data(), fields.number(), fields.real()
    tenant, group = fields.text(), fields.text()
    fields.end()
    if len(prompt) % 4 or not prompt:
        raise ProtocolError(f"Submit: prompt of {len(prompt)} bytes is not a non-empty array of u32")
    if len(keys) % KEY_BYTES:
        raise ProtocolError(f"Submit: keys of {len(keys)} bytes are not a multiple of {KEY_BYTES}")
    return Submit(
        EngineRequest(
            request_id=request_id,
            prompt_ids=tuple(unpack_tokens(prompt).tolist()),
            params=params,
            seed=seed,
            choice=choice,
            eos_token_ids=eos_token_ids,
            cache_salt=salt,
            keys=keys,
            root=root,
            priority=priority,
            arrival_s=arrival_s,
            tenant=tenant,
            group=group,
        )
    )


def _logprobs_body(value: TokenLogprobs | None) -> list[Any] | None:
    return None if value is None else [value.logprob, value.rank, [list(pair) for pair in value.top]]


def _parse_logprobs(value: Any) -> TokenLogprobs | None:
    if value is None:
        return None
    logprob, rank, top = value
    return TokenLogprobs(float(logprob), int(rank), tuple((int(token_id), float(lp)) for token_id, lp in top))


def _output_body(o: TokenOutput) -> list[Any]:
    return [
        o.request_id,
        list(o.token_ids),
        [_logprobs_body(value) for value in o.logprobs],
        o.finish_reason,
        o.stop_token_id,
        dict(o.cached_tokens),
        o.error[:MAX_TEXT_BYTES],
    ]


def _parse_output(items: Any) -> TokenOutput:
    if not isinstance(items, list):
        raise ProtocolError("Tokens: an output is not an array")
    fields = _Fields("TokenOutput", items)
    output = TokenOutput(
        request_id=fields.text(),
        token_ids=_all(int, fields.array(), "token_ids"),
        logprobs=tuple(_parse_logprobs(value) for value in fields.array()),
        finish_reason=fields.optional_text(),
        stop_token_id=fields.optional_number(),
        cached_tokens={str(tier): int(count) for tier, count in fields.mapping().items()},
        error=fields.text(),
    )
    fields.end()
    return output


def _parse_tokens(fields: _Fields) -> Tokens:
    outputs = tuple(_parse_output(item) for item in fields.array())
    fields.end()
    return Tokens(outputs)


def _parse_abort(fields: _Fields) -> Abort:
    request_ids = _all(str, fields.array(), "request_ids")
    fields.end()
    return Abort(request_ids)


def _parse_stats_query(fields: _Fields) -> StatsQuery:
    ticket = fields.number()
    fields.end()
    return StatsQuery(ticket)


def _parse_timeline_query(fields: _Fields) -> TimelineQuery:
    ticket, request_id = fields.number(), fields.text()
    fields.end()
    return TimelineQuery(ticket, request_id)


def _parse_set_weights_version(fields: _Fields) -> SetWeightsVersion:
    ticket, version = fields.number(), fields.text()
    fields.end()
    return SetWeightsVersion(ticket, version)


def _parse_identity_changed(fields: _Fields) -> IdentityChanged:
    ticket, identity = fields.number(), fields.data()
    fields.end()
    return IdentityChanged(ticket, identity)


def _parse_shutdown(fields: _Fields) -> Shutdown:
    timeout_s = fields.real()
    fields.end()
    return Shutdown(timeout_s)


def _ready_body(m: Ready) -> list[Any]:
    return [
        m.identity,
        m.block_size,
        m.hash_name,
        m.max_len_tokens,
        m.vocab_size,
        m.max_num_seqs,
        m.max_num_queued_reqs,
        m.max_num_queued_tokens,
        list(m.eos_token_ids),
        list(m.tiers),
        list(m.tiers_down),
    ]


def _parse_ready(fields: _Fields) -> Ready:
    ready = Ready(
        identity=fields.data(),
        block_size=fields.number(),
        hash_name=fields.text(),
        max_len_tokens=fields.number(),
        vocab_size=fields.number(),
        max_num_seqs=fields.number(),
        max_num_queued_reqs=fields.number(),
        max_num_queued_tokens=fields.number(),
        eos_token_ids=_all(int, fields.array(), "eos_token_ids"),
        tiers=_all(str, fields.array(), "tiers"),
        tiers_down=_all(str, fields.array(), "tiers_down"),
    )
    fields.end()
    return ready


def _parse_stats_answer(fields: _Fields) -> StatsAnswer:
    ticket, stats = fields.number(), fields.mapping()
    fields.end()
    return StatsAnswer(ticket, stats)


def _parse_question(fields: _Fields) -> Question:
    ticket, verb, asked = fields.number(), fields.text(), fields.mapping()
    fields.end()
    return Question(ticket, verb, asked)


def _parse_answer(fields: _Fields) -> Answer:
    ticket, answered, error, usage = fields.number(), fields.mapping(), fields.text(), fields.flag()
    fields.end()
    return Answer(ticket, answered, error, usage)


def _parse_follow(fields: _Fields) -> Follow:
    wanted = fields.flag()
    fields.end()
    return Follow(wanted)


def _parse_events(fields: _Fields) -> Events:
    events, num_lost = _all(list, fields.array(), "events"), fields.number()
    fields.end()
    return Events(tuple(map(tuple, events)), num_lost)


def _parse_failed(fields: _Fields) -> Failed:
    error, usage = fields.text(), fields.flag()
    fields.end()
    return Failed(error, usage)


_BODIES: Mapping[type, Callable[[Any], list[Any]]] = {
    Submit: _submit_body,
    Abort: lambda m: [list(m.request_ids)],
    StatsQuery: lambda m: [m.ticket],
    TimelineQuery: lambda m: [m.ticket, m.request_id],
    SetWeightsVersion: lambda m: [m.ticket, m.version],
    IdentityChanged: lambda m: [m.ticket, m.identity],
    Question: lambda m: [m.ticket, m.verb, m.fields],
    Answer: lambda m: [m.ticket, m.fields, m.error[:MAX_TEXT_BYTES], m.usage],
    Follow: lambda m: [m.wanted],
    Events: lambda m: [[list(event) for event in m.events], m.num_lost],
    Shutdown: lambda m: [m.timeout_s],
    Ready: _ready_body,
    Tokens: lambda m: [[_output_body(o) for o in m.outputs]],
    StatsAnswer: lambda m: [m.ticket, m.stats],
    Failed: lambda m: [m.error[:MAX_TEXT_BYTES], m.usage],
}
_PARSERS: Mapping[str, Callable[[_Fields], Message]] = {
    "Submit": _parse_submit,
    "Abort": _parse_abort,
    "StatsQuery": _parse_stats_query,
    "TimelineQuery": _parse_timeline_query,
    "SetWeightsVersion": _parse_set_weights_version,
    "IdentityChanged": _parse_identity_changed,
    "Question": _parse_question,
    "Answer": _parse_answer,
    "Follow": _parse_follow,
    "Events": _parse_events,
    "Shutdown": _parse_shutdown,
    "Ready": _parse_ready,
    "Tokens": _parse_tokens,
    "StatsAnswer": _parse_stats_answer,
    "Failed": _parse_failed,
}
