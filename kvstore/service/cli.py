"""`pagetier store`: the store as a service. Loads nothing of the service before it is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagetier.kvstore import places
from pagetier.kvstore.config import (
    EMBEDDED,
    WARMUP_HELP,
    StoreConfig,
    default_redis_url,
    format_size,
    parse_size,
    parse_tiers,
)
from pagetier.kvstore.errors import ConfigError, PagetierError
from pagetier.kvstore.flags import command

if TYPE_CHECKING:
    from pagetier.kvstore.service.server import ServiceConfig, StoreServer

LISTEN, TIERS = "Who may ask", "Tiers"


def add_commands(app: typer.Typer) -> None:
    """Register this module's command."""
    app.command("store")(command(store, StoreFlags))


def _option(*names: str, panel: str, text: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=text, **more)


@dataclass(frozen=True, slots=True)
class StoreFlags:
    """One field per flag."""

    socket: Annotated[
        Path | None,
        _option("--socket", panel=LISTEN, text="Unix socket, for this user; default: store/store.sock in the cache."),
    ] = None
    listen: Annotated[
        str | None, _option("--listen", panel=LISTEN, text="host:port for TCP as well; needs a token, and TLS.")
    ] = None
    token_file: Annotated[
        Path | None, _option("--token-file", panel=LISTEN, text="File with the secret that every call must bring.")
    ] = None
    tls_cert: Annotated[Path | None, _option("--tls-cert", panel=LISTEN, text="PEM certificate of this store.")] = None
    tls_key: Annotated[Path | None, _option("--tls-key", panel=LISTEN, text="Its PEM key.")] = None
    tls_client_ca: Annotated[
        Path | None, _option("--tls-client-ca", panel=LISTEN, text="PEM; clients must show a certificate of this CA.")
    ] = None
    window_size: Annotated[
        str, _option("--window-size", panel=LISTEN, text="Memory that blocks travel through; a client: a quarter.")
    ] = "256MiB"
    shutdown_timeout: Annotated[
        float, _option("--shutdown-timeout", panel=LISTEN, text="Seconds to write queued blocks at the end.", min=0)
    ] = 10.0
    stop_embedded: Annotated[
        bool, _option("--stop-embedded", panel=LISTEN, text="End the embedded Valkey of this cache folder, and exit.")
    ] = False

    kv_tier: Annotated[str, _option("--kv-tier", panel=TIERS, text="Fastest first, e.g. host,nvme,redis.")] = (
        "host,nvme"
    )
    kv_host_size: Annotated[str, _option("--kv-host-size", panel=TIERS, text="Of the host tier.")] = "1GiB"
    kv_nvme_path: Annotated[
        Path | None, _option("--kv-nvme-path", panel=TIERS, text="Folder; default: nvme in the cache folder.")
    ] = None
    kv_nvme_size: Annotated[str, _option("--kv-nvme-size", panel=TIERS, text="Cap, e.g. 20GiB.")] = "20GiB"
    kv_nvme_io: Annotated[str, _option("--kv-nvme-io", panel=TIERS, text="auto, direct or buffered.")] = "auto"
    kv_nvme_fsync: Annotated[str, _option("--kv-nvme-fsync", panel=TIERS, text="none, segment or always.")] = "segment"
    kv_nvme_scrub: Annotated[
        str, _option("--kv-nvme-scrub", panel=TIERS, text="Bytes a second re-read to find damage; 0: none.")
    ] = "0"
    kv_nvme_allow_unsafe: Annotated[
        bool, _option("--kv-nvme-allow-unsafe", panel=TIERS, text="Take a path in memory, or one all may write to.")
    ] = False
    kv_redis_url: Annotated[
        str | None,
        _option("--kv-redis-url", panel=TIERS, text=f"As for serve; default: $REDIS_URL, else {EMBEDDED}."),
    ] = None
    kv_redis_size: Annotated[str, _option("--kv-redis-size", panel=TIERS, text="Of the embedded server.")] = "4GiB"
    kv_redis_ttl: Annotated[int, _option("--kv-redis-ttl", panel=TIERS, text="Seconds a block lives unused.")] = 86_400
    kv_redis_linger: Annotated[
        float, _option("--kv-redis-linger", panel=TIERS, text="Seconds the embedded server outlives its last user.")
    ] = 600.0
    kv_load_budget_ms: Annotated[
        float, _option("--kv-load-budget-ms", panel=TIERS, text="A request's longest wait for tiers.")
    ] = 1000.0
    kv_warmup: Annotated[str, _option("--kv-warmup", panel=TIERS, text=WARMUP_HELP)] = "0"
    kv_mac_key: Annotated[
        Path | None, _option("--kv-mac-key", panel=TIERS, text="Secret that NVMe and Redis records are made with.")
    ] = None


