"""`pagetier verify`: read every record of a folder or a Redis and say which are not what they should be."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Column, Table

from pagetier.kvstore.block import KEY_BYTES
from pagetier.kvstore.checked import Checked, Verdict
from pagetier.kvstore.cli.options import JsonOption, MacKeyOption, NvmeOption, RedisOption
from pagetier.kvstore.cli.sources import redis_address
from pagetier.kvstore.config import format_size, without_login
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.mac import load_mac_key
from pagetier.kvstore.nvme.verify import FolderAudit
from pagetier.kvstore.redis.tier import RedisTier

MAX_FINDINGS = 100  # shown; all are counted


@dataclass(slots=True)
class Report:
    """What `verify` found in one place. nbytes: of all records read."""

    place: str
    num_records: int = 0
    nbytes: int = 0
    counts: Counter[Verdict] = field(default_factory=Counter)
    domains: Counter[str] = field(default_factory=Counter)
    findings: list[Checked] = field(default_factory=list)
    num_repaired: int = 0
    elapsed_s: float = 0.0

    def add(self, checked: Checked) -> None:
        self.num_records += 1
        self.nbytes += checked.nbytes
        self.counts[checked.verdict] += 1
        if checked.domain is not None:
            self.domains[checked.domain.hex()] += 1
        if checked.verdict is not Verdict.OK and len(self.findings) < MAX_FINDINGS:
            self.findings.append(checked)

    def as_dict(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "records": self.num_records,
            "bytes": self.nbytes,
            **{str(verdict): self.counts[verdict] for verdict in Verdict},
            "repaired": self.num_repaired,
            "domains": dict(self.domains),
            "elapsed_s": round(self.elapsed_s, 3),
            "findings": [
                {
                    "verdict": str(found.verdict),
                    "where": found.where,
                    "key": None if found.key is None else found.key.hex(),
                    "bytes": found.nbytes,
                    "reason": found.reason,
                }
                for found in self.findings
            ],
        }


def verify(
    nvme: NvmeOption = None,
    redis: RedisOption = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Take damaged records out of use: quarantined on NVMe, removed from Redis.")
    ] = False,
    mac_key: MacKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read every record in a place, check it against itself, and report. Servers may go on using the place.

    Without --repair nothing is changed. Exit code 1 when a record is damaged.

    Example: pagetier verify --nvme ~/.cache/pagetier/nvme
    """
    if (nvme is None) == (redis is None):
        raise ConfigError("verify: give one of --nvme DIR and --redis URL")
    for name in ("pagetier.kvstore.nvme", "pagetier.kvstore.redis"):
        logging.getLogger(name).addHandler(logging.NullHandler())  # the report says it
    key = None if mac_key is None else load_mac_key(mac_key.expanduser())
    start_s = time.monotonic()
    report = _of_folder(nvme, key, repair) if nvme is not None else _of_redis(str(redis), key, repair)
    report.elapsed_s = time.monotonic() - start_s
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        _show(report, repair)
    if report.counts[Verdict.DAMAGED]:
        raise typer.Exit(1)


def _of_folder(path: Path, key: bytes | None, repair: bool) -> Report:
    report = Report(str(path.expanduser()))
    audit = FolderAudit(path.expanduser(), key)
    with contextlib.closing(audit):
        for checked in _shown(audit.check(repair=repair), audit.num_records):
            report.add(checked)
        report.num_repaired = audit.num_quarantined
    return report


def _of_redis(url: str, key: bytes | None, repair: bool) -> Report:
    report = Report(without_login(url))
    with contextlib.closing(RedisTier(redis_address(url), bytes(KEY_BYTES))) as tier:
        audit = tier.audit()
        for checked in _shown(audit.check(key, repair=repair), audit.num_names()):
            report.add(checked)
        report.num_repaired = audit.num_removed
    return report


def _shown(records: Iterator[Checked], total: int) -> Iterator[Checked]:
    """The records, with a progress bar on a terminal."""
    console = Console(stderr=True)
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("records", total=total)
        for checked in records:
            progress.advance(task)
            yield checked


def _show(report: Report, repair: bool) -> None:
    damaged, unchecked = report.counts[Verdict.DAMAGED], report.counts[Verdict.UNCHECKED]
    console = Console()
    if report.findings:
        table = Table("what", Column("where", overflow="fold"), "key", "size", Column("why", overflow="fold"))
        for found in report.findings:
            key = "" if found.key is None else found.key.hex()[:12]
            table.add_row(str(found.verdict), found.where, key, format_size(found.nbytes), found.reason)
        console.print(table)
        if damaged + unchecked > len(report.findings):
            typer.echo(f"… and {damaged + unchecked - len(report.findings):,} more")
    speed = report.nbytes / max(report.elapsed_s, 1e-9)
    typer.echo(
        f"{report.place}: {report.num_records:,} records, {len(report.domains):,} cache identities, "
        f"{format_size(report.nbytes)} read in {report.elapsed_s:.1f} s ({format_size(int(speed))}/s)"
    )
    typer.echo(f"{report.counts[Verdict.OK]:,} are sound, {damaged:,} damaged, {unchecked:,} of another MAC key")
    if damaged and repair:
        typer.echo(f"{report.num_repaired:,} were taken out of use")
    elif damaged:
        typer.echo("Servers recompute what is damaged; --repair takes it out of use.")
