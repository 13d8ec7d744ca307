"""Pins survive their process, end by their time, and bring back what a tier lost; they never take more than a share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from pagetier.kvstore.admin import StoreAdmin
from pagetier.kvstore.errors import CapacityError, ConfigError, PagetierError
from pagetier.kvstore.keeper import PIN_SHARE
from pagetier.kvstore.memory import MemoryTier
from pagetier.kvstore.pins import Pin, PinFile, packed_bytes
from pagetier.kvstore.watch import Watch
from tests.kvstore.rig import PAYLOAD_BYTES, Rig, memory
from tests.kvstore.tier_contract import DOMAIN, addresses, chain

OTHER = b"o" * 32


def keeping(rig: Rig, path: Path) -> StoreAdmin:
    rig.store.admin.keep_pins(PinFile(path), every_s=0)
    return rig.store.admin


def test_a_file_keeps_pins_in_order_and_forgets_those_that_ended(tmp_path: Path) -> None:
    now = 100.0
    file = PinFile(tmp_path / "pins.msgpack", clock=lambda: now)
    long, short = chain(5), chain(3, seed=1)
    assert file.read() == [] and file.state is None
    file.add(Pin(DOMAIN, tuple(long)))
    file.add(Pin(DOMAIN, tuple(short), ("nvme",), 110.0))
    file.add(Pin(OTHER, tuple(short)))
    assert PinFile(tmp_path / "pins.msgpack", clock=lambda: now).read() == file.read()
    assert [pin.pin_id for pin in file.read()] == [long[-1].key.hex(), short[-1].key.hex(), short[-1].key.hex()]
    file.add(Pin(DOMAIN, tuple(short), (), 105.0))  # the same prefix: renewed, not doubled
    assert len(file.read()) == 3
    now = 106.0
    assert [pin.domain for pin in file.read()] == [DOMAIN, OTHER]
    assert file.remove(DOMAIN, ["00" * 32]) == []
    assert [pin.names for pin in file.remove(DOMAIN, None)] == [tuple(long)]
    assert [pin.domain for pin in file.read()] == [OTHER]
    assert (tmp_path / "pins.msgpack").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"", b"\x81", b"\x93\x01\x02\x03", b"not msgpack at all" * 10, b"\x80"])
def test_a_damaged_file_holds_no_pin_and_can_be_written_again(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pins.msgpack"
    path.write_bytes(content)
    file = PinFile(path)
    assert file.read() == []
    file.add(Pin(DOMAIN, tuple(chain(2))))
    assert len(file.read()) == 1


def test_what_the_medium_will_not_give_now_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "pins.msgpack"
    PinFile(path).add(Pin(DOMAIN, tuple(chain(2))))
    kept = path.read_bytes()
    path.rename(tmp_path / "kept")
    path.mkdir()  # reading it fails, whoever one is
    for change in (lambda: PinFile(path).add(Pin(DOMAIN, tuple(chain(3)))), lambda: PinFile(path).remove(DOMAIN, None)):
        with pytest.raises(PagetierError, match="cannot be kept there"):
            change()
    assert PinFile(path).read() == [] and path.is_dir()
    path.rmdir()
    path.write_bytes(kept)
    PinFile(path).add(Pin(DOMAIN, tuple(chain(3))))
    assert len(PinFile(path).read()) == 2


@pytest.mark.parametrize(("max_pins", "max_bytes"), [(3, 1 << 20), (99, 2_500)])
def test_a_full_file_refuses_and_keeps_what_it_has(tmp_path: Path, max_pins: int, max_bytes: int) -> None:
    """Whatever is accepted can be read again; pins of other caches, which nobody here can give up, make room."""
    file = PinFile(tmp_path / "pins", max_pins=max_pins, max_bytes=max_bytes)
    file.add(Pin(OTHER, tuple(chain(4, seed=9))))
    added = 0
    with pytest.raises(CapacityError, match="unpin some"):
        for added in range(20):  # noqa: B007
            file.add(Pin(DOMAIN, tuple(chain(4, seed=added))))
    assert added >= 2
    assert [pin.names for pin in file.read()] == [tuple(chain(4, seed=seed)) for seed in range(added)]
    file.add(Pin(DOMAIN, tuple(chain(4)), expires_s=1e12))  # renewed
    assert len(file.read()) == added and file.read()[-1].expires_s == 1e12
    file.remove(DOMAIN, [chain(4)[-1].key.hex()])
    file.add(Pin(DOMAIN, tuple(chain(4, seed=added))))
    assert len(file.read()) == added


def test_a_files_size_is_foretold(tmp_path: Path) -> None:
    """Names as large as they get: positions take nine bytes."""
    file, name = PinFile(tmp_path / "pins"), chain(1)[0]
    names = tuple(name._replace(position=(1 << 62) + i, tokens=bytes(4 * n)) for i, n in enumerate((1, 16, 970)))
    for pin in (Pin(DOMAIN, names, ("host", "nvme", "redis"), 1e12), Pin(OTHER, names * 50)):
        file.add(pin)
        assert (tmp_path / "pins").stat().st_size <= packed_bytes(file.read())


def test_writers_at_once_lose_no_pin(tmp_path: Path) -> None:
    def add(seed: int) -> None:
        PinFile(tmp_path / "pins.msgpack").add(Pin(DOMAIN, tuple(chain(2, seed=seed))))

    threads = [threading.Thread(target=add, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(PinFile(tmp_path / "pins.msgpack").read()) == 12


def test_impossible_pins_are_refused(tmp_path: Path) -> None:
    with Rig(memory("nvme"), domain=DOMAIN) as rig:
        with pytest.raises(ConfigError, match="keeps no pins"):
            rig.store.admin.pin(chain(2))
        admin = keeping(rig, tmp_path / "pins")
        refusals: list[Callable[[], object]] = [lambda: admin.pin([]), lambda: admin.pin(chain(1), ttl_s=0)]
        for refused in refusals:
            with pytest.raises(ConfigError):
                refused()
        with pytest.raises(ConfigError, match="did you mean 'nvme'"):
            admin.pin(chain(1), tiers=["nvm"])
        with pytest.raises(CapacityError):
            PinFile(tmp_path / "pins").add(Pin(DOMAIN, ()))


def test_a_pinned_prefix_outlives_eviction_in_memory(tmp_path: Path) -> None:
    with Rig(memory("host", 64), domain=DOMAIN) as rig:
        admin, pinned = keeping(rig, tmp_path / "pins"), chain(8)
        rig.put(pinned)
        assert admin.pin(pinned).held == {"host": 8}
        for seed in range(1, 9):
            rig.put(chain(16, seed=seed))
        assert rig.tiers[0].lookup(addresses(pinned), 1e12) == 8
        assert all(info.pinned for info in admin.query([name.key for name in pinned]))
        assert [info.pin.pin_id for info in admin.unpin([pinned[-1].key.hex()])] == [pinned[-1].key.hex()]
        for seed in range(11, 19):
            rig.put(chain(16, seed=seed))
        assert rig.tiers[0].lookup(addresses(pinned), 1e12) == 0


def test_pins_take_a_share_and_no_more(tmp_path: Path) -> None:
    with Rig(memory("host", 64), domain=DOMAIN) as rig:
        admin, names = keeping(rig, tmp_path / "pins"), chain(40)
        rig.put(names)
        share = int(64 * PIN_SHARE)
        assert admin.pin(names[:12]).held == {"host": 12}
        assert admin.pin(chain(6, seed=3)).held == {"host": 0}
        assert [info.held["host"] for info in admin.pins()] == [12, 0]
        admin.pin(names[:30])
        assert sum(info.held["host"] for info in admin.pins()) <= share
        assert isinstance(rig.tiers[0], MemoryTier) and 12 <= rig.tiers[0].num_pinned <= share


def test_all_identities_over_one_tier_share_its_share(tmp_path: Path) -> None:
    """Were it each one's, a few would hold all that lookups may pin, and then all that there is."""
    tier, domains = memory("host", 64), [bytes([i]) * 32 for i in range(4)]
    share, watch = int(64 * PIN_SHARE), Watch.of([tier])
    chains = [chain(6, seed=i) for i in range(len(domains))]
    with ExitStack() as stack:
        rigs = [stack.enter_context(Rig(tier, domain=domain, watch=watch)) for domain in domains]
        stack.enter_context(closing(tier))
        admins = [keeping(rig, tmp_path / "pins") for rig in rigs]
        for rig, names in zip(rigs, chains, strict=True):
            rig.put(names)
        assert [admin.pin(names).held["host"] for admin, names in zip(admins, chains, strict=True)] == [6, 6, 4, 0]
        assert tier.num_pinned == share
        for _ in range(2):
            for admin in admins:
                admin.renew_pins()
            assert tier.num_pinned == share, "a round takes nothing from others"
        admins[0].unpin()
        held = [admin.renew_pins()[0].held["host"] for admin in admins[1:]]
        assert held == [6, 6, 4] and tier.num_pinned == share, "what one gives back others take"
        admins[1].close()
        assert [admin.renew_pins()[0].held["host"] for admin in admins[2:]] == [6, 6], "as does one that ends"
        for admin in admins[2:]:
            admin.close()
        assert tier.num_pinned == 0


