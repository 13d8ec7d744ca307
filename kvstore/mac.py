"""The key of keyed record checksums (proto/FORMAT.md, "Record"): from a file to 64 bytes.

Checksums catch accidents; a MAC catches whoever can write to Redis or the folder but does not know the key. All
processes that share a tier need the same key: what another key made, or none, is a miss and is removed.
"""

from __future__ import annotations

import hashlib
import logging
import stat
from pathlib import Path

from pagetier.kvstore.errors import ConfigError

logger = logging.getLogger(__name__)

FLAG = "--kv-mac-key"
MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 1 << 16
ALLOWED = f"a file of {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, such as `openssl rand -hex 32` writes"


def load_mac_key(path: Path) -> bytes:
    """64 bytes: BLAKE2b-512 of the file's content without the line ends at its end. Never logged or shown.

    Raises ConfigError for a file that cannot be read or is too short or long to be a secret.
    """
    try:
        if not path.is_file():  # a pipe could be read only once, and this process and the engine's both do
            raise ConfigError.bad_value(FLAG, str(path), ALLOWED)
        with path.open("rb") as file:
            secret = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError.bad_value(FLAG, str(path), f"{ALLOWED} ({error.strerror})") from None
    if len(secret) > MAX_SECRET_BYTES or len(secret.rstrip(b"\r\n")) < MIN_SECRET_BYTES:
        raise ConfigError.bad_value(FLAG, str(path), ALLOWED)
    return hashlib.blake2b(secret.rstrip(b"\r\n"), person=b"pgt1-mac-key").digest()


def warn_if_shared(path: Path) -> None:
    """Log it when other users may read the key. Raises OSError."""
    if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning("%s: other users may read %s, and whoever has it can forge KV records; chmod 600", FLAG, path)
