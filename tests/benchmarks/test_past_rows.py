"""`pagetier bench --recorded`: of what earlier runs have kept, the newest of each name, and nothing is run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagetier.benchmarks.cli import Bench, Options, Say, bench, execute
from pagetier.benchmarks.past_rows import recorded_report
from pagetier.benchmarks.plot import draw
from pagetier.benchmarks.report import Report, Row
from pagetier.kvstore.errors import ConfigError

EPYC, XEON = "AMD EPYC, 2 cores, 24 GiB", "Intel(R) Xeon(R) Processor, 2 cores, 24 GiB"


@dataclass(frozen=True, slots=True)
class Untouchable(Bench):
    """Must not be run."""

    def run(self, full: bool, say: Say, part: str = "") -> Sequence[Row]:
        raise AssertionError("it was run")

    def draw(self, report: Report, folder: Path) -> Path:
        return draw(report, folder)


BENCHES = {"kept": Untouchable("a claim", "nowhere", 1.0)}


def keep(folder: Path, day: int, hardware: str, *rows: Row) -> None:
    date = f"2026-06-{day:02}T01:02:03+00:00"
    Report("kept", f"c{day}", date, hardware, "pagetier bench kept --quick", rows).append_csv(folder)


def test_the_newest_row_of_each_name_is_taken_wherever_it_was_measured(tmp_path: Path) -> None:
    keep(tmp_path, 2, EPYC, Row("a", 1.0, "ratio", ">= 2"), Row("b", 2.0, "s", p50=1.5, p99=2.5, runs=5, note="busy"))
    keep(tmp_path, 4, XEON, Row("a", 3.0, "ratio", ">= 2"), Row("c", 0.0, "rows", "== 0"))
    keep(tmp_path, 3, EPYC, Row("a", 9.0, "ratio", ">= 2"))  # appended later, as a merge may leave it, yet older
    report = recorded_report("kept", tmp_path, "pagetier bench kept --recorded")
    rows = {row.name: row for row in report.rows}
    assert {name: row.value for name, row in rows.items()} == {"a": 3.0, "b": 2.0, "c": 0.0}
    assert rows["a"].note == f"of 2026-06-04 at c4 on {XEON}" and rows["a"].ok
    assert rows["b"] == Row("b", 2.0, "s", None, 1.5, 2.5, 5, f"of 2026-06-02 at c2 on {EPYC}; busy")
    assert (report.machine("a"), report.machine("b")) == (XEON, EPYC)
    assert set(report.hardware.split("; ")) == {XEON, EPYC}
    assert report.date.startswith("2026-06-04")


def test_a_row_without_a_value_hides_none_that_has_one(tmp_path: Path) -> None:
    keep(tmp_path, 2, EPYC, Row("a", 1.0, "s"), Row("b", None, "s", note="no disk"))
    keep(tmp_path, 3, EPYC, Row("a", None, "s", note="not in a quick run"))
    rows = {row.name: row for row in recorded_report("kept", tmp_path, "").rows}
    assert rows["a"].value == 1.0
    assert rows["b"].value is None and rows["b"].note.endswith("no disk")


def test_recorded_rows_are_shown_and_nothing_is_run_or_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path, 2, EPYC, Row("a", 1.0, "ratio", ">= 2"))
    kept = (tmp_path / "kept.csv").read_text()
    assert execute("kept", BENCHES, Options(as_json=True, recorded=True), tmp_path) == 0, "nothing was measured"
    answer = json.loads(capsys.readouterr().out)
    assert answer["command"] == "pagetier bench kept --recorded --json"
    assert answer["rows"][0]["ok"] is False and "c2" in answer["rows"][0]["note"]
    assert "machines" not in answer
    assert execute("kept", BENCHES, Options(recorded=True), tmp_path) == 0
    assert "NO" in capsys.readouterr().out
    assert (tmp_path / "kept.csv").read_text() == kept


def test_recorded_rows_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the bench extra is not installed")
    keep(tmp_path, 2, EPYC, Row("a", 1.0, "ratio", ">= 2"))
    execute("kept", BENCHES, Options(plot=tmp_path / "plots", recorded=True), tmp_path)
    assert (tmp_path / "plots" / "kept.png").is_file()


def test_without_rows_the_file_and_the_run_that_makes_it_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kept\.csv has no rows; pagetier bench kept --quick") as raised:
        execute("kept", BENCHES, Options(recorded=True), tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "flags",
    [{"quick": True}, {"full": True}, {"only": "own"}, {"seeds": 3}, {"seed": 0}],
    ids=lambda flags: next(iter(flags)),
)
def test_recorded_excludes_what_chooses_a_run(flags: dict[str, bool]) -> None:
    with pytest.raises(ConfigError, match="--recorded runs nothing"):
        bench("cpu", recorded=True, **flags)  # type: ignore[arg-type]