def store(flags: StoreFlags) -> None:
    """Keep KV blocks for all engines of this host, of one or several models, behind one socket.

    Engines use it with `pagetier serve --kv-store-url local`; on this host blocks pass through shared memory. It may be
    restarted at any time: engines compute meanwhile what they do not find, and come back by themselves.

    Example: pagetier store --kv-tier host,nvme --kv-host-size 4GiB

    Example: pagetier store --listen 10.0.0.5:7070 --tls-cert cert.pem --tls-key key.pem --token-file token
    """
    if flags.stop_embedded:
        _stop_embedded()
        return
    config = service_config(flags)
    asyncio.run(_serve(config))


def service_config(flags: StoreFlags) -> ServiceConfig:
    """What the flags say. Raises ConfigError."""
    from pagetier.kvstore.service.address import read_token
    from pagetier.kvstore.service.server import ServiceConfig

    tiers = parse_tiers(flags.kv_tier)
    if not tiers:
        raise ConfigError.bad_value("--kv-tier", flags.kv_tier, "one or more of host, nvme, redis")
    own = StoreConfig(
        tiers=tiers,
        host_size=parse_size(flags.kv_host_size, "--kv-host-size") if "host" in tiers else 0,
        nvme_path=None if flags.kv_nvme_path is None else flags.kv_nvme_path.expanduser().absolute(),
        nvme_size=parse_size(flags.kv_nvme_size, "--kv-nvme-size"),
        nvme_io=flags.kv_nvme_io,
        nvme_fsync=flags.kv_nvme_fsync,
        nvme_scrub=parse_size(flags.kv_nvme_scrub, "--kv-nvme-scrub"),
        nvme_allow_unsafe=flags.kv_nvme_allow_unsafe,
        redis_url=flags.kv_redis_url or default_redis_url(),
        redis_size=parse_size(flags.kv_redis_size, "--kv-redis-size"),
        redis_ttl_s=flags.kv_redis_ttl,
        redis_linger_s=flags.kv_redis_linger,
        load_budget_s=flags.kv_load_budget_ms / 1e3,
        warmup=parse_size(flags.kv_warmup, "--kv-warmup"),
        mac_key_file=flags.kv_mac_key,
    )
    return ServiceConfig(
        store=own,
        socket=None if flags.socket is None else flags.socket.expanduser().absolute(),
        listen=flags.listen,
        token=None if flags.token_file is None else read_token(flags.token_file),
        tls_cert=flags.tls_cert,
        tls_key=flags.tls_key,
        client_ca=flags.tls_client_ca,
        window_bytes=parse_size(flags.window_size, "--window-size"),
        shutdown_timeout_s=flags.shutdown_timeout,
    )


async def _serve(config: ServiceConfig) -> None:
    """Until SIGTERM or SIGINT; a second one leaves no more time."""
    from pagetier.kvstore.service.server import StoreServer

    server, ending = StoreServer(config), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    await server.start()
    typer.echo(_ready_line(server), err=True)
    await ending.wait()
    ending.clear()
    stopping, again = asyncio.create_task(server.stop()), asyncio.create_task(ending.wait())
    await asyncio.wait((stopping, again), return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if not stopping.done():
        stopping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stopping
        raise PagetierError("ended before all queued blocks were written; they will be computed again")
    if not stopping.result():
        raise PagetierError(
            f"not all queued blocks were written within {config.shutdown_timeout_s:g} s; a longer --shutdown-timeout "
            "leaves more time"
        )


def _ready_line(server: StoreServer) -> str:
    tiers = server.tiers
    names = " > ".join((*tiers.names, *(f"{name} (down)" for name in tiers.left_out))) if tiers is not None else ""
    where = [str(server.socket_path)]
    if server.port:
        host = (server.config.listen or "").rpartition(":")[0]
        where.append(f"{host}:{server.port}{' with TLS' if server.config.tls_cert else ''}")
    window = format_size(server.config.window_bytes)
    return f"store ready at {' and '.join(where)}: tiers {names}, window {window}"


def _stop_embedded() -> None:
    from pagetier.kvstore.redis.embedded import stop_embedded

    ended = stop_embedded(places.redis_dir())
    typer.echo("the embedded Valkey has ended" if ended else "no embedded Valkey was running")
