"""What happened to each request, and when: queued, computed in chunks, preempted how, loaded from where.

Counts and times only, never a token. Requests under way and the last that ended are kept; a request's events are few,
since chunks that follow each other are one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from pagetier.engine.request import Request

MAX_ENDED = 1024


class Timelines:
    """Owner: core thread. clock: seconds; times are told from the arrival of each request on."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[str, _Timeline] = {}
        self._ended: OrderedDict[str, _Timeline] = OrderedDict()  # oldest first

    def begin(self, request: Request) -> None:
        """It arrived."""
        self._open[request.request_id] = _Timeline(request, self._clock())
        self.note(request, "queued", prompt_tokens=request.num_prompt_tokens)

    def note(self, request: Request, event: str, **fields: Any) -> None:
        """Something happened to it."""
        self._open[request.request_id].add(self._clock(), event, fields)

    def computed(self, request: Request, start: int, end: int) -> None:
        """A step computes its tokens [start, end), all of which were known."""
        self._open[request.request_id].add_chunk(self._clock(), start, end)

    def end(self, request: Request) -> None:
        """It ended; the oldest that did is forgotten."""
        timeline = self._open.pop(request.request_id)
        timeline.add(self._clock(), "ended", {"reason": request.finish_reason})
        timeline.close()
        self._ended[request.request_id] = timeline
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def of(self, name: str) -> list[dict[str, Any]]:
        """Those of a request, or of all sequences `NAME-0`, `NAME-1`, ... of an API request, in order of arrival."""
        known = {**self._ended, **self._open}
        sequences = [t for key, t in known.items() if key == name or key.rpartition("-")[0] == name]
        return [timeline.as_dict() for timeline in sorted(sequences, key=lambda timeline: timeline.order)]


class _Timeline:
    """One request's. `request` is None once it ended, so that its tokens can go."""

    __slots__ = ("_chunk", "_events", "_start_s", "_summary", "order", "request")

    def __init__(self, request: Request, now_s: float) -> None:
        self.request: Request | None = request
        self.order = request.order
        self._start_s = now_s
        self._events: list[dict[str, Any]] = []
        self._chunk: dict[str, Any] | None = None  # the last event, if it is a run of chunks
        self._summary: dict[str, Any] = {}

    def add(self, now_s: float, event: str, fields: dict[str, Any]) -> None:
        self._events.append({"at_s": round(now_s - self._start_s, 6), "event": event, **fields})
        self._chunk = None

    def add_chunk(self, now_s: float, start: int, end: int) -> None:
        if self._chunk is None or self._chunk["tokens"][1] != start:
            self.add(now_s, "computed", {"tokens": [start, end], "chunks": 0})
            self._chunk = self._events[-1]
        self._chunk["tokens"][1] = end
        self._chunk["chunks"] += 1

    def close(self) -> None:
        self._summary = self._state()
        self.request = None

    def _state(self) -> dict[str, Any]:
        request = self.request
        assert request is not None
        return {
            "request_id": request.request_id,
            "state": request.state.value,
            "prompt_tokens": request.num_prompt_tokens,
            "output_tokens": request.num_output_tokens,
            "preemptions": request.num_preemptions,
        }

    def as_dict(self) -> dict[str, Any]:
        return {**(self._state() if self.request is not None else self._summary), "events": self._events}
