"""`pagetier bench`: finds a benchmark by name, runs it, or reads what it has kept, prints and keeps its rows. Measures
nothing itself.

Light to import: a benchmark's own module, and torch with it, load when it is run.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pagetier.benchmarks.past_rows import recorded_report
from pagetier.benchmarks.plot import draw, require_matplotlib
from pagetier.benchmarks.report import Report, Row, results_folder, stamped
from pagetier.kvstore.errors import ConfigError

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Bench:
    """A benchmark: what it claims, the module whose `run(full, say)` gives its rows, at the end or one by one, and its
    `--full` minutes on two cores. A module with `PARTS` runs one of them by `run_part(part, full, say)`."""

    claim: str
    module: str
    full_minutes: float

    def run(self, full: bool, say: Say, part: str = "") -> Iterable[Row]:
        module = self._loaded()
        if not part:
            run: Callable[[bool, Say], Iterable[Row]] = module.run
            return run(full, say)
        parts: Collection[str] = getattr(module, "PARTS", ())
        if part not in parts:
            raise ConfigError.bad_value(
                "--only", part, ", ".join(parts) or "not with this benchmark, which has no parts"
            )
        run_part: Callable[[str, bool, Say], Iterable[Row]] = module.run_part
        return run_part(part, full, say)

    def run_seeds(self, num_seeds: int, say: Say) -> Iterable[Row]:
        """Of a benchmark that has seeds: that many."""
        return self._seeded("--seeds", "run_seeds")(num_seeds, say)

    def run_seed(self, seed: int, say: Say) -> Iterable[Row]:
        """Of a benchmark that has seeds: this one again."""
        return self._seeded("--seed", "run_seed")(seed, say)

    def _seeded(self, flag: str, function: str) -> Callable[[int, Say], Iterable[Row]]:
        found: Callable[[int, Say], Iterable[Row]] | None = getattr(self._loaded(), function, None)
        if found is None:
            raise ConfigError(f"{flag}: this benchmark has no seeds; sim has")
        return found

    def draw(self, report: Report, folder: Path) -> Path:
        """The picture of a report: the module's own `draw` where it has one, else bars by unit."""
        picture: Callable[[Report, Path], Path] = getattr(self._loaded(), "draw", draw)
        return picture(report, folder)

    def _loaded(self) -> ModuleType:
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name and error.name.startswith("pagetier"):
                raise
            raise ConfigError(f"this benchmark needs {error.name}: pip install 'pagetier[bench]'") from error


BENCHES = {
    "limits": Bench(
        "what this machine can do at most: memory, multiply-adds, disk, Redis",
        "pagetier.benchmarks.limits.bench",
        full_minutes=3,
    ),
    "cpu": Bench(
        "on a CPU the engine is ahead of every CPU peer and near the machine's own limits",
        "pagetier.benchmarks.cpu.bench",
        full_minutes=35,
    ),
    "profile": Bench(
        "where the time of a decode step and of a prefill step goes",
        "pagetier.benchmarks.profile",
        full_minutes=2,
    ),
    "preemption": Bench(
        "scheduling keeps memory full and work done: pages, iterations, reuse, choices, preemption, long queues",
        "pagetier.benchmarks.preemption.bench",
        full_minutes=25,
    ),
    "tiers": Bench(
        "lower tiers move blocks at what their medium gives, with checksums on every byte",
        "pagetier.benchmarks.tiers.bench",
        full_minutes=5,
    ),
    "recovery": Bench(
        "100,000 records are known again at once after a start, in little memory, and a long prompt is soon found",
        "pagetier.benchmarks.tiers.recovery",
        full_minutes=3,
    ),
    "restart": Bench(
        "after a restart a long prompt's first token comes as soon as its blocks can be read",
        "pagetier.benchmarks.tiers.restart",
        full_minutes=60,
    ),
    "shared": Bench(
        "requests that share a prefix gain by the tiers, never pay for them, and compute it once",
        "pagetier.benchmarks.shared",
        full_minutes=15,
    ),
    "codec": Bench(
        "what the lossless codec makes of real KV, how fast, and how slow a link must be for it to pay",
        "pagetier.benchmarks.codec",
        full_minutes=2,
    ),
    "policies": Bench(
        "no eviction policy leaves clearly more usable prefix tokens in a host tier than the default",
        "pagetier.benchmarks.policies.bench",
        full_minutes=6,
    ),
    "service": Bench(
        "a store in another process costs little, and clients that die leave nothing behind",
        "pagetier.benchmarks.service.bench",
        full_minutes=12,
    ),
    "spine": Bench(
        "16 concurrent greedy requests are no slower than transformers.generate on the same batch and dtype",
        "pagetier.benchmarks.spine",
        full_minutes=8,
    ),
    "sim": Bench(
        "whatever is interleaved, crashes or fails, the store never lies, leaks or takes more than its cap",
        "pagetier.benchmarks.sim",
        full_minutes=20,
    ),
    "runner": Bench(
        "the torch runner alone prefills and decodes no slower than transformers' forward in the same dtype",
        "pagetier.benchmarks.runner_speed",
        full_minutes=6,
    ),
}


