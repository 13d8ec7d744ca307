"""Where Pagetier keeps files: the cache folder, its sub-folders, and the one limit on Unix socket paths.

Owns the environment variables that choose the folder; does not know what is put there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pagetier.kvstore.errors import ConfigError

MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path holds 108 with its final zero (Linux unix(7))


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The cache folder, made with mode 0700 when missing.

    `PAGETIER_CACHE_DIR`, else `$XDG_CACHE_HOME/pagetier`, else `~/.cache/pagetier`. An existing folder's mode is left
    alone. Raises ConfigError, naming the variable that chose it, when it cannot be made or is not a folder.
    """
    source, path = _choose(environ)
    return _make(path, source)


def models_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """`<cache>/models`, made when missing: fetched checkpoints."""
    return _sub_folder("models", environ)


def nvme_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """`<cache>/nvme`, made when missing: the default of `--kv-nvme-path`."""
    return _sub_folder("nvme", environ)


def redis_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """`<cache>/redis`, made when missing: the embedded Valkey's socket, locks and log."""
    return _sub_folder("redis", environ)


def store_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """`<cache>/store`, made when missing: the sockets of a store service."""
    return _sub_folder("store", environ)


def pins_path(environ: Mapping[str, str] = os.environ) -> Path:
    """`<cache>/pins/pins.msgpack`, its folder made when missing: what people pinned."""
    return _sub_folder("pins", environ) / "pins.msgpack"


def hot_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """`<cache>/hot`, made when missing: what was used most, a file for each cache; for warm-up."""
    return _sub_folder("hot", environ)


def kernels_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """`<cache>/kernels`, made when missing: compiled kernels."""
    return _sub_folder("kernels", environ)


def check_socket_path(path: Path) -> Path:
    """`path` itself. Raises ConfigError that names it when the kernel could not bind a Unix socket there."""
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"Unix socket path {str(path)!r} has {length} bytes; allowed: at most {MAX_SOCKET_PATH_BYTES}"
            " (set PAGETIER_CACHE_DIR to a shorter folder)"
        )
    return path


def make_private_dir(path: Path) -> Path:
    """Make `path` and its parents with mode 0700 where they are missing. Raises OSError."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is not a folder")
    return path


def _sub_folder(name: str, environ: Mapping[str, str]) -> Path:
    source, path = _choose(environ)
    return _make(path / name, source)


def _choose(environ: Mapping[str, str]) -> tuple[str, Path]:
    """What chose the folder, and the folder. An empty variable counts as unset, as XDG asks."""
    if chosen := environ.get("PAGETIER_CACHE_DIR"):
        return "PAGETIER_CACHE_DIR", Path(chosen).expanduser().absolute()
    if (base := environ.get("XDG_CACHE_HOME")) and os.path.isabs(base):  # XDG: relative paths are to be ignored
        return "XDG_CACHE_HOME", Path(base) / "pagetier"
    home = environ.get("HOME") or os.path.expanduser("~")
    return "HOME", Path(home).absolute() / ".cache" / "pagetier"


def _make(path: Path, source: str) -> Path:
    try:
        return make_private_dir(path)
    except OSError as error:
        raise ConfigError.bad_value(source, str(path), f"a folder that can be written ({error})") from error
