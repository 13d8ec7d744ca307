"""The cache identity: everything that KV bytes depend on besides tokens, and the domain it hashes to.

Encoding as in proto/FORMAT.md, section "Identity and domain". Knows no tier and no model.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from pagetier.kvstore.block import KVGroup, Plane
from pagetier.kvstore.errors import ConfigError, ProtocolError

Scalar: TypeAlias = None | bool | int | float | str

FORMAT_VERSION = 1
PREFIX = b"PGTID01\n"
_HEAD = struct.Struct("<cI")
_MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """What must be equal for two processes to share KV. Complete on purpose: a missing field serves wrong tokens.

    attention: every parameter of RoPE and attention by name, scalars; numbers that are floats by nature must be given
    as floats by every caller, since 1 and 1.0 differ. numerics: weight path, activation dtype, kernel revision, ISA.
    Pairs are kept sorted by name. weights_fingerprint, lora_digest: hex. Raises ConfigError for dtype `auto`, a name
    given twice, or a value without an encoding.
    """

    architecture: str
    attention: tuple[tuple[str, Scalar], ...]
    groups: tuple[KVGroup, ...]
    layout: str
    block_size: int
    weights_fingerprint: str
    weights_version: str = ""
    numerics: tuple[tuple[str, str], ...] = ()
    kv_format: str = "none"
    lora_digest: str = ""
    hash_name: str = "sha256"
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for field in ("attention", "numerics"):
            pairs = tuple(sorted(((name, value) for name, value in getattr(self, field)), key=lambda pair: pair[0]))
            names = [name for name, _ in pairs]
            if len(set(names)) != len(names):
                raise ConfigError.bad_value(f"identity {field}", names, "each name once")
            object.__setattr__(self, field, pairs)
        for group in self.groups:
            for plane in group.planes:
                if plane.dtype in ("", "auto"):
                    raise ConfigError.bad_value(f"dtype of plane {plane.name}", plane.dtype, "a resolved dtype")

    def encode(self) -> bytes:
        """The canonical bytes; equal identities have equal bytes. Raises ConfigError for a value without encoding."""
        return PREFIX + _encode(_to_tree(self))

    @classmethod
    def decode(cls, encoded: bytes) -> CacheIdentity:
        """The inverse of `encode`. Raises ProtocolError for anything that `encode` would not have written."""
        if encoded[: len(PREFIX)] != PREFIX:
            raise ProtocolError("not a cache identity: wrong prefix")
        try:
            tree, end = _decode(encoded, len(PREFIX), _MAX_DEPTH)
            identity = _from_tree(tree)
            canonical = identity.encode()
        except (struct.error, ValueError, TypeError, KeyError, IndexError, AttributeError, ConfigError) as error:
            raise ProtocolError(f"not a cache identity: {error}") from None
        if end != len(encoded) or canonical != encoded:
            raise ProtocolError("not a cache identity: encoding is not canonical")
        return identity

    def as_dict(self) -> dict[str, Any]:
        """All fields as plain values, for JSON."""
        return _to_tree(self)

    def domain(self) -> bytes:
        """The 32 bytes that keys and records carry."""
        return domain_of(self.encode())


def domain_of(encoded: bytes) -> bytes:
    """The domain of an encoded identity, without decoding it."""
    return hashlib.sha256(b"pgt1-domain" + encoded).digest()


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which two identities differ. sides: its value under `a` and `b`; who lacks the field is absent."""

    field: str
    sides: dict[str, Any]

    def __str__(self) -> str:
        a, b = (repr(self.sides[side]) if side in self.sides else "absent" for side in ("a", "b"))
        return f"{self.field}: {a} != {b}"


def diff(a: CacheIdentity, b: CacheIdentity) -> list[Difference]:
    """The fields in which `a` and `b` differ, such as `attention.rope_theta`, sorted; types count."""
    left, right = (dict(_leaves(_to_tree(identity), "")) for identity in (a, b))
    differences = []
    for path in sorted(left.keys() | right.keys()):
        sides = {name: leaves[path] for name, leaves in (("a", left), ("b", right)) if path in leaves}
        if len(sides) < 2 or repr(sides["a"]) != repr(sides["b"]):
            differences.append(Difference(path, sides))
    return differences


