"""`pagetier bench`: names, output, kept results and exit code."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagetier.benchmarks.cli import BENCHES, Bench, Options, Say, bench, execute
from pagetier.benchmarks.plot import draw
from pagetier.benchmarks.report import Report, Row
from pagetier.kvstore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FixedBench(Bench):
    """Answers with given rows instead of measuring."""

    rows: tuple[Row, ...] = ()

    def run(self, full: bool, say: Say, part: str = "") -> Sequence[Row]:
        say(f"full={full} part={part}")
        return self.rows

    def draw(self, report: Report, folder: Path) -> Path:
        return draw(report, folder)


def fixed(*rows: Row) -> dict[str, Bench]:
    return {"fixed": FixedBench("a claim", "nowhere", 1.0, rows)}


def test_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'spine'"):
        bench("spin")


def test_quick_and_full_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="--quick and --full"):
        bench("spine", quick=True, full=True)


def test_json_alone_goes_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benches = fixed(Row("a", 2.0, "ratio", ">= 1"))
    assert execute("fixed", benches, Options(full=True, as_json=True), tmp_path) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["command"] == "pagetier bench fixed --full --json"
    assert answer["rows"][0]["ok"] is True
    assert "full=True" in err
    assert str(tmp_path / "fixed.csv") in err
    assert (tmp_path / "fixed.csv").read_text().count("\n") == 2


def test_a_part_is_in_the_command_that_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    execute("fixed", fixed(Row("a", 1.0, "s")), Options(full=True, part="b"), tmp_path)
    assert "part=b" in capsys.readouterr().err
    assert "pagetier bench fixed --full --only b" in (tmp_path / "fixed.csv").read_text()


@pytest.mark.parametrize(
    ("name", "allowed"), [("cpu", "own, .*vllm, .*vllm.mixed_64, .*llama_cpp"), ("spine", "no parts")]
)
def test_an_unknown_part_is_refused_with_those_there_are(name: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"--only: got 'x'; allowed: .*{allowed}"):
        BENCHES[name].run(False, lambda line: None, "x")


def test_rows_before_a_failure_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(Bench):
        def run(self, full: bool, say: Say, part: str = "") -> Iterator[Row]:
            yield Row("a", 1.5, "s")
            raise TimeoutError

    with pytest.raises(TimeoutError):
        execute("failing", {"failing": Failing("a claim", "nowhere", 1.0)}, Options(), tmp_path)
    assert "a 1.5 s" in capsys.readouterr().err
    assert (tmp_path / "failing.csv").read_text().count("\n") == 2


def test_missed_target_is_shown_and_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute("fixed", fixed(Row("a", 0.5, "ratio", ">= 1")), Options(), tmp_path) == 1
    assert "NO" in capsys.readouterr().out


def test_a_note_is_printed_once_for_all_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row(name, 1.0, "s", note="a busy machine") for name in ("first", "second")]
    execute("fixed", fixed(*rows), Options(), tmp_path)
    assert "a busy machine  (first, second)" in capsys.readouterr().out


def test_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the bench extra is not installed")
    rows = (Row("a", 0.5, "ratio", ">= 1"), Row("b", 3.0, "s"), Row("c", None, "s", note="no disk"))
    execute("fixed", fixed(*rows), Options(plot=tmp_path / "plots"), tmp_path)
    assert (tmp_path / "plots" / "fixed.png").read_bytes().startswith(b"\x89PNG")


def test_missing_library_names_the_extra() -> None:
    with pytest.raises(ConfigError, match="needs no_such_library_here: pip install"):
        Bench("a claim", "no_such_library_here", 1.0).run(False, lambda line: None)


@pytest.mark.parametrize("name", sorted(BENCHES))
def test_every_benchmark_can_be_run_by_name(name: str) -> None:
    assert callable(importlib.import_module(BENCHES[name].module).run)


def test_seeds_are_for_the_benchmark_that_has_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--seeds and --seed"):
        bench("sim", seeds=3, seed=1)
    with pytest.raises(ConfigError, match="has no seeds"):
        execute("limits", BENCHES, Options(num_seeds=3), tmp_path)


def test_a_seed_is_played_again_and_not_kept_when_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute("sim", BENCHES, Options(as_json=True, seed=7, keep=False), tmp_path) == 0
    out, _ = capsys.readouterr()
    answer = json.loads(out)
    assert answer["command"] == "pagetier bench sim --quick --seed 7 --json"
    assert [row["name"] for row in answer["rows"]] == ["violations", "events_per_seed", "operations_per_seed"]
    assert answer["rows"][0]["value"] == 0 and answer["rows"][1]["value"] > 30
    assert not list(tmp_path.iterdir())


def test_a_few_seeds_give_the_rows_that_many_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute("sim", BENCHES, Options(as_json=True, num_seeds=3), tmp_path) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["violations"]["target"] == "== 0" and rows["violations"]["runs"] == 3
    assert rows["seeds_per_s"]["value"] > 0
    assert (tmp_path / "sim.csv").is_file()
