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
from pagetier.kvstore.config import StoreConfig, format_size, parse_size, parse_tiers
from pagetier.kvstore.errors import ConfigError, PagetierError
from pagetier.kvstore.flags import command
from pagetier.kvstore.tier_flags import TierFlags, tier_option

if TYPE_CHECKING:
    from pagetier.kvstore.service.server import ServiceConfig, StoreServer

LISTEN = "Who may ask"


def add_commands(app: typer.Typer) -> None:
    """Register this module's command."""
    app.command("store")(command(store, StoreFlags, TierFlags))


def _option(*names: str, text: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=LISTEN, help=text, **more)


@dataclass(frozen=True, slots=True)
class StoreFlags:
    """One field per flag."""

    socket: Annotated[
        Path | None,
        _option("--socket", text="Unix socket, for this user; default: store/store.sock in the cache."),
    ] = None
    listen: Annotated[str | None, _option("--listen", text="host:port for TCP as well; needs a token, and TLS.")] = None
    token_file: Annotated[
        Path | None, _option("--token-file", text="File with the secret that every call must bring.")
    ] = None
    tls_cert: Annotated[Path | None, _option("--tls-cert", text="PEM certificate of this store.")] = None
    tls_key: Annotated[Path | None, _option("--tls-key", text="Its PEM key.")] = None
    tls_client_ca: Annotated[
        Path | None, _option("--tls-client-ca", text="PEM; clients must show a certificate of this CA.")
    ] = None
    window_size: Annotated[
        str, _option("--window-size", text="Memory that blocks travel through; a client: a quarter.")
    ] = "256MiB"
    shutdown_timeout: Annotated[
        float, _option("--shutdown-timeout", text="Seconds to write queued blocks at the end.", min=0)
    ] = 10.0
    stop_embedded: Annotated[
        bool, _option("--stop-embedded", text="End the embedded Valkey of this cache folder, and exit.")
    ] = False

    kv_tier: Annotated[str, tier_option("--kv-tier", text="Tiers, fastest first, e.g. host,nvme,redis.")] = "host,nvme"
    kv_host_size: Annotated[str, tier_option("--kv-host-size", text="Of the host tier.")] = "1GiB"


def store(flags: StoreFlags, tiers: TierFlags) -> None:
    """Keep KV blocks for all engines of this host, of one or several models, behind one socket.

    Engines use it with `pagetier serve --kv-store-url local`; on this host blocks pass through shared memory. It may be
    restarted at any time: engines compute meanwhile what they do not find, and come back by themselves.

    Example: pagetier store --kv-tier host,nvme --kv-host-size 4GiB

    Example: pagetier store --listen 10.0.0.5:7070 --tls-cert cert.pem --tls-key key.pem --token-file token
    """
    if flags.stop_embedded:
        _stop_embedded()
        return
    config = service_config(flags, tiers)
    asyncio.run(_serve(config))


def service_config(flags: StoreFlags, tiers: TierFlags) -> ServiceConfig:
    """What the flags say. Raises ConfigError."""
    from pagetier.kvstore.service.address import read_token
    from pagetier.kvstore.service.server import ServiceConfig

    names = parse_tiers(flags.kv_tier)
    if not names:
        raise ConfigError.bad_value("--kv-tier", flags.kv_tier, "one or more of host, nvme, redis")
    host_size = parse_size(flags.kv_host_size, "--kv-host-size") if "host" in names else 0
    own = StoreConfig(tiers=names, host_size=host_size, **tiers.store_fields())
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
