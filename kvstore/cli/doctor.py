"""`pagetier doctor`: is each tier fit, how fast is it, from how many tokens on does it pay, and what to do about it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from pagetier.kvstore.block import KEY_BYTES, Part
from pagetier.kvstore.cli.live import LiveServer
from pagetier.kvstore.cli.options import OfflineFlags, ServerFlags
from pagetier.kvstore.cli.sources import opened_place, redis_address, refuse_several
from pagetier.kvstore.config import MIB, format_size, without_login
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.measure import measure_tier
from pagetier.kvstore.nvme.files import DIRECT
from pagetier.kvstore.nvme.placement import refuse_unfit
from pagetier.kvstore.redis.tier import RedisTier

TIMEOUT_S = 90.0
PROBE_BYTES = 4 * MIB  # a piece, as loads read them
PROBE_BLOCK = 64 << 10
FULL = 0.95  # of a tier's capacity, from which on it is called full
SLOW_LOOKUP_S = 0.05  # a lookup of eight blocks over a network takes a few milliseconds


@dataclass(slots=True)
class Diagnosis:
    """One tier. figures: as in JSON. faults: why it is unfit. advice: what would make it better."""

    name: str
    figures: dict[str, Any]
    faults: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {**self.figures, "fit": not self.faults, "faults": self.faults, "advice": self.advice}


def doctor(server: ServerFlags, offline: OfflineFlags) -> None:
    """Measure each tier and say in words what is wrong and what to do.

    Latency, bandwidth, capacity, identity, and from how many tokens on a load beats computing. A few blocks of nobody's
    are written and removed for that. Exit code 1 when a tier is unfit.

    Example: pagetier doctor --url http://127.0.0.1:8000
    """
    refuse_several(server, offline)
    if offline.nvme is not None:
        about, tiers = _folder(offline.nvme.expanduser())
    elif offline.redis is not None:
        about, tiers = _redis(offline.redis)
    elif server.store is not None:
        about, tiers = _store(server.store)
    else:
        about, tiers = _server(LiveServer(server.url, server.api_key, server.admin_token))
    if server.as_json:
        typer.echo(json.dumps({**about, "tiers": {one.name: one.as_dict() for one in tiers}}, indent=2))
    else:
        _show(about, tiers)
    if any(one.faults for one in tiers):
        raise typer.Exit(1)


def _server(server: LiveServer) -> tuple[dict[str, Any], list[Diagnosis]]:
    answer = server.get("/doctor", admin=True, timeout_s=TIMEOUT_S)
    tiers = [
        diagnose(name, figures, answer["prefill_s"]) for name, figures in answer["tiers"].items() if name != "device"
    ]
    about = {name: answer[name] for name in ("domain", "block_size", "block_bytes", "prefill_s")}
    return {"place": server.shown, **about}, tiers


def _store(url: str) -> tuple[dict[str, Any], list[Diagnosis]]:
    """A store service. It computes nothing, so it cannot say from which length on a load pays."""
    from pagetier.kvstore.cli.store_place import StorePlace  # gRPC takes a while to load

    with contextlib.closing(StorePlace(url)) as place:
        speeds, figures, domains = place.measure(), place.stats()["tiers"], sorted(place.identities())
    tiers = [diagnose(name, one | (speeds[name].as_dict() if name in speeds else {})) for name, one in figures.items()]
    return {"place": place.shown, "domains": [domain.hex() for domain in domains]}, tiers


def diagnose(name: str, figures: dict[str, Any], prefill_s: list[Any] | None = None) -> Diagnosis:
    """What the figures of a tier that is served mean. prefill_s: the server's own model; None: nobody computes."""
    one = Diagnosis(name, figures)
    if figures.get("breaker") not in (None, "closed"):
        one.faults.append(f"its breaker is {figures['breaker']}: it is left alone after failures; see the server's log")
    elif fault := figures.get("fault"):
        one.faults.append(f"it could not be measured: {fault}")
    elif prefill_s and figures.get("break_even_tokens") is None:
        one.faults.append("a load takes longer than computing at any length; leave it out of --kv-tier")
    if figures.get("corrupt"):
        one.advice.append(f"{figures['corrupt']:,} entries did not verify: run pagetier verify")
    if figures.get("errors"):
        one.advice.append(f"{figures['errors']:,} failed operations since the start: see the server's log")
    if (figures.get("lookup_s") or 0) > SLOW_LOOKUP_S:
        one.advice.append("asking whether a block is there is slow: is it far away?")
    capacity = figures.get("capacity_bytes") or 0
    if capacity and figures["bytes"] > FULL * capacity and figures.get("evictions"):
        flag = {"nvme": "--kv-nvme-size", "host": "--kv-host-size"}.get(name, "its maxmemory")
        one.advice.append(f"it is full and evicts; raise {flag} where hits are missed")
    if prefill_s == []:
        one.advice.append("nothing was computed yet, so it is not known from which length on it pays; ask again later")
    return one