def _to_tree(identity: CacheIdentity) -> dict[str, Any]:
    tree: dict[str, Any] = {field.name: getattr(identity, field.name) for field in fields(identity)}
    tree["attention"] = dict(identity.attention)
    tree["numerics"] = dict(identity.numerics)
    tree["groups"] = [
        {
            "layers": list(group.layers),
            "planes": [
                {"name": plane.name, "dtype": plane.dtype, "shape": list(plane.shape)} for plane in group.planes
            ],
            "window": group.window,
            "nbytes_per_token": group.nbytes_per_token,
        }
        for group in identity.groups
    ]
    return tree


def _from_tree(tree: Any) -> CacheIdentity:
    known = dict(tree)
    for name, value in known.items():
        wanted = {"attention": dict, "numerics": dict, "groups": list, "block_size": int, "format_version": int}
        if type(value) is not wanted.get(name, str):
            raise TypeError(f"{name} has the wrong type")
    groups = tuple(
        KVGroup(
            layers=tuple(group["layers"]),
            planes=tuple(Plane(p["name"], p["dtype"], tuple(p["shape"])) for p in group["planes"]),
            window=group["window"],
            nbytes_per_token=group["nbytes_per_token"],
        )
        for group in known.pop("groups")
    )
    attention, numerics = known.pop("attention"), known.pop("numerics")
    return CacheIdentity(attention=tuple(attention.items()), numerics=tuple(numerics.items()), groups=groups, **known)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value


def _encode(value: Any) -> bytes:
    tag, body = _body(value)
    return _HEAD.pack(tag, len(body)) + body


def _body(value: Any) -> tuple[bytes, bytes]:
    if value is None:
        return b"n", b""
    if isinstance(value, bool):
        return b"b", bytes([value])
    if isinstance(value, int):
        return b"i", str(int(value)).encode("ascii")
    if isinstance(value, float):
        if math.isnan(value):
            raise ConfigError.bad_value("identity", value, "numbers")
        return b"f", struct.pack("<d", value + 0.0)  # -0.0 + 0.0 is 0.0
    if isinstance(value, str):
        try:
            return b"s", str(value).encode("utf-8")
        except UnicodeEncodeError:
            raise ConfigError.bad_value("identity", value, "text that UTF-8 can hold") from None
    if isinstance(value, bytes):
        return b"y", value
    if isinstance(value, (list, tuple)):
        return b"l", b"".join(_encode(inner) for inner in value)
    if isinstance(value, dict):
        by_bytes = sorted((name.encode("utf-8"), inner) for name, inner in value.items())
        return b"m", b"".join(_HEAD.pack(b"s", len(name)) + name + _encode(inner) for name, inner in by_bytes)
    raise ConfigError.bad_value("identity", value, "none, bool, int, float, text, bytes, lists and maps of these")


def _decode(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    tag, size = _HEAD.unpack_from(data, at)
    start = at + _HEAD.size
    end = start + size
    if end > len(data) or depth == 0:
        raise ValueError(f"value at {at} is cut short or too deep")
    body = data[start:end]
    if tag == b"n" and not body:
        return None, end
    if tag == b"b" and body in (b"\0", b"\1"):
        return body == b"\1", end
    if tag == b"i" and size <= 64:
        return int(body.decode("ascii")), end
    if tag == b"f":
        return struct.unpack("<d", body)[0], end
    if tag == b"s":
        return body.decode("utf-8"), end
    if tag == b"y":
        return body, end
    if tag in (b"l", b"m"):
        items = []
        while start < end:
            item, start = _decode(data, start, depth - 1)
            items.append(item)
        if start != end:
            raise ValueError(f"value at {at} ends inside another")
        if tag == b"l":
            return items, end
        if all(isinstance(name, str) for name in items[::2]):
            return dict(zip(items[::2], items[1::2], strict=True)), end
    raise ValueError(f"value at {at} has an unknown tag or a wrong body")
