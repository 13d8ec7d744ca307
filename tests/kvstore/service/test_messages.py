"""What is said over the wire is understood as it was meant; what cannot be meant is refused in one line."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from pagetier.kvstore.admin import BlockInfo, PinInfo
from pagetier.kvstore.block import BlockName, BlockStatus, Part
from pagetier.kvstore.errors import ProtocolError
from pagetier.kvstore.events import EventLog
from pagetier.kvstore.pins import Pin
from pagetier.kvstore.prefixes import hottest
from pagetier.kvstore.service import messages
from pagetier.proto import kvstore_pb2 as pb
from tests.kvstore.service.service_rig import names_of

DOMAIN = b"d" * 32


def test_names_become_chains_and_names_again() -> None:
    one, other = names_of(7), names_of(5, 1)
    names = [*one[:3], *one[4:], *other]
    chains = messages.to_chains(names)
    assert [len(chain.keys) // 32 for chain in chains] == [3, 3, 5]
    assert messages.from_chains(chains) == names
    assert messages.to_chains([]) == [] and messages.from_chain(pb.Chain()) == []
    with pytest.raises(ProtocolError, match="not consecutive"):
        messages.to_chain(names)


def test_partial_last_blocks_keep_their_sizes() -> None:
    names = names_of(3)
    last = BlockName(b"k" * 32, names[-1].key, names[0].root, 12, names[0].tokens[:4])
    assert messages.from_chains(messages.to_chains([*names, last])) == [*names, last]


@pytest.mark.parametrize(
    "change",
    [
        {"keys": b"x" * 33},
        {"root": b"r"},
        {"parent": b""},
        {"tokens": b"1234"},
        {"num_tokens": [0]},
        {"num_tokens": [4, 4]},
        {"num_tokens": [5000]},
        {"position": 1 << 63},
    ],
)
def test_impossible_chains_are_refused(change: dict[str, object]) -> None:
    chain = messages.to_chain(names_of(3))
    for name, value in change.items():
        if isinstance(value, list):
            chain.num_tokens[:] = value
        else:
            setattr(chain, name, value)
    with pytest.raises(ProtocolError):
        messages.from_chain(chain)


def test_too_many_blocks_are_refused() -> None:
    chain = messages.to_chain(names_of(3))
    with pytest.raises(messages.TooLarge, match="got 3 blocks; allowed: 2"):
        messages.from_chain(chain, 2)


def test_parts_statuses_pins_events_and_blocks_survive_the_way() -> None:
    part = Part(0, 2, 4, 1, 3)
    assert messages.from_part(messages.to_part(part)) == part
    with pytest.raises(ProtocolError):
        messages.from_part(pb.Part())
    for status in BlockStatus:
        assert messages.status_of(messages.STATUSES[status]) is status
    with pytest.raises(ProtocolError):
        messages.status_of(pb.WANTED)
    names = names_of(4)
    pins = [PinInfo(Pin(DOMAIN, tuple(names), ("nvme",), 12.5), {"nvme": 3}), PinInfo(Pin(DOMAIN, tuple(names)), {})]
    assert messages.from_pins(messages.to_pins(pins)) == pins
    log = EventLog(clock=lambda: 5.0)
    log.stored("nvme", names, DOMAIN)
    log.removed("host", [names[0].key])
    log.cleared("redis", None)
    for event in log.since(0).events:
        assert messages.from_event(messages.to_event(event)) == event
    infos = [BlockInfo(n.key, ("nvme",), 64, n, 1.5, None, i % 2, False) for i, n in enumerate(names)]
    for info in [*infos, BlockInfo(names[0].key)]:
        assert messages.from_stored_block(messages.to_stored_block(info)) == info
    forest = hottest([(name, info) for name, info in zip(names, infos, strict=True)], 20)
    assert messages.from_prefixes(messages.to_prefixes(forest)) == forest


@given(st.binary(max_size=300))
def test_any_bytes_are_a_chain_or_a_refusal(data: bytes) -> None:
    try:
        names = messages.from_chain(pb.Chain.FromString(data))
    except (DecodeError, ProtocolError):
        return
    assert messages.from_chains(messages.to_chains(names)) == names
