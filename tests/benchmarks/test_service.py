"""The rows of `pagetier bench service`, at sizes that say nothing about speed."""

from __future__ import annotations

import pytest

from pagetier.benchmarks.service import bench


def test_loads_through_a_service_are_compared_with_those_in_process() -> None:
    rows = {row.name: row for row in bench.load_rows("host", 1, lambda text: None, "a note", total_bytes=8 << 20)}
    assert rows.keys() == {
        *("shared_vs_in_process_host", "shared_load_host", "shared_put_host", "grpc_load_host", "start_host")
    }
    assert all(row.value is not None and row.value > 0 for row in rows.values())


@pytest.mark.slow
def test_a_crowd_leaves_nothing() -> None:
    rows = {row.name: row for row in bench.crowd_rows(12.0, lambda text: None, "", num_clients=3)}
    assert rows["crowd_leaked_leases_and_pins"].value == rows["crowd_wrong_blocks"].value == 0
    assert rows["crowd_failed_clients"].value == 0