def _folder(path: Path) -> tuple[dict[str, Any], list[Diagnosis]]:
    """A folder without its server: the disk below it, and what lies there."""
    with opened_place(path, None) as place:
        domains = sorted(place.identities())
        blocks = [info for domain in domains for info in place.known(domain)]
    space = os.statvfs(path)
    figures: dict[str, Any] = {"blocks": len(blocks), "bytes": sum(info.nbytes for info in blocks)}
    figures |= {"free_bytes": space.f_bavail * space.f_frsize, "capacity_bytes": space.f_blocks * space.f_frsize}
    one = Diagnosis("nvme", figures)
    try:
        refuse_unfit(path)
    except ConfigError as error:
        one.faults.append(str(error))
    try:
        figures |= probe_folder(path)
    except OSError as error:
        one.faults.append(f"it cannot be written to or read ({error.strerror})")
    if figures["free_bytes"] < 256 * MIB:
        one.advice.append(f"{format_size(figures['free_bytes'])} are free on the disk: new blocks are not stored")
    if not domains:
        one.advice.append("no server has stored anything here yet")
    return {"place": str(path), "domains": [domain.hex() for domain in domains]}, [one]


def probe_folder(path: Path) -> dict[str, float]:
    """Write a file to the disk, read it past the page cache where that can be, remove it. Raises OSError."""
    probe = path / f"doctor-{os.getpid()}.tmp"
    buffer = mmap(-1, PROBE_BYTES)
    buffer.write(os.urandom(PROBE_BYTES))
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            begun_s = time.perf_counter()
            os.pwritev(fd, [buffer], 0)
            os.fdatasync(fd)
            write_s = time.perf_counter() - begun_s
        finally:
            os.close(fd)
        fd = _open_past_cache(probe)
        try:
            begun_s = time.perf_counter()
            os.preadv(fd, [memoryview(buffer)[:PROBE_BLOCK]], 0)
            block_s = time.perf_counter() - begun_s
            begun_s = time.perf_counter()
            os.preadv(fd, [buffer], 0)
            read_s = time.perf_counter() - begun_s
        finally:
            os.close(fd)
    finally:
        with contextlib.suppress(FileNotFoundError):
            probe.unlink()
    rates = {"read_bytes_per_s": PROBE_BYTES / read_s, "write_bytes_per_s": PROBE_BYTES / write_s}
    return {"block_s": block_s, **rates}


def _open_past_cache(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | DIRECT)
    except OSError:  # a file system without direct I/O
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _redis(url: str) -> tuple[dict[str, Any], list[Diagnosis]]:
    """A Redis without a server of ours."""
    address = redis_address(url)
    with contextlib.closing(RedisTier(address, bytes(KEY_BYTES))) as tier:
        speed = measure_tier(tier, Part(0, 0, 1, 0, 1), PROBE_BYTES // 8)
        domains = [] if speed.fault else sorted(tier.identities())
        counters = tier.counters()
    figures: dict[str, Any] = {"blocks": counters.blocks, "bytes": counters.nbytes}
    figures |= {"capacity_bytes": counters.capacity_bytes, "evictions": counters.evictions, **speed.as_dict()}
    one = Diagnosis("redis", figures)
    if speed.fault:
        one.faults.append(f"it could not be measured: {speed.fault}; start it, or check address and login")
    elif not counters.capacity_bytes:
        one.advice.append("it has no maxmemory: set one, with maxmemory-policy allkeys-lru, so that it evicts in time")
    if (speed.lookup_s or 0) > SLOW_LOOKUP_S:
        one.advice.append("asking whether a block is there is slow: is it far away?")
    return {"place": without_login(url), "domains": [domain.hex() for domain in domains]}, [one]


def _show(about: dict[str, Any], tiers: list[Diagnosis]) -> None:
    domains = about.get("domains") or [about[name] for name in ("domain",) if name in about]
    named = ", ".join(domain[:12] for domain in domains) or "none"
    typer.echo(f"{about['place']}: identity {named}")
    table = Table("tier", "lookup", "a block", "read", "write", "used", "of", "pays from", "state")
    for one in tiers:
        figures = one.figures
        pays = figures.get("break_even_tokens")
        table.add_row(
            one.name,
            _ms(figures.get("lookup_s")),
            _ms(figures.get("block_s")),
            _rate(figures.get("read_bytes_per_s")),
            _rate(figures.get("write_bytes_per_s")),
            format_size(figures.get("bytes") or 0),
            format_size(figures["capacity_bytes"]) if figures.get("capacity_bytes") else "no bound",
            "" if pays is None else f"{pays:,} tokens",
            "unfit" if one.faults else "fit",
        )
    Console().print(table)
    for one in tiers:
        for text in one.faults:
            typer.echo(f"{one.name} is unfit: {text}")
        for text in one.advice:
            typer.echo(f"{one.name}: {text}")
    if not tiers:
        typer.echo("There are no tiers below the device; start the server with --kv-tier nvme,redis")


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _rate(bytes_per_s: float | None) -> str:
    return "" if bytes_per_s is None else f"{format_size(int(bytes_per_s))}/s"
