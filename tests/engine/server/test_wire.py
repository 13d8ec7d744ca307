"""The link's messages survive the trip, and nothing else gets through."""

from __future__ import annotations

import random

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetier.engine.batch import TokenLogprobs
from pagetier.engine.messages import EngineRequest, TokenOutput
from pagetier.engine.sampling_params import SamplingParams
from pagetier.engine.server import wire
from pagetier.kvstore.errors import ProtocolError

REQUEST = EngineRequest(
    request_id="cmpl-1-0",
    prompt_ids=(1, 2, 3, 4_000_000_000),
    params=SamplingParams(
        temperature=0.5,
        top_k=3,
        seed=-7,
        max_tokens=None,
        best_of=4,
        stop=("a", "é"),
        stop_token_ids=(5,),
        ignore_eos=True,
        logprobs=2,
        logit_bias=((3, -1.5),),
    ),
    seed=(1 << 64) - 1,
    choice=2,
    eos_token_ids=(0, 9),
    cache_salt="tenant",
    keys=bytes(64),
    root=bytes(32),
    priority=-3,
    arrival_s=12.5,
    tenant="me",
    group="cmpl-1/0",
)
OUTPUT = TokenOutput(
    request_id="cmpl-1-0",
    token_ids=(7, 8),
    logprobs=(TokenLogprobs(-0.5, 1, ((7, -0.5), (9, -1.0))), None),
    finish_reason="stop",
    stop_token_id=8,
    cached_tokens={"device": 16, "nvme": 32},
    error="",
)
READY = wire.Ready(
    b"encoded identity", 16, "sha256", 8192, 49152, 64, 1024, 1 << 20, (0, 2), ("device", "nvme"), ("nvme",)
)
MESSAGES: tuple[wire.Message, ...] = (
    wire.Submit(REQUEST),
    wire.Abort(("a", "b")),
    wire.StatsQuery(3),
    wire.TimelineQuery(5, "cmpl-1"),
    wire.SetWeightsVersion(4, "v2"),
    wire.IdentityChanged(4, b"encoded identity"),
    wire.Shutdown(2.5),
    READY,
    wire.Tokens((OUTPUT, TokenOutput("x", (), finish_reason="error", error="no room"))),
    wire.StatsAnswer(3, {"tiers": {"device": {"hit_rate": 0.5, "breaker": None}}}),
    wire.Failed("cannot load", True),
    wire.Question(5, "query", {"keys": [b"k" * 32], "root": None}),
    wire.Answer(5, {"blocks": [{"tiers": ["device"], "age_s": 0.5}]}),
    wire.Answer(6, {}, "--ttl: got 0; allowed: more", True),
    wire.Follow(True),
    wire.Events(((1.5, "stored", "device", b"k" * 32, b"p" * 32, 0, b"tttt", 16),), 2),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_message_survives_the_trip(message: wire.Message) -> None:
    assert wire.decode(wire.encode(message)) == message


def test_every_kind_of_message_is_tried() -> None:
    assert {type(m) for m in MESSAGES} == set(wire.Message.__args__)


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused_and_nothing_else_is_raised(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.decode(data)


@given(
    st.sampled_from(MESSAGES),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
    st.integers(0, 20),
)
def test_a_message_with_one_strange_field_is_refused_or_decodes(message: wire.Message, junk: object, at: int) -> None:
    version, kind, body = msgpack.unpackb(wire.encode(message), strict_map_key=False)
    body[at % len(body)] = junk
    try:
        wire.decode(msgpack.packb([version, kind, body]))
    except ProtocolError:
        pass


@pytest.mark.parametrize("cut", [0, 1, 10, 40])
def test_truncated_messages_are_refused(cut: int) -> None:
    with pytest.raises(ProtocolError):
        wire.decode(wire.encode(MESSAGES[0])[:cut])


def test_other_versions_are_refused_by_number() -> None:
    version, kind, body = msgpack.unpackb(wire.encode(MESSAGES[1]))
    with pytest.raises(ProtocolError, match=f"version {version + 1}; this process speaks {version}"):
        wire.decode(msgpack.packb([version + 1, kind, body]))


@pytest.mark.parametrize("change", [[], ["more"]])
def test_field_counts_are_exact(change: list[str]) -> None:
    version, kind, body = msgpack.unpackb(wire.encode(MESSAGES[0]))
    with pytest.raises(ProtocolError, match="fields"):
        wire.decode(msgpack.packb([version, kind, (body[:-1] if not change else body + change)]))


def test_sampling_values_are_checked_again_on_arrival() -> None:
    version, kind, body = msgpack.unpackb(wire.encode(MESSAGES[0]))
    body[2][0] = -1.0  # temperature
    with pytest.raises(ProtocolError, match="temperature: got -1.0; allowed: 0 to 100"):
        wire.decode(msgpack.packb([version, kind, body]))


def test_oversized_messages_are_refused_on_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    data = wire.encode(MESSAGES[0])
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", len(data) - 1)
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        wire.encode(MESSAGES[0])
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        wire.decode(data)


def test_a_long_prompt_stays_small_on_the_wire() -> None:
    request = EngineRequest("r", tuple(range(100_000)), SamplingParams(), seed=0)
    assert len(wire.encode(wire.Submit(request))) < 401_000


def test_mutated_messages_are_refused_or_harmless() -> None:
    """100,000 of them, made from sound ones: each decodes to a message or is refused in the protocol's own words."""
    rng = random.Random(7)
    sound = [wire.encode(message) for message in MESSAGES]
    num_refused = 0
    for _ in range(100_000):
        data = bytearray(rng.choice(sound))
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(len(data)) if data else 0
            match rng.randrange(5):
                case 0:
                    data[at : at + 1] = bytes([rng.randrange(256)])
                case 1:
                    del data[at : at + rng.randrange(1, 9)]
                case 2:
                    data[at:at] = rng.randbytes(rng.randrange(1, 9))
                case 3:
                    data[at:at] = rng.choice(
                        (b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff")
                    )
                case 4:
                    del data[at:]
        try:
            wire.decode(bytes(data))
        except ProtocolError:
            num_refused += 1
    assert num_refused > 50_000