def test_a_restart_keeps_pins_and_fills_the_empty_tier_from_the_other(tmp_path: Path) -> None:
    redis, names = memory("redis"), chain(6)
    with Rig(memory("nvme"), redis, domain=DOMAIN) as rig:
        admin = keeping(rig, tmp_path / "pins")
        rig.put(names)
        assert admin.pin(names, ttl_s=3600).held == {"nvme": 6, "redis": 6}
    empty = memory("nvme")
    with Rig(empty, redis, domain=DOMAIN) as rig:
        admin = keeping(rig, tmp_path / "pins")
        (kept,) = admin.renew_pins()
        assert kept.restored == {"nvme": 6} and kept.held == {"nvme": 6, "redis": 6}
        assert empty.lookup(addresses(names), 1e12) == 6
        assert empty.counters().bytes_written == 6 * PAYLOAD_BYTES
        assert admin.renew_pins()[0].restored == {}


def test_what_nobody_has_is_held_once_it_comes(tmp_path: Path) -> None:
    with Rig(memory("nvme"), memory("redis"), domain=DOMAIN) as rig:
        admin, names = keeping(rig, tmp_path / "pins"), chain(4)
        assert admin.pin(names, tiers=["nvme"]).held == {"nvme": 0}
        rig.put(names)
        assert admin.renew_pins()[0].held == {"nvme": 4}
        assert admin.pins()[0].as_dict()["tiers"] == ["nvme"]


def test_a_tier_that_is_down_costs_nobody_else_its_pins(tmp_path: Path) -> None:
    down = memory("nvme")
    with Rig(down, memory("redis"), domain=DOMAIN) as rig:
        admin, names = keeping(rig, tmp_path / "pins"), chain(4)
        rig.put(names)
        down.faults.down = True
        assert admin.pin(names).held == {"redis": 4}
        down.faults.down = False
