"""The project's error tree.

    PagetierError
    ├── ConfigError       a flag, field or file that cannot be right: names it, its value, what is allowed
    ├── CapacityError     what was asked for can never fit
    ├── TierError         a tier failed at an operation
    │   ├── TierUnavailable   the tier is down, too slow, or its breaker is open
    │   └── CorruptBlock      bytes that do not verify
    ├── ProtocolError     a peer broke the wire format
    └── ClosedError       used after close()

A miss, "not yet" and "no room" are values, never exceptions. Kernels raise ValueError.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PagetierError(Exception):
    """Root of every error that this project raises on purpose; its text is one line fit for a user."""


class ConfigError(PagetierError):
    """A configuration value, file or model that cannot be used."""

    @classmethod
    def bad_value(cls, name: str, value: object, allowed: str) -> ConfigError:
        """Name what was set, what it was set to, and what is allowed."""
        return cls(f"{name}: got {value!r}; allowed: {allowed}")

    @classmethod
    def unknown_name(cls, kind: str, name: str, known: Iterable[str]) -> ConfigError:
        """Name an unknown choice, the nearest known one, and all of them."""
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return cls(f"unknown {kind} {name!r}{hint}; known: {', '.join(names)}")


class CapacityError(PagetierError):
    """The thing asked for can never fit, however long one waits."""


class TierError(PagetierError):
    """Operation `op` failed in tier `tier`, for record key `key` where one is concerned."""

    def __init__(self, tier: str, op: str, reason: str, key: bytes | None = None) -> None:
        at = f" {key.hex()[:16]}" if key is not None else ""
        super().__init__(f"{tier} {op}{at}: {reason}")
        self.tier, self.op, self.reason, self.key = tier, op, reason, key


class TierUnavailable(TierError):
    """The tier is down, too slow, or held back by its breaker."""


class CorruptBlock(TierError):
    """Bytes of a record that do not verify."""


class ProtocolError(PagetierError):
    """A peer sent what the wire format does not allow."""


class ClosedError(PagetierError):
    """An operation on something already closed."""