@dataclass(frozen=True, slots=True)
class Options:
    """What `pagetier bench` was asked for beside the name."""

    full: bool = False
    as_json: bool = False
    plot: Path | None = None
    part: str = ""
    num_seeds: int | None = None
    seed: int | None = None
    keep: bool = True
    recorded: bool = False

    def argv(self, name: str) -> list[str]:
        """The arguments that make the same run again."""
        argv = ["bench", name, "--recorded" if self.recorded else "--full" if self.full else "--quick"]
        argv += ["--only", self.part] if self.part else []
        argv += ["--seeds", str(self.num_seeds)] if self.num_seeds is not None else []
        argv += ["--seed", str(self.seed)] if self.seed is not None else []
        argv += ["--json"] if self.as_json else []
        return [*argv, "--plot", str(self.plot)] if self.plot is not None else argv


def bench(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(sorted(BENCHES))}.")],
    quick: Annotated[bool, typer.Option("--quick", help="One or two runs at small sizes (the default).")] = False,
    full: Annotated[bool, typer.Option("--full", help="Both sides of every comparison, ABAB, five pairs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the rows into this folder (PNG).")] = None,
    only: Annotated[
        str, typer.Option("--only", help="One part alone, such as own, own.shares, vllm or vllm.mixed_64 of cpu.")
    ] = "",
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, help="`sim`: how many seeds to play.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="`sim`: play this seed again.")] = None,
    keep: Annotated[bool, typer.Option(help="Append the rows below benchmarks/results.")] = True,
    recorded: Annotated[
        bool,
        typer.Option(
            "--recorded",
            help="Run nothing: of every row kept in benchmarks/results/NAME.csv the newest, with where it comes from. "
            "For --json and --plot, too. Missed targets are shown and give exit code 0.",
        ),
    ] = False,
) -> None:
    """Run one benchmark. Exit code 1 when a target is missed; results are appended below benchmarks/results.

    Example: pagetier bench tiers --quick

    Example: pagetier bench tiers --recorded --plot docs/plots
    """
    if quick and full:
        raise ConfigError("--quick and --full exclude each other; give one")
    if seeds is not None and seed is not None:
        raise ConfigError("--seeds and --seed exclude each other; give one")
    if recorded and (quick or full or only or seeds is not None or seed is not None):
        raise ConfigError("--recorded runs nothing: it goes with --json and --plot alone")
    options = Options(full, as_json, plot, only, seeds, seed, keep, recorded)
    exit_code = execute(name, BENCHES, options, results_folder())
    if exit_code:
        raise typer.Exit(exit_code)


def execute(name: str, benches: Mapping[str, Bench], options: Options, results: Path) -> int:
    """Run benches[name], print its rows to stdout, keep them below `results`; the exit code. Each row is kept, and its
    figure told on stderr, as soon as the benchmark gives it: what ends the run does not lose it."""
    if name not in benches:
        raise ConfigError.unknown_name("benchmark", name, benches)
    if options.plot is not None:
        require_matplotlib()
    stderr = Console(stderr=True, highlight=False, soft_wrap=True)
    chosen = benches[name]
    stderr.print(f"{name}: {chosen.claim}")
    if options.recorded:
        report = recorded_report(name, results, " ".join(["pagetier", *options.argv(name)]))
        show(report, chosen, options, stderr)
        return 0  # nothing was measured that could have missed a target
    rows: list[Row] = []
    kept: Path | None = None
    for row in _rows(chosen, options, stderr.print):
        rows.append(row)
        stderr.print(f"  {row.name} {figure(row.value)} {row.unit}")
        if options.keep:
            kept = stamped(name, [row], options.argv(name)).append_csv(results)
    report = stamped(name, rows, options.argv(name))
    if kept is not None:
        stderr.print(f"appended to {kept}")
    show(report, chosen, options, stderr)
    return report.exit_code


def show(report: Report, chosen: Bench, options: Options, stderr: Console) -> None:
    """The rows on stdout, as a table or JSON, and their picture where one was asked for."""
    if options.as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        print_report(report, Console())
    if options.plot is not None:
        stderr.print(f"drawn to {chosen.draw(report, options.plot)}")


def _rows(chosen: Bench, options: Options, say: Say) -> Iterable[Row]:
    if options.num_seeds is not None:
        return chosen.run_seeds(options.num_seeds, say)
    if options.seed is not None:
        return chosen.run_seed(options.seed, say)
    if options.full and not options.part:
        say(f"about {chosen.full_minutes:g} minutes on two cores")
    return chosen.run(options.full, say, options.part)


def print_report(report: Report, console: Console) -> None:
    """A table, and below it the notes, each once with the rows that it belongs to."""
    table = Table(title=f"{report.bench} · {report.commit} · {report.hardware}", title_justify="left")
    table.add_column("name", overflow="fold")  # gives way where the terminal is narrow: figures must stay whole
    for column in ("value", "p50", "p99"):
        table.add_column(column, justify="right", no_wrap=True, min_width=7)
    for column, width in (("unit", 5), ("target", 7), ("ok", 3), ("runs", 4)):
        table.add_column(column, no_wrap=True, min_width=width)
    notes: dict[str, list[str]] = {}
    for row in report.rows:
        judged = ("yes" if row.ok else "NO") if row.target is not None or not row.ok else ""
        numbers = [figure(value) for value in (row.value, row.p50, row.p99)]
        table.add_row(row.name, *numbers, row.unit, row.target or "", judged, str(row.runs))
        if row.note:
            notes.setdefault(row.note, []).append(row.name)
    console.print(table)
    for note, names in notes.items():
        console.print(f"{note}  ({', '.join(names)})", highlight=False, soft_wrap=True)


def figure(value: Any) -> str:
    return "" if value is None else f"{value:.4g}"
