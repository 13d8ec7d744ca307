"""Rows of an earlier full run, for a quick run that has no minutes for the peers."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagetier.benchmarks.past_rows import Line, lines_of, origin, row_of
from pagetier.benchmarks.report import Row

MAX_AGE = datetime.timedelta(days=30)


@dataclass(frozen=True, slots=True)
class PastRuns:
    """The CSV of a benchmark, read as of `now` on a machine with this `cpu` model."""

    path: Path
    cpu: str
    now: datetime.datetime

    def rows(self, missing: Sequence[Row]) -> list[Row]:
        """`missing`, each replaced by the row of its name of the last full run on this CPU model within 30 days; its
        note says which run. Rows that no such run measured stay without a value, and their note says so."""
        latest = self._latest()
        return [self._row(row, latest.get(row.name)) for row in missing]

    def _row(self, missing: Row, line: Line | None) -> Row:
        if line is None:
            note = (
                f"peers are measured by --full alone, and no full run on {self.cpu} is younger than {MAX_AGE.days} days"
            )
            return Row(missing.name, None, missing.unit, missing.target, note=note)
        return row_of(line, missing.target, f"of the full run of {origin(line)}")

    def _latest(self) -> dict[str, Line]:
        """Name -> its youngest usable line: later lines were appended later."""
        return {line["name"]: line for line in lines_of(self.path) if self._is_usable(line)}

    def _is_usable(self, line: Line) -> bool:
        age = self.now - datetime.datetime.fromisoformat(line["date"])
        same_cpu = line["hardware"].startswith(f"{self.cpu}, ")
        return bool(line["value"]) and same_cpu and "--full" in line["command"].split() and age <= MAX_AGE
