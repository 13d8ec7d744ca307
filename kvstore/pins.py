"""Pins that people set: which prefixes are to stay, until when; kept in a file that all processes of a host share.

Owns the file and what is in it; holds nothing in any tier (kvstore/keeper.py does). msgpack, replaced as a whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from pagetier.kvstore.block import KEY_BYTES, TOKEN_BYTES, BlockName
from pagetier.kvstore.errors import CapacityError, PagetierError

logger = logging.getLogger(__name__)

VERSION = 1
MAX_PINS = 4096
MAX_PIN_BLOCKS = 65_536  # a million tokens
MAX_FILE_BYTES = 256 << 20
NAME_BYTES, PIN_BYTES = 128, 128  # of a block's name without tokens, and of a pin without names, at most


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix that is to stay: `names` head first, of `domain`, in `tiers` (empty: in all).

    expires_s: since 1970; None: until it is unpinned. A pin is known by its last block's key, so that pinning a prefix
    again renews it.
    """

    domain: bytes
    names: tuple[BlockName, ...]
    tiers: tuple[str, ...] = ()
    expires_s: float | None = None

    @property
    def pin_id(self) -> str:
        return self.names[-1].key.hex()


class PinFile:
    """The pins of one host. Any thread, any process: changes happen under a lock on a file beside it.

    It holds at most `max_pins` and `max_bytes`. Pins of caches that no longer are, such as those of weights that were
    changed in place, are nobody's to unpin: they make room for others, oldest first.
    """

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.time,
        *,
        max_pins: int = MAX_PINS,
        max_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self._path, self._clock = path, clock
        self._max_pins, self._max_bytes = max_pins, max_bytes

    @property
    def state(self) -> object:
        """Changes whenever the file does."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size

    def read(self) -> list[Pin]:
        """Those that have not expired. A file that cannot be read holds none: one log line."""
        try:
            return self._read()
        except OSError as error:
            logger.warning("%s cannot be read (%s): no pin is kept", self._path, error)
            return []

    def _read(self) -> list[Pin]:
        """As `read`; raises OSError where the medium fails: what cannot be read now must not be written over."""
        try:
            if os.stat(self._path).st_size > self._max_bytes:
                raise ValueError("too large")
            fields = msgpack.unpackb(self._path.read_bytes())
            pins = [_unpacked(one) for one in fields["pins"]] if fields["version"] == VERSION else []
        except FileNotFoundError:
            return []
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            logger.warning("%s is no file of pins (%s): no pin is kept", self._path, error)
            return []
        now_s = self._clock()
        return [pin for pin in pins if pin.expires_s is None or pin.expires_s > now_s]

    def add(self, pin: Pin) -> None:
        """Add or renew. Raises CapacityError when there is no room, PagetierError when the file cannot be changed."""
        if not 1 <= len(pin.names) <= MAX_PIN_BLOCKS:
            raise CapacityError(f"a pin has 1 to {MAX_PIN_BLOCKS} blocks, got {len(pin.names)}")
        with self._changing() as pins:
            pins[:] = [one for one in pins if (one.domain, one.pin_id) != (pin.domain, pin.pin_id)]
            while len(pins) >= self._max_pins or packed_bytes([*pins, pin]) > self._max_bytes:
                foreign = next((one for one in pins if one.domain != pin.domain), None)
                if foreign is None:
                    raise CapacityError(f"no room for a pin beside {len(pins)} others; unpin some")
                logger.warning("%s is full: a pin of the cache %s makes room", self._path, foreign.domain.hex()[:12])
                pins.remove(foreign)
            pins.append(pin)

    def remove(self, domain: bytes, pin_ids: Sequence[str] | None) -> list[Pin]:
        """Remove these, or all of the domain; those that were there."""
        with self._changing() as pins:
            gone = [pin for pin in pins if pin.domain == domain and (pin_ids is None or pin.pin_id in pin_ids)]
            pins[:] = [pin for pin in pins if pin not in gone]
        return gone

    @contextlib.contextmanager
    def _changing(self) -> Iterator[list[Pin]]:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                pins = self._read()
                yield pins
                self._write(pins)
            finally:
                os.close(lock)
        except OSError as error:
            raise PagetierError(f"{self._path}: pins cannot be kept there ({error.strerror})") from error

    def _write(self, pins: Sequence[Pin]) -> None:
        packed = msgpack.packb({"version": VERSION, "pins": [_packed(pin) for pin in pins]})
        partial = self._path.with_suffix(".tmp")
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(packed)
            file.flush()
            os.fsync(fd)
        os.replace(partial, self._path)


def packed_bytes(pins: Sequence[Pin]) -> int:
    """What a file of these takes, at most."""
    names = sum(len(pin.names) * NAME_BYTES + sum(len(name.tokens) for name in pin.names) for pin in pins)
    return names + PIN_BYTES * (1 + len(pins))


def _packed(pin: Pin) -> dict[str, Any]:
    names = [[n.key, n.parent, n.root, n.position, n.tokens] for n in pin.names]
    return {"domain": pin.domain, "names": names, "tiers": list(pin.tiers), "expires_s": pin.expires_s}


def _unpacked(fields: dict[str, Any]) -> Pin:
    names = tuple(checked_name(*name) for name in fields["names"])
    expires_s = fields["expires_s"]
    if not names or len(fields["domain"]) != KEY_BYTES or not isinstance(expires_s, float | int | None):
        raise ValueError("not a pin")
    return Pin(fields["domain"], names, tuple(str(tier) for tier in fields["tiers"]), expires_s)


def checked_name(key: bytes, parent: bytes, root: bytes, position: int, tokens: bytes) -> BlockName:
    """A name whose fields have the right types and lengths. Raises ValueError."""
    sound = all(isinstance(part, bytes) and len(part) == KEY_BYTES for part in (key, parent, root))
    if not sound or not isinstance(position, int) or not 0 <= position < 1 << 63:
        raise ValueError("a block's name needs keys of 32 bytes and a position")
    if not isinstance(tokens, bytes) or not tokens or len(tokens) % TOKEN_BYTES:
        raise ValueError("a block's name needs tokens of 4 bytes each")
    return BlockName(key, parent, root, position, tokens)


def expiry(ttl_s: float | None, clock: Callable[[], float] = time.time) -> float | None:
    """When a pin of that long a life ends."""
    return None if ttl_s is None else clock() + ttl_s
