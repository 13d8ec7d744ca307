"""`bench tiers` and `bench recovery` with tiers and limits that answer at once: what is compared, judged and noted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from pagetier.benchmarks.report import Report
from pagetier.benchmarks.tiers.bench import Comparison, compare
from pagetier.benchmarks.tiers.blocks import Blocks, load_rate, put_rate, store_over
from pagetier.benchmarks.tiers.media import NvmeMedium
from pagetier.benchmarks.tiers.opening import fill, opened
from pagetier.benchmarks.tiers.picture import draw
from pagetier.benchmarks.tiers.recovery import match_row
from pagetier.benchmarks.tiers.restart import Cold, Restarts, restart_rows
from pagetier.kvstore.block import BlockStatus
from pagetier.kvstore.errors import TierUnavailable
from pagetier.kvstore.memory import MemoryTier
from pagetier.kvstore.tier import BlockRead

PAYLOAD_BYTES = 8192


class LyingTier(MemoryTier):
    """Says that all is well and gives other bytes."""

    def get(self, reads: Sequence[BlockRead], deadline_s: float) -> list[BlockStatus]:
        statuses = super().get(reads, deadline_s)
        reads[0].destination[7] ^= 1
        return statuses


class Steady:
    """A medium of which everything is known."""

    how = "a fixed figure"

    def put(self) -> float:
        return 3e9

    def load(self) -> float:
        return 1e9

    def limit_put(self) -> float:
        return 4e9

    def limit_load(self) -> float:
        return 2e9

    @classmethod
    @contextmanager
    def open(cls, blocks: Blocks) -> Iterator[Steady]:
        yield cls()

    @classmethod
    @contextmanager
    def missing(cls, blocks: Blocks) -> Iterator[Steady]:
        raise TierUnavailable("redis", "start", "no server to be had")
        yield cls()


@pytest.fixture(scope="module")
def blocks() -> Blocks:
    return Blocks.random(PAYLOAD_BYTES, 40 * PAYLOAD_BYTES)


def test_blocks_lie_on_pages_and_other_names_share_their_memory(blocks: Blocks) -> None:
    assert blocks.source.ctypes.data % 4096 == blocks.destination.ctypes.data % 4096 == 0
    renamed = blocks.renamed(5)
    assert {name.key for name in renamed.names}.isdisjoint(name.key for name in blocks.names)
    assert renamed.source is blocks.source
    assert (blocks.payload_bytes, blocks.nbytes, len(blocks.sources())) == (PAYLOAD_BYTES, 40 * PAYLOAD_BYTES, 40)


def test_a_chain_goes_through_a_store_and_its_bytes_are_compared(blocks: Blocks) -> None:
    with store_over(MemoryTier(1 << 22), PAYLOAD_BYTES) as store:
        assert put_rate(store, blocks) > 0
        assert load_rate(store, blocks) > 0
    assert not blocks.destination.any()  # wiped: the next load cannot pass with these


def test_other_bytes_than_were_put_are_no_result(blocks: Blocks) -> None:
    with store_over(LyingTier(1 << 22), PAYLOAD_BYTES) as store:
        put_rate(store, blocks)
        with pytest.raises(RuntimeError, match="other bytes"):
            load_rate(store, blocks)


def test_a_tier_is_judged_by_its_share_of_the_limit(blocks: Blocks) -> None:
    steady = Comparison("nvme", Steady.open, ("write", ">= 0.80"), ("read", ">= 0.50"))
    rows = {row.name: row for row in compare(steady, "8KiB", blocks, 2, "busy")}
    write, read = rows["nvme_write_vs_limit_8KiB"], rows["nvme_read_vs_limit_8KiB"]
    assert (write.value, write.ok, write.runs) == (0.75, False, 2)
    assert (read.value, read.ok, read.note) == (0.5, True, "limit: a fixed figure; busy")
    assert (rows["nvme_write_pagetier_8KiB"].value, rows["nvme_write_limit_8KiB"].value) == (3.0, 4.0)


def test_a_medium_that_cannot_be_had_gives_rows_that_say_so(blocks: Blocks) -> None:
    missing = Comparison("redis", Steady.missing, ("put", ">= 0.80"), ("load", ">= 0.85"))
    rows = compare(missing, "8KiB", blocks, 2, "")
    assert [row.name for row in rows] == ["redis_put_vs_limit_8KiB", "redis_load_vs_limit_8KiB"]
    assert all(row.value is None and not row.ok and "no server" in row.note for row in rows)


def test_a_load_is_of_what_the_last_put_left(tmp_path: Path, blocks: Blocks) -> None:
    medium = NvmeMedium(tmp_path, blocks)
    for _ in range(2):
        assert medium.put() > 0
        assert medium.load() > 0


@pytest.mark.parametrize("kill", [False, True])
def test_a_folder_is_opened_by_another_process_that_counts_its_records(tmp_path: Path, kill: bool) -> None:
    fill(tmp_path / "nvme", 300, kill=kill)
    found = opened(tmp_path / "nvme", 300)
    assert 0 < found.seconds < 60
    assert found.resident_bytes >= 0


def test_matching_is_judged_with_hashing() -> None:
    row = match_row(2, "", num_tokens=320)
    assert (row.name, row.unit, row.target) == ("hash_and_match_320_tokens", "ms", "<= 15")
    assert row.ok


def test_the_picture_has_every_measured_share(tmp_path: Path, blocks: Blocks) -> None:
    steady = Comparison("nvme", Steady.open, ("write", ">= 0.80"), ("read", None))
    rows = compare(steady, "8KiB", blocks, 1, "")
    path = draw(Report("tiers", "abc", "2026-01-01", "a machine", "pagetier bench tiers", tuple(rows)), tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_restart_is_judged_by_its_bytes_and_one_step() -> None:
    cold = Cold(took_s=8.0, step_s=0.05, token_ids=[1])
    found = Restarts(warm_s=(0.2, 0.4, 0.3), bytes_per_s=(2e9, 1e9, 2e9), step_s=0.05, cached_tokens=8_000)
    assert found.nbytes == 500 * (360 << 10)
    rows = {row.name: row for row in restart_rows("nvme", 8_000, cold, found, "busy")}
    assert rows["restart_nvme_8000_vs_bytes"].value == pytest.approx(0.4 / (found.nbytes / 1e9 + 0.05))
    assert not rows["restart_nvme_8000_vs_bytes"].ok
    assert rows["restart_nvme_8000_faster_than_recompute"].value == pytest.approx(8.0 / 0.3)
