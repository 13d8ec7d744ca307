"""A foreign or forged record is a miss and is counted, on every medium; the block can be stored anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagetier.kvstore.block import Address, BlockName, BlockStatus
from pagetier.kvstore.codec import Coding
from pagetier.kvstore.keys import chain_names, root_key
from pagetier.kvstore.record import CHECK_MAC, CHECK_XXH3, FIXED_BYTES, RecordStatus, pack_header, parse_header, verify
from tests.kvstore.forgery import Medium, checks_redone, nvme_medium, redis_medium
from tests.kvstore.tier_contract import (
    DOMAIN,
    OTHER_PART,
    PART,
    assert_readable,
    chain,
    get,
    payload_of,
    put,
)
from tests.kvstore.valkey import Valkey, valkey, valkey_server  # noqa: F401

NAME, OTHER_NAME = chain(2)[1], chain(2, seed=1)[1]
PAYLOAD = payload_of(NAME)
OTHER_DOMAIN = bytes(reversed(DOMAIN))
KEY, OTHER_KEY = b"k" * 64, b"o" * 64
CHECK_AT = 11


def forged(domain: bytes = DOMAIN, name: BlockName = NAME, payload: bytes = PAYLOAD) -> tuple[bytes, bytes]:
    return pack_header(domain, name, PART, payload), payload


def with_check(header: bytes, check: int) -> bytes:
    return header[:CHECK_AT] + bytes([check]) + header[CHECK_AT + 1 :]


Forgery = tuple[bytes, bytes]  # header, payload
FOREIGN: dict[str, Forgery] = {
    "right key, other tokens": forged(name=NAME._replace(tokens=OTHER_NAME.tokens)),
    "right tokens, other domain": forged(domain=OTHER_DOMAIN),
    "right key, root of another tenant": forged(name=NAME._replace(root=root_key(DOMAIN, b"tenant"))),
    "right key, other parent": forged(name=NAME._replace(parent=OTHER_NAME.parent)),
    "right key, other position": forged(name=NAME._replace(position=0)),
    "right key, fewer tokens": forged(name=NAME._replace(tokens=NAME.tokens[:-4])),
    "valid record of another key": forged(name=OTHER_NAME, payload=payload_of(OTHER_NAME)),
    "valid record of another part": (pack_header(DOMAIN, NAME, OTHER_PART, PAYLOAD), PAYLOAD),
    "another codec": (pack_header(DOMAIN, NAME, PART, PAYLOAD, Coding(1, len(PAYLOAD))), PAYLOAD),
    "payload of another block": (forged()[0], payload_of(OTHER_NAME)),
    "a MAC where none is asked for": (pack_header(DOMAIN, NAME, PART, PAYLOAD, mac_key=KEY), PAYLOAD),
}
KEYED_HEADER = pack_header(DOMAIN, NAME, PART, PAYLOAD, mac_key=KEY)
CHANGED = bytes([PAYLOAD[0] ^ 1]) + PAYLOAD[1:]
UNKEYED: dict[str, Forgery] = {
    "no MAC": forged(),
    "another key": (pack_header(DOMAIN, NAME, PART, PAYLOAD, mac_key=OTHER_KEY), PAYLOAD),
    "another payload, checksum redone": (checks_redone(KEYED_HEADER, CHANGED), CHANGED),
    "another payload, checksum of a record without MAC": (
        checks_redone(with_check(KEYED_HEADER, CHECK_XXH3), CHANGED),
        CHANGED,
    ),
    "another payload, MAC of the forger's key": (checks_redone(KEYED_HEADER, CHANGED, OTHER_KEY), CHANGED),
    "another payload, MAC kept": (KEYED_HEADER, CHANGED),
}


@pytest.fixture(params=["nvme", "redis"])
def medium(request: pytest.FixtureRequest, tmp_path: Path, valkey: Valkey) -> Medium:  # noqa: F811
    return nvme_medium(tmp_path / "nvme") if request.param == "nvme" else redis_medium(valkey)


def assert_refused(medium: Medium, forgery: Forgery, mac_key: bytes | None) -> None:
    medium.plant(Address(NAME.key, PART), *forgery)
    tier = medium.open(mac_key)
    try:
        (status,), _ = get(tier, [NAME])
        assert status is BlockStatus.CORRUPT
        assert tier.counters().corrupt == 1
        assert get(tier, [NAME])[0] == [BlockStatus.MISS], "it is gone, and not counted twice"
        assert put(tier, [NAME]) == [BlockStatus.OK]
        assert_readable(tier, [NAME])
        assert tier.counters().corrupt == 1
        tier.check()
    finally:
        tier.close()


@pytest.mark.parametrize("case", FOREIGN)
def test_a_foreign_record_is_a_miss_and_counted(case: str, medium: Medium) -> None:
    assert_refused(medium, FOREIGN[case], mac_key=None)


@pytest.mark.parametrize("case", UNKEYED)
def test_what_the_key_did_not_make_is_a_miss_and_counted(case: str, medium: Medium) -> None:
    assert_refused(medium, UNKEYED[case], mac_key=KEY)


@pytest.mark.parametrize("mac_key", [None, KEY], ids=["checksum", "MAC"])
def test_the_very_record_is_served(mac_key: bytes | None, medium: Medium) -> None:
    """Guards the tests above: what they plant would be found if it were true."""
    medium.plant(Address(NAME.key, PART), pack_header(DOMAIN, NAME, PART, PAYLOAD, mac_key=mac_key), PAYLOAD)
    tier = medium.open(mac_key)
    try:
        assert_readable(tier, [NAME])
        assert tier.counters().corrupt == 0
    finally:
        tier.close()


def test_records_with_a_mac_survive_restarts_and_moves(tmp_path: Path) -> None:
    """Hot records are verified when their segment goes: with the key, or all of them would be lost there."""
    medium = nvme_medium(tmp_path / "nvme")
    tier = medium.open(KEY)
    names = chain(8)
    assert put(tier, names) == [BlockStatus.OK] * 8
    tier.close()
    for key, status in ((KEY, BlockStatus.OK), (OTHER_KEY, BlockStatus.CORRUPT)):
        tier = medium.open(key)
        assert get(tier, names)[0] == [status] * 8
        tier.close()


def test_every_changed_byte_of_a_record_with_a_mac_is_found_though_its_checks_are_redone() -> None:
    small = bytes(range(64))
    header = pack_header(DOMAIN, NAME, PART, small, mac_key=KEY)
    assert verify(header, small, DOMAIN, NAME, PART, mac_key=KEY) is RecordStatus.OK
    assert verify(header, small, DOMAIN, NAME, PART, mac_key=OTHER_KEY) is RecordStatus.CHECKSUM
    for at in range(len(header) + len(small)):
        blob = bytearray(header + small)
        blob[at] ^= 0x40
        changed, payload = bytes(blob[: len(header)]), bytes(blob[len(header) :])
        redone = checks_redone(changed, payload)
        for candidate in (changed, redone, checks_redone(changed, payload, OTHER_KEY)):
            assert verify(candidate, payload, DOMAIN, NAME, PART, mac_key=KEY) is not RecordStatus.OK, f"byte {at}"


def test_a_mac_changes_the_checksum_and_the_mark_only() -> None:
    plain, keyed = forged()[0], KEYED_HEADER
    assert len(plain) == len(keyed) and plain[FIXED_BYTES:] == keyed[FIXED_BYTES:]
    assert plain[:CHECK_AT] == keyed[:CHECK_AT] and plain[CHECK_AT + 1 : 192] == keyed[CHECK_AT + 1 : 192]
    parsed = parse_header(keyed)
    assert parsed is not None and parsed.check == CHECK_MAC, "a log walker needs no key"


def test_names_of_another_domain_are_other_names() -> None:
    tokens = list(range(8))
    ours, theirs = (chain_names(root_key(domain), tokens, 4) for domain in (DOMAIN, OTHER_DOMAIN))
    assert {name.key for name in ours}.isdisjoint(name.key for name in theirs)
