"""Between the protocol's messages and the store's values. What a peer sent is checked here, and only here.

Everything raises ProtocolError, one line, for what is not allowed, or its child TooLarge; nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagetier.kvstore.admin import BlockInfo, PinInfo
from pagetier.kvstore.block import KEY_BYTES, TOKEN_BYTES, BlockName, BlockStatus, Part
from pagetier.kvstore.errors import ProtocolError
from pagetier.kvstore.events import EventKind, StoreEvent
from pagetier.kvstore.pins import Pin
from pagetier.kvstore.prefixes import Prefix
from pagetier.kvstore.record import MAX_TOKENS
from pagetier.proto import kvstore_pb2 as pb

MAX_BLOCKS = 65_536  # of one request; a million tokens
STATUSES = {
    BlockStatus.OK: pb.OK,
    BlockStatus.MISS: pb.MISS,
    BlockStatus.CORRUPT: pb.CORRUPT,
    BlockStatus.TIMEOUT: pb.TIMEOUT,
    BlockStatus.ERROR: pb.ERROR,
    BlockStatus.EXISTS: pb.EXISTS,
    BlockStatus.DROPPED: pb.DROPPED,
}
_STATUS_OF = {number: status for status, number in STATUSES.items()}


class TooLarge(ProtocolError):
    """More than one message may be about."""


def status_of(number: int) -> BlockStatus:
    """A status from the wire."""
    status = _STATUS_OF.get(number)  # type: ignore[call-overload]
    if status is None:
        raise ProtocolError(f"status {number} is not one that a block can end with")
    return status  # type: ignore[no-any-return]


def key_field(value: bytes, field: str) -> bytes:
    """A key, root or domain: 32 bytes."""
    if len(value) != KEY_BYTES:
        raise ProtocolError(f"{field}: got {len(value)} bytes; allowed: {KEY_BYTES}")
    return value


def to_chains(names: Sequence[BlockName]) -> list[pb.Chain]:
    """Names as runs of consecutive blocks."""
    chains: list[pb.Chain] = []
    first = 0
    for i in range(1, len(names) + 1):
        if i < len(names):
            before, name = names[i - 1], names[i]
            joins = name.parent == before.key and name.root == before.root
            if joins and name.position == before.position + before.num_tokens:
                continue
        chains.append(_to_chain(names[first:i]))
        first = i
    return chains


def to_chain(names: Sequence[BlockName]) -> pb.Chain:
    """Names that are one run. Raises ProtocolError when they are several."""
    chains = to_chains(names)
    if len(chains) > 1:
        raise ProtocolError("these blocks are not consecutive")
    return chains[0] if chains else pb.Chain()


def _to_chain(names: Sequence[BlockName]) -> pb.Chain:
    counts = [name.num_tokens for name in names]
    return pb.Chain(
        root=names[0].root,
        parent=names[0].parent,
        position=names[0].position,
        keys=b"".join([name.key for name in names]),
        tokens=b"".join([name.tokens for name in names]),
        num_tokens=counts[:1] if len(set(counts)) == 1 else counts,
    )


def from_chains(chains: Iterable[pb.Chain]) -> list[BlockName]:
    """The names of all chains, in order."""
    names: list[BlockName] = []
    for chain in chains:
        names += from_chain(chain, MAX_BLOCKS - len(names))
    return names


def from_chain(chain: pb.Chain, max_blocks: int = MAX_BLOCKS) -> list[BlockName]:
    """The names of a chain."""
    count, odd = divmod(len(chain.keys), KEY_BYTES)
    if odd:
        raise ProtocolError(f"keys: got {len(chain.keys)} bytes; allowed: {KEY_BYTES} each")
    if count > max_blocks:
        raise TooLarge(f"keys: got {count} blocks; allowed: {max_blocks}")
    if not count:
        return []
    root, parent = key_field(chain.root, "root"), key_field(chain.parent, "parent")
    counts: Sequence[int] = chain.num_tokens
    if len(counts) == 1:
        counts = [counts[0]] * count
    if len(counts) != count or not all(1 <= one <= MAX_TOKENS for one in counts):
        raise ProtocolError(f"num_tokens: allowed: 1 to {MAX_TOKENS} for each of {count} blocks")
    if len(chain.tokens) != sum(counts) * TOKEN_BYTES:
        raise ProtocolError(f"tokens: got {len(chain.tokens)} bytes for {sum(counts)} tokens of {TOKEN_BYTES}")
    position, at, names = chain.position, 0, []
    if position + sum(counts) >= 1 << 62:
        raise ProtocolError(f"position: got {position}; allowed: what a sequence can have")
    keys, tokens = chain.keys, chain.tokens
    for i in range(count):
        key, end = keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], at + counts[i] * TOKEN_BYTES
        names.append(BlockName(key, parent, root, position, tokens[at:end]))
        parent, position, at = key, position + counts[i], end
    return names


def to_part(part: Part) -> pb.Part:
    return pb.Part(
        group=part.group,
        first_layer=part.first_layer,
        end_layer=part.end_layer,
        first_head=part.first_head,
        end_head=part.end_head,
    )


def from_part(part: pb.Part) -> Part:
    """A part whose ranges are not empty."""
    if part.first_layer >= part.end_layer or part.first_head >= part.end_head:
        raise ProtocolError("part: allowed: half-open ranges of layers and heads that are not empty")
    return Part(part.group, part.first_layer, part.end_layer, part.first_head, part.end_head)


def to_pins(infos: Iterable[PinInfo]) -> pb.PinReply:
    reply = pb.PinReply()
    for info in infos:
        pin = info.pin
        one = reply.pins.add(domain=pin.domain, tiers=pin.tiers, held=info.held)
        one.chain.CopyFrom(to_chain(pin.names))
        if pin.expires_s is not None:
            one.expires_s = pin.expires_s
    return reply


def from_pins(reply: pb.PinReply) -> list[PinInfo]:
    infos = []
    for one in reply.pins:
        names = tuple(from_chain(one.chain))
        if not names:
            raise ProtocolError("a pin without blocks")
        expires_s = one.expires_s if one.HasField("expires_s") else None
        pin = Pin(key_field(one.domain, "domain"), names, tuple(one.tiers), expires_s)
        infos.append(PinInfo(pin, dict(sorted(one.held.items()))))  # a map has no order of its own
    return infos


def to_event(event: StoreEvent) -> pb.Event:
    return pb.Event(
        seq=event.seq,
        time_s=event.time_s,
        kind=str(event.kind),
        medium=event.medium,
        domain=event.domain or b"",
        keys=event.keys,
        chains=to_chains(event.names),
    )


def from_event(event: pb.Event) -> StoreEvent:
    try:
        kind = EventKind(event.kind)
    except ValueError:
        raise ProtocolError(f"event kind {event.kind!r} is unknown") from None
    keys, names = tuple(event.keys), tuple(from_chains(event.chains))
    return StoreEvent(event.seq, event.time_s, kind, event.medium, keys, names, event.domain or None)


def to_stored_block(info: BlockInfo) -> pb.StoredBlock:
    block = pb.StoredBlock(
        key=info.key, tiers=info.tiers, nbytes=info.nbytes, hits=info.hits, pinned=info.pinned, age_s=info.age_s
    )
    if info.idle_s is not None:
        block.idle_s = info.idle_s
    if info.name is not None:
        block.name.CopyFrom(_to_chain([info.name]))
    return block


def from_stored_block(block: pb.StoredBlock) -> BlockInfo:
    names = from_chain(block.name) if block.HasField("name") else []
    return BlockInfo(
        key=key_field(block.key, "key"),
        tiers=tuple(block.tiers),
        nbytes=block.nbytes,
        name=names[0] if names else None,
        age_s=block.age_s if block.HasField("age_s") else None,
        idle_s=block.idle_s if block.HasField("idle_s") else None,
        hits=block.hits,
        pinned=block.pinned,
    )


def to_prefixes(forest: Sequence[Prefix]) -> list[pb.Prefix]:
    """A forest as a list in which every prefix comes after the one above it."""
    listed: list[pb.Prefix] = []
    waiting = [(prefix, -1) for prefix in reversed(forest)]
    while waiting:
        prefix, parent = waiting.pop()
        waiting += [(child, len(listed)) for child in reversed(prefix.children)]
        one = pb.Prefix(
            key=prefix.key,
            root=prefix.root,
            position=prefix.position,
            num_blocks=prefix.num_blocks,
            tokens=prefix.tokens,
            hits=prefix.hits,
            nbytes=prefix.nbytes,
            age_s=prefix.age_s,
            idle_s=prefix.idle_s,
            tiers=prefix.tiers,
            pinned=prefix.pinned,
            parent=parent,
        )
        listed.append(one)
    return listed


def from_prefixes(listed: Sequence[pb.Prefix]) -> list[Prefix]:
    """The inverse of `to_prefixes`."""
    made: list[Prefix] = []
    tops: list[Prefix] = []
    for one in listed:
        if not -1 <= one.parent < len(made):
            raise ProtocolError(f"a prefix names {one.parent} as the one above it; allowed: an earlier one")
        prefix = Prefix(
            key=one.key,
            root=one.root,
            position=one.position,
            num_blocks=one.num_blocks,
            tokens=one.tokens,
            hits=one.hits,
            nbytes=one.nbytes,
            age_s=one.age_s if one.HasField("age_s") else None,
            idle_s=one.idle_s if one.HasField("idle_s") else None,
            tiers=tuple(one.tiers),
            pinned=one.pinned,
        )
        (tops if one.parent < 0 else made[one.parent].children).append(prefix)
        made.append(prefix)
    return tops
