"""What a benchmark answers with: rows against targets, where and when they were measured, and how they are kept.

Owns the shape of `pagetier bench --json`, the CSV files below `benchmarks/results/` and the exit code. Knows nothing
of what is measured. No torch at import.
"""

from __future__ import annotations

import csv
import datetime
import math
import operator
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import pagetier
from pagetier.kvstore.errors import ConfigError

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on a row's value, written like ">= 0.90"."""

    comparison: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """Raises ConfigError when `text` is not a comparison and a number."""
        comparison = next((sign for sign in COMPARISONS if text.startswith(sign)), "")
        try:
            bound = float(text.removeprefix(comparison)) if comparison else math.nan
        except ValueError:
            bound = math.nan
        if math.isnan(bound):
            allowed = f"one of {' '.join(COMPARISONS)} and a number, such as '>= 0.90'"
            raise ConfigError.bad_value("target", text, allowed)
        return cls(comparison, bound)

    def met_by(self, value: float) -> bool:
        return COMPARISONS[self.comparison](value, self.bound)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `value`, `p50` and `p99` are in `unit`; `value` None means it could not be measured, and `note` then
    says why. `target` None: reported, not judged. `runs` measurements are behind it."""

    name: str
    value: float | None
    unit: str
    target: str | None = None
    p50: float | None = None
    p99: float | None = None
    runs: int = 1
    note: str = ""

    def __post_init__(self) -> None:
        if self.target is not None:
            Target.parse(self.target)
        if self.value is None and not self.note:
            raise ValueError(f"row {self.name} has no value and no note that says why")

    @property
    def ok(self) -> bool:
        """Whether it was measured and its target, if it has one, is met. NaN meets none."""
        if self.value is None or math.isnan(self.value):
            return False
        return self.target is None or Target.parse(self.target).met_by(self.value)

    def to_dict(self) -> dict[str, Any]:
        """In the order of the published shape."""
        row = asdict(self)
        head = {name: row.pop(name) for name in ("name", "value", "unit", "target")}
        return {**head, "ok": self.ok, **row}


@dataclass(frozen=True, slots=True)
class Report:
    """The rows of one run and where they come from. `date` is UTC, ISO 8601. Of rows that several runs have kept,
    `machines` has the hardware of each, by name."""

    bench: str
    commit: str
    date: str
    hardware: str
    command: str
    rows: tuple[Row, ...]
    machines: Mapping[str, str] = field(default_factory=dict)

    def machine(self, name: str) -> str:
        """What the row of that name was measured on."""
        return self.machines.get(name, self.hardware)

    @property
    def exit_code(self) -> int:
        """0 when every row with a target is ok, else 1."""
        return int(any(row.target is not None and not row.ok for row in self.rows))

    def to_dict(self) -> dict[str, Any]:
        head = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("rows", "machines")}
        return {**head, "rows": [row.to_dict() for row in self.rows]}

    def append_csv(self, folder: Path) -> Path:
        """Append a line per row to `folder`/<bench>.csv, made with its header when new; the file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.bench}.csv"
        stamp = {"date": self.date, "commit": self.commit, "hardware": self.hardware, "command": self.command}
        lines = [{**stamp, **row.to_dict()} for row in self.rows]
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=CSV_COLUMNS, lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerows(lines)
        return path


CSV_COLUMNS = (
    *("date", "commit", "hardware", "command"),
    *("name", "value", "unit", "target", "ok", "p50", "p99", "runs", "note"),
)


def stamped(bench: str, rows: Sequence[Row], argv: Sequence[str]) -> Report:
    """A report of `rows` measured just now, here, by the command line `argv`."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    command = " ".join(["pagetier", *argv])
    return Report(bench, commit(), date, hardware(), command, tuple(rows))


def checkout() -> Path | None:
    """The repository this file lies in; None for an installed wheel."""
    root = Path(__file__).resolve().parents[1]
    return root if (root / "pyproject.toml").is_file() and (root / "kvstore").is_dir() else None


def results_folder() -> Path:
    """Where CSV files go: benchmarks/results of the checkout, or of the working directory for an installed wheel."""
    return (checkout() or Path.cwd()) / "benchmarks" / "results"


def commit() -> str:
    """The short commit with "-dirty" when product files differ from it, or the version outside a repository."""
    root = checkout()
    if root is None:
        return f"v{pagetier.__version__}"
    git = ["git", "-C", str(root)]
    # Results of earlier runs, and texts, lie in the tree and change no figure.
    measured = ["--", ".", ":!benchmarks/results", ":!docs", ":!README.md"]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            [*git, "status", "--porcelain", *measured], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return f"v{pagetier.__version__}"
    return f"{head}-dirty" if dirty else head


def hardware() -> str:
    """One line: CPU model, cores this process may use, memory, and the GPU when torch is loaded and sees one."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    parts = [cpu_model(), f"{num_cores()} cores", f"{memory_bytes / 2**30:.0f} GiB"]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        parts.append(str(torch.cuda.get_device_name()))
    return ", ".join(parts)


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
