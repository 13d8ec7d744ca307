"""The published shape, the verdicts and the exit code of a benchmark's report."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetier.benchmarks.report import Report, Row, Target, commit, hardware, stamped
from pagetier.kvstore.errors import ConfigError


def report_of(*rows: Row) -> Report:
    return Report("example", "abc", "2026-01-02T03:04:05+00:00", "a machine", "pagetier bench example", rows)


@pytest.mark.parametrize(
    ("text", "meets", "misses"),
    [(">= 0.90", 0.9, 0.89), ("<=5", 5, 5.1), ("> 1e3", 1001, 1000), ("< 2", 1.9, 2), ("== 0", 0, 1)],
)
def test_target_judges(text: str, meets: float, misses: float) -> None:
    target = Target.parse(text)
    assert target.met_by(meets)
    assert not target.met_by(misses)


@pytest.mark.parametrize("text", ["", "0.9", ">=", ">= much", "=> 1", "~ 3", ">= nan"])
def test_bad_target_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="target"):
        Target.parse(text)
    with pytest.raises(ConfigError, match="target"):
        Row("x", 1.0, "s", text)


@given(st.sampled_from([">=", "<=", ">", "<"]), st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_target_agrees_with_the_language(sign: str, bound: float, value: float) -> None:
    assert Target.parse(f"{sign} {bound!r}").met_by(value) is eval(f"{value!r} {sign} {bound!r}")


def test_unmeasured_row_is_not_ok_and_says_why() -> None:
    assert not Row("x", None, "s", note="no disk").ok
    with pytest.raises(ValueError, match="no note"):
        Row("x", None, "s")


def test_nan_is_not_ok() -> None:
    assert not Row("x", float("nan"), "s", "< 1").ok


@pytest.mark.parametrize(
    ("rows", "exit_code"),
    [
        ([], 0),
        ([Row("a", 1.0, "ratio", ">= 1")], 0),
        ([Row("a", 1.0, "ratio", ">= 1"), Row("b", 2.0, "s", "<= 1")], 1),
        ([Row("a", None, "ratio", ">= 1", note="no disk")], 1),
        ([Row("a", None, "ratio", note="no disk"), Row("b", 3.0, "s")], 0),
    ],
)
def test_exit_code_is_the_verdict_on_rows_with_a_target(rows: list[Row], exit_code: int) -> None:
    assert report_of(*rows).exit_code == exit_code


def test_json_has_the_published_shape() -> None:
    report = report_of(Row("nvme_read", 0.93, "ratio", ">= 0.90", p50=0.93, p99=0.91, runs=5))
    assert json.loads(json.dumps(report.to_dict())) == {
        "bench": "example",
        "commit": "abc",
        "date": "2026-01-02T03:04:05+00:00",
        "hardware": "a machine",
        "command": "pagetier bench example",
        "rows": [
            {
                "name": "nvme_read",
                "value": 0.93,
                "unit": "ratio",
                "target": ">= 0.90",
                "ok": True,
                "p50": 0.93,
                "p99": 0.91,
                "runs": 5,
                "note": "",
            }
        ],
    }


def test_csv_grows_below_one_header(tmp_path: Path) -> None:
    first = report_of(Row("a", 1.5, "s", note='commas, "quotes"\nand lines'), Row("b", None, "s", note="no disk"))
    path = first.append_csv(tmp_path / "results")
    assert report_of(Row("c", 2.0, "s", "<= 1")).append_csv(tmp_path / "results") == path
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["name"] for line in lines] == ["a", "b", "c"]
    assert [line["value"] for line in lines] == ["1.5", "", "2.0"]
    assert [line["ok"] for line in lines] == ["True", "False", "False"]
    assert lines[0]["note"] == 'commas, "quotes"\nand lines'
    assert {line["command"] for line in lines} == {"pagetier bench example"}


def test_stamp_names_commit_machine_and_command() -> None:
    report = stamped("example", [Row("a", 1.0, "s")], ["bench", "example", "--quick"])
    assert report.command == "pagetier bench example --quick"
    assert report.commit == commit() != ""
    assert report.hardware == hardware()
    assert "cores" in report.hardware
    assert "GiB" in report.hardware
    assert report.date.endswith("+00:00")
