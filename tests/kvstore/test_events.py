"""Events are numbered without gaps; a slow reader loses the oldest and can tell."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from pagetier.kvstore.events import EventKind, EventLog
from tests.kvstore.tier_contract import chain

KEYS = [name.key for name in chain(4)]


@given(st.lists(st.one_of(st.none(), st.integers(0, 12)), max_size=40), st.integers(1, 6))
def test_a_reader_sees_all_that_is_kept_in_order(script: list[int | None], size: int) -> None:
    """None appends; a number reads from there."""
    log = EventLog(max_events=size)
    total = 0
    for step in script:
        if step is None:
            assert log.append(EventKind.REMOVED, "nvme", KEYS[:1], (), None) == total
            total += 1
            continue
        tail = log.since(step, limit=4)
        oldest = max(0, total - size)
        assert tail.first_seq == min(max(step, oldest), total)
        assert [event.seq for event in tail.events] == list(range(tail.first_seq, min(tail.first_seq + 4, total)))
        assert tail.next_seq == tail.first_seq + len(tail.events)
    assert log.next_seq == total


def test_a_stored_event_carries_names_and_a_removed_one_keys() -> None:
    log, names = EventLog(clock=lambda: 5.0), chain(3)
    log.stored("nvme", names, b"d" * 32)
    log.removed("host", [names[2].key])
    log.cleared("redis", b"d" * 32)
    stored, removed, cleared = log.since(0).events
    assert (stored.keys, stored.names, stored.domain, stored.time_s) == (tuple(KEYS[:3]), tuple(names), b"d" * 32, 5.0)
    assert (removed.kind, removed.medium, removed.keys, removed.names) == (EventKind.REMOVED, "host", (KEYS[2],), ())
    assert (cleared.kind, cleared.keys) == (EventKind.CLEARED, ())


def test_nothing_is_no_event() -> None:
    log = EventLog()
    log.stored("nvme", [], None)
    log.removed("nvme", [])
    assert log.next_seq == 0


def test_a_waiting_reader_is_woken_and_a_listener_is_told_until_it_stops() -> None:
    log, told = EventLog(), threading.Event()
    stop = log.listen(told.set)
    waiting = threading.Thread(target=log.wait, args=(0, 20.0))
    waiting.start()
    log.removed("nvme", KEYS)
    waiting.join()
    assert told.is_set() and log.wait(0, 0.0) and not log.wait(1, 0.0)
    told.clear()
    stop()
    log.removed("nvme", KEYS)
    assert not told.is_set()
