"""The scrubber finds what is damaged before anybody asks for it; damaged records are kept for a look, within bounds."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from pagetier.kvstore.block import BlockName, BlockStatus
from pagetier.kvstore.nvme.scrub import PASS_REST_S, run_paced
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.record import PAGE_BYTES, address_bytes, parse_header
from pagetier.kvstore.tier import BlockRead, BlockWrite
from tests.kvstore.tier_contract import (
    DOMAIN,
    PART,
    PAYLOAD_BYTES,
    addresses,
    assert_readable,
    chain,
    get,
    put,
    soon,
)

OK, MISS, CORRUPT = BlockStatus.OK, BlockStatus.MISS, BlockStatus.CORRUPT
CAPACITY = 8 << 20
RECORD = PAGE_BYTES + PAYLOAD_BYTES


def opened(path: Path, capacity: int = CAPACITY, **settings: Any) -> NvmeTier:
    return NvmeTier(path, capacity, DOMAIN, **{"refresh_s": 0, "fsync": "none", "segment_bytes": 256 << 10, **settings})


def spot(tier: NvmeTier, name: BlockName) -> tuple[Path, int]:
    """Where a record lies."""
    (place,) = tier._index.find([address_bytes(address) for address in addresses([name])])
    assert place is not None
    segment = tier._catalog.get(place.segment)
    assert segment is not None
    return segment.path, place.offset


def damage(tier: NvmeTier, name: BlockName, at: int) -> None:
    path, offset = spot(tier, name)
    with path.open("r+b") as file:
        file.seek(offset + at)
        (byte,) = file.read(1)
        file.seek(offset + at)
        file.write(bytes([byte ^ 0x10]))


def disk_bytes(path: Path) -> int:
    return sum(entry.lstat().st_blocks * 512 for entry in [path, *path.rglob("*")])


def kept(path: Path) -> list[Path]:
    return sorted(path.glob("[0-9][0-9]/quarantine/*.rec"))


@pytest.mark.parametrize("io", ["auto", "buffered"])
def test_a_pass_finds_all_that_is_damaged_and_nothing_else(tmp_path: Path, io: str) -> None:
    rng = random.Random(7)
    with opened(tmp_path, io=io) as tier:
        chains = [chain(15, seed=seed) for seed in range(6)]
        for names in chains:
            put(tier, names)
        tier._log.close_open()
        bad = [rng.choice(names) for names in chains]
        for name in bad:
            damage(tier, name, rng.randrange(RECORD))
        assert tier.scrub() == 90 * RECORD
        counters = tier.counters()
        assert (counters.corrupt, counters.blocks, counters.errors) == (6, 84, 0)
        assert counters.scrubbed_bytes == 90 * RECORD
        for names, name in zip(chains, bad, strict=True):
            assert get(tier, names)[0] == [MISS if other is name else OK for other in names]
        assert tier.scrub() == 84 * RECORD and tier.counters().corrupt == 6, "each is found once"
        tier.check()
    with opened(tmp_path) as tier:
        assert tier.counters().blocks == 84, "and is not listed again by a restart"


def test_an_open_segment_and_those_of_others_are_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as tier, opened(tmp_path) as other:
        put(other, chain(30, seed=1))
        other._log.close_open()
        put(tier, chain(3, seed=2))
        tier.refresh()
        assert tier.counters().blocks == 33
        assert tier.scrub() == 0
        tier._log.close_open()
        assert tier.scrub() == 3 * RECORD


def test_a_record_of_another_domain_is_scrubbed_too(tmp_path: Path) -> None:
    names = chain(10)
    with opened(tmp_path) as tier:
        put(tier, names)
    with NvmeTier(tmp_path, CAPACITY, bytes(32), refresh_s=0) as tier:
        damage(tier, names[4], 5000)
        assert tier.scrub() == 10 * RECORD
        assert tier.counters().corrupt == 1


def test_what_is_evicted_while_it_is_read_is_no_damage(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        put(tier, chain(15))
        tier._log.close_open()
        assert tier._scrubber.step(RECORD) == RECORD
        (path,) = tmp_path.rglob("*.seg")
        with path.open("r+b") as file:
            file.truncate(0)
        path.unlink()
        assert tier.scrub() >= 0
        assert (tier.counters().corrupt, tier.counters().errors) == (0, 0)


def test_the_pace_is_bounded_and_passes_rest() -> None:
    steps, rests = iter([1000, 500, 0, 2000, 0]), list[float]()

    def rest(seconds: float) -> bool:
        rests.append(seconds)
        return len(rests) == 5

    run_paced(lambda: next(steps), 1000, rest)
    assert rests == [1.0, 0.5, PASS_REST_S, 2.0, PASS_REST_S]


def test_a_thread_scrubs_and_ends_with_the_tier(tmp_path: Path) -> None:
    names = chain(40)
    with opened(tmp_path) as tier:
        put(tier, names)
    with opened(tmp_path, scrub_bytes_per_s=1 << 40) as tier:
        thread = tier._scrubber._thread
        assert thread is not None and thread.is_alive()
    assert not thread.is_alive()
    assert tier.counters().scrubbed_bytes in range(0, 41 * RECORD), "one pass at most"


# ---- the quarantine folder


def test_a_damaged_record_is_kept_as_it_was_found(tmp_path: Path) -> None:
    names = chain(10)
    with opened(tmp_path) as tier:
        put(tier, names)
        damage(tier, names[3], PAGE_BYTES + 77)
        path, offset = spot(tier, names[3])
        found = path.read_bytes()[offset : offset + RECORD]
        assert get(tier, names)[0][3] is CORRUPT
        tier.refresh()
        (copy,) = kept(tmp_path)
        assert copy.name == f"00-{path.stem}-{offset // PAGE_BYTES:08x}-checksum.rec"
        assert copy.read_bytes() == found
        header = parse_header(found)
        assert header is not None and header.name == names[3], "who it was can still be told"
        assert tier.counters().quarantined == 1
        tier.check()
    with opened(tmp_path) as tier:
        assert kept(tmp_path) == [copy], "a restart leaves it there"
        tier.check()


def test_damage_of_another_writers_record_is_kept_in_our_own_folder(tmp_path: Path) -> None:
    names = chain(5)
    with opened(tmp_path) as other, opened(tmp_path) as tier:
        put(other, names)
        tier.refresh()
        damage(tier, names[0], 9000)
        assert get(tier, names)[0][0] is CORRUPT
        tier.refresh()
        assert [copy.parent for copy in kept(tmp_path)] == [tmp_path / "01" / "quarantine"]
        assert kept(tmp_path)[0].name.startswith("00-")


def test_the_folder_is_bounded_and_the_newest_stay(tmp_path: Path) -> None:
    """A 64th of the cap, room for it is set aside, so the cap holds whatever goes wrong."""
    rng = random.Random(1)
    with opened(tmp_path) as tier:
        bound = tier._settings.quarantine_bytes
        assert bound == CAPACITY // 64
        for seed in range(60):  # twice what fits: segments are evicted meanwhile
            names = chain(12, seed=seed)
            put(tier, names)
            damage(tier, name := rng.choice(names), 5000)
            assert get(tier, [name])[0] == [CORRUPT]
            tier.refresh()
            copies = kept(tmp_path)
            assert tier._folder.quarantined_bytes() <= bound
            assert disk_bytes(tmp_path) <= CAPACITY
            assert len(copies) >= min(seed + 1, (bound - 8192) // RECORD - 1)
            tier.check()
        assert tier.counters().evictions > 0
        assert tier.counters().quarantined == tier.counters().corrupt == 60


def test_a_smaller_cap_takes_effect_on_what_is_kept(tmp_path: Path) -> None:
    names = chain(8)
    with opened(tmp_path) as tier:
        put(tier, names)
        for name in names:
            damage(tier, name, 5000)
        assert get(tier, names)[0] == [CORRUPT] * 8
    assert len(kept(tmp_path)) == 8
    with opened(tmp_path, 4 << 20) as tier:
        assert tier._folder.quarantined_bytes() <= tier._settings.quarantine_bytes == 64 << 10
        assert 0 < len(kept(tmp_path)) < 8
        tier.check()


def test_a_cap_too_small_for_a_quarantine_only_counts(tmp_path: Path) -> None:
    names = chain(3)
    with opened(tmp_path, 512 << 10, segment_bytes=64 << 10) as tier:
        put(tier, names)
        damage(tier, names[0], 5000)
        assert get(tier, names)[0] == [CORRUPT, OK, OK]
        tier.refresh()
        assert kept(tmp_path) == [] and tier.counters().quarantined == 0 and tier.counters().corrupt == 1
        tier.check()


def test_a_record_too_large_to_be_kept_is_only_counted(tmp_path: Path) -> None:
    (name,) = chain(1)
    payload = bytes(200 << 10)
    with opened(tmp_path, segment_bytes=1 << 20) as tier:
        assert tier.put([BlockWrite(name, PART, memoryview(payload))], soon()) == [OK]
        damage(tier, name, 9000)
        assert tier.get([BlockRead(name, PART, memoryview(bytearray(len(payload))))], soon()) == [CORRUPT]
        tier.refresh()
        assert kept(tmp_path) == [] and tier.counters().corrupt == 1


def test_closing_keeps_what_waits(tmp_path: Path) -> None:
    names = chain(3)
    with opened(tmp_path) as tier:
        put(tier, names)
        damage(tier, names[1], 0)
        assert get(tier, names)[0] == [OK, CORRUPT, OK]
    assert [copy.name.split("-", 3)[3] for copy in kept(tmp_path)] == ["garbage.rec"]
    with opened(tmp_path) as tier:
        assert_readable(tier, [names[0], names[2]])
