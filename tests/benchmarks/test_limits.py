"""The limits program compiles, gives sane figures for tiny sizes, and says why when it cannot."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from pagetier.benchmarks.limits.bench import best, disk_rows, fio_disk, peak_rows
from pagetier.benchmarks.limits.program import Clock, LimitsError, LimitsProgram, PeakLimits
from pagetier.benchmarks.limits.redis_limits import NUM_KEYS, PIPELINE, VALUE_BYTES, RedisLoop
from tests.kvstore.valkey import Valkey, valkey, valkey_server  # noqa: F401

SHORT = Clock(threads=2, seconds=0.02, runs=2)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> LimitsProgram:
    return LimitsProgram(tmp_path_factory.mktemp("compiled"))


def test_compiled_once(program: LimitsProgram) -> None:
    made = program.path.stat().st_mtime_ns
    assert LimitsProgram(program.path.parent).path.stat().st_mtime_ns == made


@pytest.mark.parametrize("pinned", [False, True])
def test_memory_moves_at_a_sane_speed(program: LimitsProgram, pinned: bool) -> None:
    clock = Clock(2, 0.02, 2, pinned)
    for rates in (program.read(clock, 1 << 20), program.copy(clock, 1 << 20)):
        assert len(rates) == 2
        assert all(1e7 < rate < 1e13 for rate in rates)


def test_peak_is_a_sane_rate_and_names_its_path(program: LimitsProgram) -> None:
    found = program.peak(SHORT)
    if found.f32_path is None:
        pytest.skip("the program has no path for this CPU")
    assert len(found.f32) == len(found.bf16) == 2
    assert all(1e7 < rate < 1e15 for rate in (*found.f32, *found.bf16))
    assert found.bf16_path is not None


def test_disk_reads_and_writes_and_leaves_nothing(program: LimitsProgram, tmp_path: Path) -> None:
    try:
        found = program.disk(tmp_path / "file", SHORT, 1 << 20, 1 << 16)
    except LimitsError as error:
        pytest.skip(f"no O_DIRECT on this file system: {error}")
    assert all(rate > 1e4 for rate in (*found.read, *found.write))
    assert not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_written_is_named(program: LimitsProgram, tmp_path: Path) -> None:
    with pytest.raises(LimitsError, match="nowhere"):
        program.disk(tmp_path / "nowhere" / "file", SHORT, 1 << 20, 1 << 16)


def test_an_existing_file_is_not_overwritten(program: LimitsProgram, tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    with pytest.raises(LimitsError, match="exists"):
        program.disk(tmp_path / "precious", SHORT, 1 << 20, 1 << 16)
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_arguments_out_of_range_are_refused(program: LimitsProgram) -> None:
    with pytest.raises(LimitsError, match="in range"):
        program.read(Clock(threads=0))
    with pytest.raises(LimitsError, match="in range"):
        program.peak(Clock(threads=1, runs=1000))


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LimitsError, match="no C compiler"):
        LimitsProgram(tmp_path / "compiled")


def test_a_ceiling_is_the_best_run_with_the_middle_beside_it() -> None:
    row = best("x", [1e9, 3e9, 2e9], 1e9, "GB/s", "")
    assert (row.value, row.p50, row.runs, row.target) == (3.0, 2.0, 3, None)


def test_a_cpu_without_a_path_gives_rows_without_values() -> None:
    rows = peak_rows("threads_1", PeakLimits((), None, (), None), "")
    assert [row.name for row in rows] == ["peak_bf16_threads_1", "peak_fp32_threads_1"]
    assert all(row.value is None and row.note for row in rows)


def test_disk_rows_say_what_measured_them(
    program: LimitsProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGETIER_CACHE_DIR", str(tmp_path))
    rows = disk_rows(program, 0.02, 1, "a busy machine")
    assert [row.name for row in rows] == ["disk_read", "disk_write"]
    assert all(row.note for row in rows)
    assert not list(tmp_path.iterdir())


def test_fio_answers_are_read_past_its_warnings(tmp_path: Path) -> None:
    tool = tmp_path / "fio"
    answers = {kind: json.dumps({"jobs": [{kind: {"bw_bytes": rate}}]}) for kind, rate in (("read", 5), ("write", 7))}
    script = f"#!/bin/sh\necho 'note: both iodepth'\ncase \"$*\" in *rw=read*) echo '{answers['read']}';; *) echo '{answers['write']}';; esac\n"  # noqa: E501
    tool.write_text(script)
    tool.chmod(0o755)
    found = fio_disk(str(tool), tmp_path / "file", Clock(8, 0.1, 2), 1 << 20, 1 << 16)
    assert (found.read, found.write) == ((5.0, 5.0), (7.0, 7.0))


def test_redis_loop_moves_whole_values_both_ways(valkey: Valkey) -> None:  # noqa: F811
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(20.0)
        connection.connect(str(valkey.socket_path))
        loop = RedisLoop(connection)
        assert loop.rate(loop.set_some, 0.0) > 0
        for _ in range(NUM_KEYS // PIPELINE):
            loop.set_some()
        assert loop.rate(loop.get_some, 0.0) > 0
        assert valkey.client().dbsize() >= NUM_KEYS
        assert valkey.client().strlen("limits-3") == VALUE_BYTES
