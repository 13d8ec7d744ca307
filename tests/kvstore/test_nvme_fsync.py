"""What --kv-nvme-fsync brings to the disk, and when: seen at the seam."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pagetier.kvstore.block import BlockStatus
from pagetier.kvstore.nvme.files import Buffer, Files
from pagetier.kvstore.nvme.tier import NvmeTier
from tests.kvstore.tier_contract import DOMAIN, chain, put

CAPACITY = 4 << 20


class Journal(Files):
    """Writes down, in order, what is written and what is synced, by name."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.entries: list[tuple[str, str]] = []

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        self.names[fd] = path.name if path.stem == "probe" else path.name.replace(".tmp", ".seg")
        return fd

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self.entries.append(("write", self.names[fd]))
        return super().pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self.entries.append(("sync", self.names[fd]))
        super().sync(fd)

    def take(self) -> list[tuple[str, str]]:
        taken, self.entries = self.entries, []
        return taken

    def unsynced(self) -> set[str]:
        """Files with a write after their last sync, or without one."""
        last = {name: act for act, name in self.entries}
        return {name for name, act in last.items() if act == "write" and name.endswith(".seg")}


def opened(path: Path, files: Files, fsync: str) -> NvmeTier:
    return NvmeTier(path, CAPACITY, DOMAIN, fsync=fsync, files=files, refresh_s=0, segment_bytes=256 << 10)


def test_none_never_waits_for_the_disk(tmp_path: Path) -> None:
    files = Journal()
    with opened(tmp_path / "nvme", files, "none") as tier:
        files.take()  # a folder that is made is synced once
        put(tier, chain(60))
    assert "sync" not in {act for act, _ in files.entries}


def test_segment_leaves_only_the_open_segment_to_a_power_cut(tmp_path: Path) -> None:
    files = Journal()
    with opened(tmp_path / "nvme", files, "segment") as tier:
        for seed in range(12):
            assert put(tier, chain(6, seed=seed)) == [BlockStatus.OK] * 6
            names = sorted({name for _, name in files.entries if name.endswith(".seg")})
            assert files.unsynced() <= {names[-1]}
        assert len(names) > 2
    assert not files.unsynced(), "closing the tier closes its segment"


def test_always_has_synced_what_a_put_answers(tmp_path: Path) -> None:
    files = Journal()
    with opened(tmp_path / "nvme", files, "always") as tier:
        for seed in range(12):
            assert put(tier, chain(6, seed=seed)) == [BlockStatus.OK] * 6
            assert not files.unsynced()


@pytest.mark.parametrize("fsync", ["segment", "always"])
def test_a_new_segment_is_known_to_its_folders_before_it_is_used(tmp_path: Path, fsync: str) -> None:
    files = Journal()
    with opened(tmp_path / "nvme", files, fsync) as tier:
        files.take()
        put(tier, chain(1))
        entries = files.take()
        first_record = [i for i, (act, name) in enumerate(entries) if act == "write" and name.endswith(".seg")][1]
        assert {"00", "nvme"} <= {name for act, name in entries[:first_record] if act == "sync"}
