"""What a KV block is called, and what can become of one: names, addresses, parts and statuses.

Pure values; knows no tier and no bytes of KV.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import repeat
from typing import NamedTuple, overload

KEY_BYTES = 32
TOKEN_BYTES = 4  # token ids are u32 little-endian everywhere


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor kind of a KV group: `shape` is per token and layer, e.g. ("k", "bfloat16", (3, 64))."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of equal attention type and KV shape. `window` in tokens, None for full attention.

    Layers are model layer indices, ascending. `nbytes_per_token` counts all layers and planes.
    """

    layers: tuple[int, ...]
    planes: tuple[Plane, ...]
    window: int | None
    nbytes_per_token: int


class Part(NamedTuple):
    """What one rank holds of a block: group index, half-open layer range (within the group), half-open head range. A
    named tuple, because every address of every lookup hashes its part, which a method in Python makes four times as
    slow.
    """

    group: int
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int


class BlockName(NamedTuple):
    """Names one block and carries everything a record is checked against on a hit. A named tuple, because a long prompt
    makes thousands: a frozen dataclass takes two to five times as long to make.

    key: 32 bytes. parent: the previous block's key, or `root` for a chain's first block.
    root: the domain and salt's root key. position: of the first token. tokens: n ids, u32 little-endian,
    1 <= n <= block_size.
    """

    key: bytes
    parent: bytes
    root: bytes
    position: int
    tokens: bytes

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


class Address(NamedTuple):
    """Where a record is found: key and part. A named tuple, because one lookup makes and hashes thousands."""

    key: bytes
    part: Part


class AddressRun(Sequence[Address]):
    """Addresses of one part, made one by one as they are asked for. What takes `keys` and `part` makes none."""

    __slots__ = ("keys", "part")

    def __init__(self, keys: list[bytes], part: Part) -> None:
        """Keeps `keys`, which must not change."""
        self.keys, self.part = keys, part

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Address]:
        return map(Address, self.keys, repeat(self.part))

    @overload
    def __getitem__(self, at: int) -> Address: ...

    @overload
    def __getitem__(self, at: slice) -> AddressRun: ...

    def __getitem__(self, at: int | slice) -> Address | AddressRun:
        return AddressRun(self.keys[at], self.part) if isinstance(at, slice) else Address(self.keys[at], self.part)


class BlockStatus(StrEnum):
    """The fate of one block in a load or put; a batch never answers with one bool."""

    OK = "ok"  # loaded and verified / stored
    MISS = "miss"  # not there (any more)
    CORRUPT = "corrupt"  # there, but did not verify; quarantined
    TIMEOUT = "timeout"  # its deadline passed
    ERROR = "error"  # the tier failed
    EXISTS = "exists"  # put: already stored, nothing written
    DROPPED = "dropped"  # put: queue, cap or policy refused it
