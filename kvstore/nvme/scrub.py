"""Re-reads closed segments of our own NN at leisure, so that damage is found before somebody asks for the block.

Every read is verified anyway: a scrubber only finds earlier. So it is slow by intent, reads past the page cache where
it can, and rests between passes. Other writers' segments are theirs to scrub.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from mmap import mmap

from pagetier.kvstore.nvme.audit import read_record
from pagetier.kvstore.nvme.catalog import Catalog
from pagetier.kvstore.nvme.files import Files
from pagetier.kvstore.nvme.handles import Handles, Segment
from pagetier.kvstore.nvme.index import Place, RecordIndex
from pagetier.kvstore.nvme.quarantine import Quarantine
from pagetier.kvstore.nvme.segment import round_up
from pagetier.kvstore.record import RecordStatus

log = logging.getLogger(__name__)

STEP_BYTES = 1 << 20  # read between two rests
PASS_REST_S = 3600.0  # from the end of a pass to the next


class Scrubber:
    """One pass after the other over what is closed when it comes to it. `step` is for one thread at a time.

    `bytes_read`, `errors`: counts since start.
    """

    def __init__(
        self, files: Files, catalog: Catalog, index: RecordIndex, handles: Handles, quarantine: Quarantine
    ) -> None:
        self._files, self._catalog, self._index, self._handles = files, catalog, index, handles
        self._quarantine = quarantine
        self.mac_key: bytes | None = None  # of the records; set before the first step
        self.direct = False
        self.bytes_read = self.errors = 0
        self._segments: deque[Segment] | None = None  # yet to be read in this pass; None: between two
        self._records: deque[tuple[bytes, Place]] = deque()  # yet to be read of `_segment`
        self._segment: Segment | None = None
        self._buffer = memoryview(mmap(-1, STEP_BYTES))
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, bytes_per_s: int) -> None:
        """Scrub in a thread of its own until `close`."""
        self._thread = threading.Thread(
            target=run_paced, args=(self.step, bytes_per_s, self._stop.wait), name="pagetier-scrub", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread, if there is one. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def step(self, max_bytes: int = STEP_BYTES) -> int:
        """Check records until that much was read; how much it was. 0: the pass is over, and the next call begins one.
        Never raises.
        """
        done = 0
        while done < max_bytes:
            if not self._records and not self._next_segment():
                if not done:
                    self._segments = None
                break
            address, place = self._records.popleft()
            if self._segment is not None and self._index.find([address]) == [place]:
                done += self._check(self._segment, address, place)
        self.bytes_read += done
        return done

    def _next_segment(self) -> bool:
        """Go on to the next segment that has records; False when this pass has none left."""
        if self._segments is None:
            self._segments = deque(s for s in self._catalog.segments() if s.own and s.closed)
        while self._segments:
            self._segment = self._segments.popleft()
            self._records = deque(self._index.records_in(self._segment.ident))
            if self._records:
                return True
        return False

    def _check(self, segment: Segment, address: bytes, place: Place) -> int:
        nbytes = place.end - place.offset
        if nbytes > len(self._buffer):
            self._buffer = memoryview(mmap(-1, round_up(nbytes)))
        try:
            fd, handle = self._handles.acquire(segment, self.direct)
            try:
                found = read_record(self._files, fd, address, place, mac_key=self.mac_key, buffer=self._buffer)
            finally:
                self._handles.release(handle)
        except FileNotFoundError:
            self._records.clear()
            return 0
        except OSError as error:
            log.warning("%s cannot be scrubbed now (%s)", segment.path, error)
            self.errors += 1
            self._records.clear()
            return 0
        if found.status is not RecordStatus.OK and not self._quarantine.is_evicted(segment, address, place):
            self._quarantine.condemn(segment, address, place, f"scrub {found.status}")
        return nbytes


def run_paced(step: Callable[[], int], bytes_per_s: int, rest: Callable[[float], bool]) -> None:
    """Call `step` again and again, resting after each so that on average no more than `bytes_per_s` are read, until
    `rest` says that it is time to end.
    """
    while not rest(step_rest_s(step(), bytes_per_s)):
        pass


def step_rest_s(nbytes: int, bytes_per_s: int) -> float:
    """How long to rest after a step that read so much."""
    return nbytes / bytes_per_s if nbytes else PASS_REST_S
