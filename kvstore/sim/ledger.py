"""What is stored in the simulation: chains of blocks whose payload follows from the key alone, so that any byte that is
not the block's own is seen.

Chains share a trunk and fork; each exists below every version of the weights. Pure and made once per process.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

from pagetier.kvstore.block import BlockName, Part
from pagetier.kvstore.identity import CacheIdentity
from pagetier.kvstore.keys import chain_names, pack_tokens, root_key
from pagetier.kvstore.record import part_tag

PART = Part(0, 0, 2, 0, 1)
TAG = part_tag(PART)
BLOCK_SIZE = 4
PAYLOAD_BYTES = 1536  # three sectors: a power cut can tear it
NUM_VERSIONS = 4
NUM_CHAINS = 5
CHAIN_BLOCKS = 6
TRUNK_BLOCKS = 2
POISON = 0xEE  # fills destinations before a load
SPOILT = bytes([0x5C]) * PAYLOAD_BYTES  # fills sources and destinations that nobody may touch any more


@cache
def identity(version: int) -> CacheIdentity:
    """The cache identity under the version-th weights."""
    return CacheIdentity(
        architecture="sim",
        attention=(),
        groups=(),
        layout="sim",
        block_size=BLOCK_SIZE,
        weights_fingerprint="00",
        weights_version=str(version),
    )


@cache
def domain(version: int) -> bytes:
    return identity(version).domain()


@cache
def chains(version: int) -> tuple[tuple[BlockName, ...], ...]:
    """All chains below these weights; odd ones share a trunk."""
    root, made = root_key(domain(version)), []
    for number in range(NUM_CHAINS):
        rng = random.Random(number)
        trunk = [1] * (TRUNK_BLOCKS * BLOCK_SIZE) if number % 2 else [rng.randrange(50_000) for _ in range(8)]
        rest = [rng.randrange(50_000) for _ in range((CHAIN_BLOCKS - TRUNK_BLOCKS) * BLOCK_SIZE)]
        made.append(tuple(chain_names(root, trunk + rest, BLOCK_SIZE)))
    return tuple(made)


@cache
def payload(key: bytes) -> bytes:
    """The only right bytes of a block. One of four is the same, so that a codec makes them fewer."""
    content = bytearray(random.Random(key).randbytes(PAYLOAD_BYTES))
    content[::4] = content[:1] * len(content[::4])
    return bytes(content)


@cache
def packed(key: bytes) -> bytes:
    """The 40 bytes that the NVMe tier knows a block by."""
    return key + TAG


@cache
def blocks_by_address() -> dict[bytes, tuple[BlockName, bytes]]:
    """Every block of all versions and its domain, by its 40 bytes."""
    versions = [(domain(version), chain) for version in range(NUM_VERSIONS) for chain in chains(version)]
    return {packed(name.key): (name, domain) for domain, chain in versions for name in chain}


def domain_of(name: BlockName) -> bytes:
    """That of the weights a block was made under."""
    return blocks_by_address()[packed(name.key)][1]


def forged(name: BlockName) -> BlockName:
    """A record that claims this key for other tokens."""
    tokens = pack_tokens([7] * BLOCK_SIZE)
    return BlockName(name.key, name.parent, name.root, name.position, tokens)


class Destinations:
    """Buffers of one load."""

    def __init__(self, names: Sequence[BlockName]) -> None:
        self.names = tuple(names)
        self.buffers = [bytearray([POISON]) * PAYLOAD_BYTES for _ in names]

    def views(self) -> list[memoryview]:
        return [memoryview(buffer) for buffer in self.buffers]

    def spoil(self) -> None:
        for buffer in self.buffers:
            buffer[:] = SPOILT

    @property
    def is_spoilt(self) -> bool:
        return all(buffer == SPOILT for buffer in self.buffers)
