"""The identity's bytes are fixed, canonical and complete: whatever KV depends on changes the domain."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetier.kvstore.block import KVGroup, Plane
from pagetier.kvstore.errors import ConfigError, ProtocolError
from pagetier.kvstore.identity import PREFIX, CacheIdentity, Scalar, diff, domain_of

GROUP = KVGroup((0, 1), (Plane("k", "bfloat16", (3, 64)), Plane("v", "bfloat16", (3, 64))), None, 1536)
IDENTITY = CacheIdentity(
    architecture="llama",
    attention=(("rope_theta", 100000.0), ("num_heads", 9), ("window", None), ("rope_kind", "default"), ("bias", False)),
    groups=(GROUP,),
    layout="layer_kv_head_token_dim",
    block_size=16,
    weights_fingerprint="ab" * 32,
    weights_version="v1",
    numerics=(("weight_path", "bf16"), ("isa", "avx512")),
    kv_format="none",
    lora_digest="",
)


def field(name: str, tag: bytes, body: bytes) -> bytes:
    return text(name) + tag + len(body).to_bytes(4, "little") + body


def text(value: str) -> bytes:
    return b"s" + len(value).to_bytes(4, "little") + value.encode()


def test_golden_bytes() -> None:
    def integer(value: int) -> bytes:
        return b"i" + len(str(value)).to_bytes(4, "little") + str(value).encode()

    def listed(*values: bytes) -> bytes:
        return b"l" + len(b"".join(values)).to_bytes(4, "little") + b"".join(values)

    def mapped(*fields: bytes) -> bytes:
        return b"m" + len(b"".join(fields)).to_bytes(4, "little") + b"".join(fields)

    def plane(name: str) -> bytes:
        shape = listed(integer(3), integer(64))
        return mapped(field("dtype", b"s", b"bfloat16"), field("name", b"s", name.encode()), text("shape") + shape)

    attention = mapped(
        field("bias", b"b", b"\0"),
        field("num_heads", b"i", b"9"),
        field("rope_kind", b"s", b"default"),
        field("rope_theta", b"f", bytes.fromhex("00000000006af840")),
        field("window", b"n", b""),
    )
    group = mapped(
        text("layers") + listed(integer(0), integer(1)),
        text("nbytes_per_token") + integer(1536),
        text("planes") + listed(plane("k"), plane("v")),
        field("window", b"n", b""),
    )
    expected = PREFIX + mapped(
        text("architecture") + text("llama"),
        text("attention") + attention,
        text("block_size") + integer(16),
        text("format_version") + integer(1),
        text("groups") + listed(group),
        text("hash_name") + text("sha256"),
        text("kv_format") + text("none"),
        text("layout") + text("layer_kv_head_token_dim"),
        text("lora_digest") + text(""),
        text("numerics") + mapped(field("isa", b"s", b"avx512"), field("weight_path", b"s", b"bf16")),
        text("weights_fingerprint") + text("ab" * 32),
        text("weights_version") + text("v1"),
    )
    assert PREFIX == b"PGTID01\n"
    assert IDENTITY.encode() == expected
    assert IDENTITY.domain() == domain_of(expected) == hashlib.sha256(b"pgt1-domain" + expected).digest()
    assert IDENTITY.domain().hex() == "75d6e8dcdd8165692e3f6f61d4a341fcd7dc7ed813fa53921fb56903f759573d"


OTHER: dict[str, Any] = {
    "architecture": "qwen3",
    "attention": (*[pair for pair in IDENTITY.attention if pair[0] != "rope_theta"], ("rope_theta", 10000.0)),
    "groups": (dataclasses.replace(GROUP, layers=(0, 2)),),
    "layout": "token_layer",
    "block_size": 32,
    "weights_fingerprint": "ac" * 32,
    "weights_version": "v2",
    "numerics": (("weight_path", "int4"), ("isa", "avx512")),
    "kv_format": "int8",
    "lora_digest": "cd" * 32,
    "hash_name": "xxh3-128",
    "format_version": 2,
}


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(CacheIdentity)])
def test_every_field_changes_the_domain_and_diff_names_it(name: str) -> None:
    changed = dataclasses.replace(IDENTITY, **{name: OTHER[name]})
    assert changed.domain() != IDENTITY.domain()
    fields = [difference.field for difference in diff(IDENTITY, changed)]
    assert fields and all(field.startswith(name) for field in fields)
    assert CacheIdentity.decode(changed.encode()) == changed


OTHER_GROUP: dict[str, Any] = {
    "layers": (0, 2),
    "planes": GROUP.planes[::-1],
    "window": 4096,
    "nbytes_per_token": 1537,
}
OTHER_PLANE: dict[str, Any] = {"name": "q", "dtype": "float16", "shape": (1, 192)}


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(KVGroup)])
def test_every_field_of_a_group_changes_the_domain(name: str) -> None:
    group = dataclasses.replace(GROUP, **{name: OTHER_GROUP[name]})
    changed = dataclasses.replace(IDENTITY, groups=(group,))
    assert changed.domain() != IDENTITY.domain() and CacheIdentity.decode(changed.encode()) == changed
    fields = [difference.field for difference in diff(IDENTITY, changed)]
    assert fields and all(field.startswith(f"groups[0].{name}") for field in fields)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Plane)])
def test_every_field_of_a_plane_changes_the_domain(name: str) -> None:
    planes = (GROUP.planes[0], dataclasses.replace(GROUP.planes[1], **{name: OTHER_PLANE[name]}))
    changed = dataclasses.replace(IDENTITY, groups=(dataclasses.replace(GROUP, planes=planes),))
    assert changed.domain() != IDENTITY.domain() and CacheIdentity.decode(changed.encode()) == changed
    assert [difference.field for difference in diff(IDENTITY, changed)] == [f"groups[0].planes[1].{name}"]


@pytest.mark.parametrize("name", [name for name, _ in (*IDENTITY.attention, *IDENTITY.numerics)])
def test_every_named_parameter_changes_the_domain(name: str) -> None:
    def others(pairs: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
        return tuple((one, f"other {value}" if one == name else value) for one, value in pairs)

    changed = dataclasses.replace(IDENTITY, attention=others(IDENTITY.attention), numerics=others(IDENTITY.numerics))
    assert changed.domain() != IDENTITY.domain()
    assert [difference.field.partition(".")[2] for difference in diff(IDENTITY, changed)] == [name]


def test_diff_is_readable_and_empty_for_equals() -> None:
    changed = dataclasses.replace(IDENTITY, attention=OTHER["attention"])
    assert [str(one) for one in diff(IDENTITY, changed)] == ["attention.rope_theta: 100000.0 != 10000.0"]
    assert diff(IDENTITY, CacheIdentity.decode(IDENTITY.encode())) == []
    without = dataclasses.replace(IDENTITY, numerics=IDENTITY.numerics[:1])
    assert [str(one) for one in diff(IDENTITY, without)] == ["numerics.weight_path: 'bf16' != absent"]


def test_the_order_of_pairs_does_not_matter_and_their_type_does() -> None:
    shuffled = dataclasses.replace(IDENTITY, attention=IDENTITY.attention[::-1], numerics=IDENTITY.numerics[::-1])
    assert shuffled == IDENTITY and shuffled.encode() == IDENTITY.encode()
    values: tuple[Scalar, ...] = (1, 1.0, True, "1", None)
    typed = [dataclasses.replace(IDENTITY, attention=(("x", value),)).domain() for value in values]
    assert len(set(typed)) == 5
    zeros = [dataclasses.replace(IDENTITY, attention=(("x", value),)).domain() for value in (0.0, -0.0)]
    assert zeros[0] == zeros[1]


def test_what_cannot_be_is_refused_by_name() -> None:
    auto = dataclasses.replace(GROUP, planes=(Plane("k", "auto", (3, 64)),))
    with pytest.raises(ConfigError, match="plane k"):
        dataclasses.replace(IDENTITY, groups=(auto,))
    with pytest.raises(ConfigError, match="attention"):
        dataclasses.replace(IDENTITY, attention=(("x", 1), ("x", 2)))
    unfit: tuple[Any, ...] = (float("nan"), "\ud800", 1j, object())
    for value in unfit:
        with pytest.raises(ConfigError):
            dataclasses.replace(IDENTITY, attention=(("x", value),)).encode()


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error(data: bytes) -> None:
    for candidate in (data, PREFIX + data):
        with pytest.raises(ProtocolError):
            CacheIdentity.decode(candidate)


def test_every_truncation_and_flip_is_refused_or_another_identity() -> None:
    encoded = IDENTITY.encode()
    for size in range(len(encoded)):
        with pytest.raises(ProtocolError):
            CacheIdentity.decode(encoded[:size])
    with pytest.raises(ProtocolError):
        CacheIdentity.decode(encoded + b"\0")
    rng = random.Random(0)
    for at in range(len(encoded)):
        flipped = bytearray(encoded)
        flipped[at] ^= 1 << rng.randrange(8)
        try:
            other = CacheIdentity.decode(bytes(flipped))
        except ProtocolError:
            continue
        assert other.encode() == bytes(flipped) and other != IDENTITY


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=8)
names = st.text(max_size=8)


@given(
    attention=st.dictionaries(names, scalars, max_size=6),
    numerics=st.dictionaries(names, names, max_size=4),
    layers=st.lists(st.integers(0, 1000), max_size=4),
    window=st.none() | st.integers(0, 10**6),
)
def test_round_trip(attention: dict[str, Any], numerics: dict[str, str], layers: list[int], window: int | None) -> None:
    identity = dataclasses.replace(
        IDENTITY,
        attention=tuple(attention.items()),
        numerics=tuple(numerics.items()),
        groups=(dataclasses.replace(GROUP, layers=tuple(layers), window=window),),
    )
    decoded = CacheIdentity.decode(identity.encode())
    assert decoded == identity and decoded.encode() == identity.encode()
