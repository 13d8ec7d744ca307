"""What a Redis tier counts: its own work exactly, its servers' state as of their last INFO plus what we did since.

Thread-safe; does no I/O.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pagetier.kvstore.tier import TierCounters

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerState:
    """From one INFO. `records`: keys that expire, which records do and identities do not. `capacity_bytes` is
    maxmemory, 0 for unbounded; `evictions` counts since that server's start.
    """

    run_id: str
    records: int
    nbytes: int
    capacity_bytes: int
    evictions: int


def parse_info(text: bytes, db: int) -> ServerState:
    """The state in an INFO reply; fields that a server does not report are zero."""
    fields = dict(line.split(":", 1) for line in text.decode("utf-8", "replace").splitlines() if ":" in line)
    keyspace = dict(pair.split("=", 1) for pair in fields.get(f"db{db}", "").split(",") if "=" in pair)

    def number(name: str, of: dict[str, str] = fields) -> int:
        digits = of.get(name, "")
        return int(digits) if digits.isdigit() else 0

    nbytes = number("used_memory_dataset") or number("used_memory")
    return ServerState(
        fields.get("run_id", ""), number("expires", keyspace), nbytes, number("maxmemory"), number("evicted_keys")
    )


@dataclass(slots=True)
class _View:
    """What is known of one server."""

    state: ServerState | None = None
    evictions_before: int = 0  # the server's count when we first saw it, or zero after its restart
    evictions: int = 0  # of its runs that ended since
    refresh_at_s: float = float("-inf")
    added_blocks: int = 0  # since the last INFO
    added_bytes: int = 0
    trouble: dict[str, str] = field(default_factory=dict)  # by direction: who is full or a replica still reads well

    def refresh(self, state: ServerState) -> bool:
        """Whether the server was restarted since it was last seen, or is another one."""
        before, self.state = self.state, state
        self.added_blocks = self.added_bytes = 0
        if before is None:
            self.evictions_before = state.evictions
        elif before.run_id != state.run_id or state.evictions < before.evictions:
            self.evictions += before.evictions - self.evictions_before
            self.evictions_before = 0
        return before is not None and before.run_id != state.run_id

    def counters(self) -> tuple[int, int, int, int]:
        """Blocks, bytes, capacity and evictions."""
        if self.state is None:
            return self.added_blocks, self.added_bytes, 0, 0
        capacity_bytes, nbytes = self.state.capacity_bytes, self.added_bytes + self.state.nbytes
        return (
            self.added_blocks + self.state.records,
            min(nbytes, capacity_bytes) if capacity_bytes else nbytes,
            capacity_bytes,
            self.evictions + self.state.evictions - self.evictions_before,
        )


class Account:
    """Counters of one tier over any number of servers, by name, and one log line whenever what is wrong with one
    changes."""

    def __init__(self, refresh_interval_s: float, clock: Callable[[], float]) -> None:
        self._refresh_interval_s, self._clock = refresh_interval_s, clock
        self._lock = threading.Lock()
        self._views: dict[str, _View] = {}  # guarded by self._lock, as all below
        self._restarts = 0
        self._evictions = 0  # of servers that are no longer looked at
        self._errors = self._corrupt = self._bytes_read = self._bytes_written = 0
        self._error_replies: Counter[str] = Counter()
        self._muted = False

    def read(self, nbytes: int) -> None:
        with self._lock:
            self._bytes_read += nbytes

    def wrote(self, server: str, nbytes: int) -> None:
        """One block of `nbytes` was stored."""
        with self._lock:
            view = self._view(server)
            self._bytes_written += nbytes
            view.added_blocks += 1
            view.added_bytes += nbytes

    def removed(self, server: str, num_blocks: int) -> None:
        with self._lock:
            self._view(server).added_blocks -= num_blocks

    def found_corrupt(self, num_blocks: int) -> None:
        with self._lock:
            self._corrupt += num_blocks

    def error_reply(self, code: str) -> None:
        with self._lock:
            self._error_replies[code] += 1

    def failed(self, server: str, direction: str, num_blocks: int, trouble: str, detail: str) -> None:
        """`num_blocks` failed at `direction` (reading, writing) for the reason `trouble`; logged when that is new."""
        with self._lock:
            self._errors += num_blocks
            troubles = self._view(server).trouble
            changed = troubles.get(direction) != trouble and not self._muted
            troubles[direction] = trouble
        if changed:
            consequence = "blocks are recomputed" if direction == "reading" else "blocks are not shared"
            log.warning("redis at %s: %s fails, %s: %s", server, direction, consequence, detail)

    def went_well(self, server: str, direction: str) -> None:
        """An operation ended without any failure."""
        with self._lock:
            trouble = self._view(server).trouble.pop(direction, None)
        if trouble is not None:
            log.warning("redis at %s: %s works again", server, direction)

    def mute(self) -> None:
        """Failures from now on are our own doing (close): counted, not logged."""
        with self._lock:
            self._muted = True

    def claim_refresh(self, server: str) -> bool:
        """Whether an INFO is due; if so it is the caller's to do."""
        now_s = self._clock()
        with self._lock:
            view = self._view(server)
            if now_s < view.refresh_at_s:
                return False
            view.refresh_at_s = now_s + self._refresh_interval_s
            return True

    def refresh(self, server: str, state: ServerState) -> None:
        with self._lock:
            self._restarts += self._view(server).refresh(state)

    def forget(self, server: str) -> None:
        """It is no longer one of ours: its blocks and bytes no longer count."""
        with self._lock:
            view = self._views.pop(server, None)
            self._evictions += view.counters()[3] if view is not None else 0

    def error_replies(self) -> dict[str, int]:
        with self._lock:
            return dict(self._error_replies)

    def counters(self) -> TierCounters:
        with self._lock:
            views = [view.counters() for view in self._views.values()]
            blocks, nbytes, capacity_bytes, evictions = (
                sum(column) for column in zip((0, 0, 0, 0), *views, strict=True)
            )
            return TierCounters(
                blocks=max(blocks, 0),
                nbytes=nbytes,
                capacity_bytes=capacity_bytes,
                evictions=self._evictions + evictions,
                errors=self._errors,
                corrupt=self._corrupt,
                bytes_read=self._bytes_read,
                bytes_written=self._bytes_written,
                restarts=self._restarts,
            )

    def _view(self, server: str) -> _View:
        """Needs the lock."""
        view = self._views.get(server)
        if view is None:
            view = self._views[server] = _View()
        return view
