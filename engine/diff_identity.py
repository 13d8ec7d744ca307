"""`pagetier diff-identity A B`: field by field, why two caches do not share. Loads the engine only for a model."""

from __future__ import annotations

import json
import logging
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from pagetier.engine.requirements import require_engine
from pagetier.kvstore import places
from pagetier.kvstore.cli.options import ApiKeyOption, JsonOption
from pagetier.kvstore.config import MIB, StoreConfig
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.identity import Difference, diff
from pagetier.kvstore.identity_places import FoundIdentity, is_domain, read_identity

PLACE_HELP = (
    "A server's http:// address, store: and a store's address, an NVMe folder, redis://…, embedded, a model, or a "
    "domain; #ab12 picks one."
)
MODEL_POOL = 256 * MIB  # of the engine that a model is asked through; untouched memory costs nothing
# What a difference in a field means for whoever wants the two to share, by its first word.
MEANINGS = {
    "architecture": "another kind of model",
    "attention": "another model, or its config was changed",
    "block_size": "--block-size",
    "format_version": "another version of Pagetier",
    "groups": "another shape or dtype of KV; see --dtype",
    "hash_name": "--kv-hash",
    "kv_format": "another format of stored KV",
    "layout": "another order of bytes in a block",
    "lora_digest": "another adapter",
    "numerics": "other rounding; see --dtype and --cpu-kernels",
    "weights_fingerprint": "other weights, be it in one tensor",
    "weights_version": "weights that were changed in place; see --weights-version",
}


def diff_identity(
    a: Annotated[str, typer.Argument(metavar="A", help=PLACE_HELP)],
    b: Annotated[str, typer.Argument(metavar="B", help="Likewise.")],
    inside: Annotated[
        str | None, typer.Option("--in", help="Where domains are looked up; default: the other place, else NVMe's.")
    ] = None,
    as_json: JsonOption = False,
    api_key: ApiKeyOption = None,
    dtype: Annotated[str, typer.Option("--dtype", help="For models: as for serve.")] = "auto",
    block_size: Annotated[int, typer.Option("--block-size", help="For models: as for serve.")] = 16,
    cpu_kernels: Annotated[str, typer.Option("--cpu-kernels", help="For models: as for serve.")] = "auto",
    kv_hash: Annotated[str, typer.Option("--kv-hash", help="For models: as for serve.")] = "sha256",
    weights_version: Annotated[str, typer.Option("--weights-version", help="For models: as for serve.")] = "",
) -> None:
    """Show field by field why two caches do not share blocks.

    A model is identified as `pagetier serve` on this machine would: it is loaded for that. Exit code 0 when the two are
    the same, 1 when they differ, 2 when one cannot be read.

    Example: pagetier diff-identity http://127.0.0.1:8000 http://127.0.0.1:8001
    """
    logging.getLogger("pagetier.kvstore.redis").addHandler(logging.NullHandler())  # our own line says what is wrong
    flags: dict[str, Any] = {"dtype": dtype, "block_size": block_size, "cpu_kernels": cpu_kernels}
    flags |= {"kv_hash": kv_hash, "weights_version": weights_version}
    one, other = (_found(text, rest, inside, api_key, flags) for text, rest in ((a, b), (b, a)))
    differences = diff(one.identity, other.identity)
    if as_json:
        typer.echo(json.dumps(_as_json(one, other, differences), ensure_ascii=False, indent=2))
    elif differences:
        for letter, found in (("A", one), ("B", other)):
            typer.echo(f"{letter}: {found.place}, domain {found.identity.domain().hex()[:12]}")
        Console().print(_table(differences))
        typer.echo("Where one of these differs, neither uses blocks of the other.")
    else:
        typer.echo(f"the same: {one.place} and {other.place} share, domain {one.identity.domain().hex()[:12]}")
    if differences:
        raise typer.Exit(1)


def _found(text: str, other: str, inside: str | None, api_key: str | None, flags: dict[str, Any]) -> FoundIdentity:
    """The identity that an argument names. Raises ConfigError."""
    if is_domain(text):
        place = inside or (str(places.nvme_dir()) if is_domain(other) else other.partition("#")[0])
        text = f"{place}#{text}"
    found = read_identity(text, api_key)
    return _of_model(text, flags) if found is None else found


def _of_model(name: str, flags: dict[str, Any]) -> FoundIdentity:
    """The identity of a model's KV on this machine, as the engine itself states it."""
    require_engine("diff-identity")
    from pagetier.engine.build import ServeConfig, build_engine

    config = ServeConfig(model=name, kv_cache_memory=MODEL_POOL, store=StoreConfig(), **flags)
    try:
        engine = build_engine(config)
    except ConfigError as error:
        raise ConfigError(f"{name!r}: {error}") from None
    identity = engine.identity
    engine.close()
    return FoundIdentity(name, identity)


def _as_json(one: FoundIdentity, other: FoundIdentity, differences: list[Difference]) -> dict[str, Any]:
    """A side that lacks a field lacks its key."""
    return {
        "same": not differences,
        "a": _side(one),
        "b": _side(other),
        "fields": [{"field": difference.field, **difference.sides} for difference in differences],
    }


def _side(found: FoundIdentity) -> dict[str, str]:
    return {"place": found.place, "domain": found.identity.domain().hex()}


def _table(differences: list[Difference]) -> Table:
    table = Table(Column("field", no_wrap=True), Column("A", overflow="fold"), Column("B", overflow="fold"), "means")
    for difference in differences:
        values = [_text(difference.sides[side]) if side in difference.sides else "absent" for side in ("a", "b")]
        table.add_row(difference.field, *values, MEANINGS.get(difference.field.split(".")[0].split("[")[0], ""))
    return table


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value else repr(value)
