"""What a Redis tier counts: its own work exactly, the server's state as of the last INFO plus what we did since.

Thread-safe; does no I/O.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

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


class Account:
    """Counters of one tier, and one log line whenever what is wrong with the server changes."""

    def __init__(self, server: str, refresh_interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._server, self._clock = server, clock
        self._refresh_interval_s = refresh_interval_s
        self._lock = threading.Lock()
        self._state: ServerState | None = None  # guarded by self._lock, as all below
        self._evictions_before = 0  # the server's count when we first saw it, or zero after its restart
        self._evictions = 0  # of servers that restarted since
        self._refresh_at_s = 0.0
        self._added_blocks = self._added_bytes = 0  # since the last INFO
        self._restarts = 0
        self._errors = self._corrupt = self._bytes_read = self._bytes_written = 0
        self._error_replies: Counter[str] = Counter()
        self._trouble: dict[str, str] = {}  # by direction: a server that is full or a replica still reads well
        self._muted = False

    def read(self, nbytes: int) -> None:
        with self._lock:
            self._bytes_read += nbytes

    def wrote(self, nbytes: int) -> None:
        """One block of `nbytes` was stored."""
        with self._lock:
            self._bytes_written += nbytes
            self._added_blocks += 1
            self._added_bytes += nbytes

    def removed(self, num_blocks: int) -> None:
        with self._lock:
            self._added_blocks -= num_blocks

    def found_corrupt(self, num_blocks: int) -> None:
        with self._lock:
            self._corrupt += num_blocks

    def error_reply(self, code: str) -> None:
        with self._lock:
            self._error_replies[code] += 1

    def failed(self, direction: str, num_blocks: int, trouble: str, detail: str) -> None:
        """`num_blocks` failed at `direction` (reading, writing) for the reason `trouble`; logged when that is new."""
        with self._lock:
            self._errors += num_blocks
            changed = self._trouble.get(direction) != trouble and not self._muted
            self._trouble[direction] = trouble
        if changed:
            consequence = "blocks are recomputed" if direction == "reading" else "blocks are not shared"
            log.warning("redis at %s: %s fails, %s: %s", self._server, direction, consequence, detail)

    def went_well(self, direction: str) -> None:
        """An operation ended without any failure."""
        with self._lock:
            trouble = self._trouble.pop(direction, None)
        if trouble is not None:
            log.warning("redis at %s: %s works again", self._server, direction)

    def mute(self) -> None:
        """Failures from now on are our own doing (close): counted, not logged."""
        with self._lock:
            self._muted = True

    def claim_refresh(self) -> bool:
        """Whether an INFO is due; if so it is the caller's to do."""
        now_s = self._clock()
        with self._lock:
            if now_s < self._refresh_at_s:
                return False
            self._refresh_at_s = now_s + self._refresh_interval_s
            return True

    def refresh(self, state: ServerState) -> None:
        with self._lock:
            before = self._state
            if before is None:
                self._evictions_before = state.evictions
            elif before.run_id != state.run_id or state.evictions < before.evictions:
                self._evictions += before.evictions - self._evictions_before
                self._evictions_before = 0
            self._restarts += before is not None and before.run_id != state.run_id
            self._state = state
            self._added_blocks = self._added_bytes = 0

    def error_replies(self) -> dict[str, int]:
        with self._lock:
            return dict(self._error_replies)

    def counters(self) -> TierCounters:
        with self._lock:
            state = self._state
            blocks, nbytes = self._added_blocks, self._added_bytes
            capacity_bytes = evictions = 0
            if state is not None:
                capacity_bytes = state.capacity_bytes
                evictions = self._evictions + state.evictions - self._evictions_before
                blocks, nbytes = blocks + state.records, nbytes + state.nbytes
            return TierCounters(
                blocks=max(blocks, 0),
                nbytes=min(nbytes, capacity_bytes) if capacity_bytes else nbytes,
                capacity_bytes=capacity_bytes,
                evictions=evictions,
                errors=self._errors,
                corrupt=self._corrupt,
                bytes_read=self._bytes_read,
                bytes_written=self._bytes_written,
                restarts=self._restarts,
            )
