"""The hottest blocks of a cache, as they were when its last process ended: what a start may warm up with.

Owns the file and the order; reads no tier. msgpack, replaced as a whole; of several processes the last to end counts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgpack

from pagetier.kvstore.block import BlockName
from pagetier.kvstore.book import Entry
from pagetier.kvstore.pins import checked_name

logger = logging.getLogger(__name__)

VERSION = 1
MAX_HOT_BLOCKS = 65_536  # a million tokens; some 12 MB
MAX_FILE_BYTES = 64 << 20


def hot_order(entries: Iterable[Entry]) -> list[BlockName]:
    """Names by hits, then by last use, heads of chains first. A block is at least as hot as any that needs it."""
    known = {entry.name.key: entry for entry in entries}
    heat = {key: (entry.hits, entry.used_s) for key, entry in known.items()}
    for entry in sorted(known.values(), key=lambda entry: -entry.name.position):
        if entry.name.parent in heat:
            heat[entry.name.parent] = max(heat[entry.name.parent], heat[entry.name.key])
    by_position = sorted((entry.name for entry in known.values()), key=lambda name: name.position)
    return sorted(by_position, key=lambda name: heat[name.key], reverse=True)


class HotFile:
    """The hottest blocks of one domain. Never raises: without it a start goes by recency."""

    def __init__(self, folder: Path, domain: bytes) -> None:
        self._path = folder / f"{domain.hex()}.msgpack"

    def read(self) -> list[BlockName]:
        """Hottest first; none where there is no sound file."""
        try:
            if os.stat(self._path).st_size > MAX_FILE_BYTES:
                raise ValueError("too large")
            fields = msgpack.unpackb(self._path.read_bytes())
            return [checked_name(*name) for name in fields["names"]] if fields["version"] == VERSION else []
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            logger.warning("%s cannot be read (%s): warm-up goes by recency", self._path, error)
            return []

    def write(self, names: Sequence[BlockName]) -> None:
        """Replace the file with these, hottest first, and behind them what it held: a short life forgets nothing."""
        names = list(dict.fromkeys([*names, *self.read()]))
        partial = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            packed = msgpack.packb({"version": VERSION, "names": [list(name) for name in names[:MAX_HOT_BLOCKS]]})
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(packed)
            os.replace(partial, self._path)
        except OSError as error:
            logger.warning("%s cannot be written (%s): the next warm-up goes by recency", self._path, error)
