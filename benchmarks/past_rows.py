"""Rows that earlier runs have kept, read back from the CSV files below `benchmarks/results/`. Measures nothing."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

from pagetier.benchmarks.report import Report, Row
from pagetier.kvstore.errors import ConfigError

Line = dict[str, str]  # of a CSV file, by the names of its header


def lines_of(path: Path) -> list[Line]:
    """As they were appended; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def row_of(line: Line, target: str | None, source: str) -> Row:
    """The row that was kept as `line`, against `target`. Its note begins with `source`: where it comes from."""
    value, p50, p99 = (float(line[name]) if line[name] else None for name in ("value", "p50", "p99"))
    note = f"{source}; {line['note']}" if line["note"] else source
    return Row(line["name"], value, line["unit"], target, p50, p99, int(line["runs"]), note)


def origin(line: Line) -> str:
    return f"{line['date'][:10]} at {line['commit']} on {line['hardware']}"


def newest(lines: Iterable[Line]) -> dict[str, Line]:
    """Name -> the line of its last measurement, on whatever machine that was; one without a value, such as of a peer
    in a quick run, only where nothing else is known of that name. Names stand as their last lines do."""
    found: dict[str, Line] = {}
    for line in lines:
        former = found.get(line["name"])
        if former is None or (bool(line["value"]), line["date"]) >= (bool(former["value"]), former["date"]):
            found.pop(line["name"], None)
            found[line["name"]] = line
    return found


def recorded_report(bench: str, results: Path, command: str) -> Report:
    """The last known row of each name of `results`/<bench>.csv; a row's note says which run it is of, `machine` on
    what. Raises ConfigError where there are none."""
    path = results / f"{bench}.csv"
    lines = newest(lines_of(path))
    if not lines:
        raise ConfigError(f"--recorded: {path} has no rows; pagetier bench {bench} --quick measures some")
    machines = {name: line["hardware"] for name, line in lines.items()}
    rows = tuple(row_of(line, line["target"] or None, f"of {origin(line)}") for line in lines.values())
    date = max(line["date"] for line in lines.values())
    return Report(bench, "recorded", date, "; ".join(dict.fromkeys(machines.values())), command, rows, machines)
