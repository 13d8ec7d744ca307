"""The book knows what notes say, in bounded memory, and making a note costs little whatever its length."""

from __future__ import annotations

from pagetier.kvstore.book import MAX_WAITING_BLOCKS, BlockBook, Use
from tests.kvstore.tier_contract import chain


class Now:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def test_puts_hits_and_finds_add_up() -> None:
    now, names = Now(), chain(4)
    book = BlockBook(clock=now)
    book.note(Use.PUT, names[:3], b"d")
    now.s = 110.0
    book.note(Use.HIT, names[:2], b"d")
    book.note(Use.FOUND, names, b"d")
    found = book.find([name.key for name in names])
    assert [entry and (entry.hits, entry.stored_s, entry.used_s) for entry in found] == [
        (1, 100.0, 110.0),
        (1, 100.0, 110.0),
        (0, 100.0, 100.0),
        (0, None, 110.0),
    ]
    assert [entry.name for entry in book.entries(b"d")] == [names[3], names[2], names[0], names[1]]
    assert book.entries(b"other") == []
    book.forget([names[0].key])
    assert book.find([names[0].key]) == [None]


def test_the_least_used_leave_first() -> None:
    book, names = BlockBook(max_entries=8), chain(12)
    book.note(Use.PUT, names[:8])
    book.note(Use.HIT, names[:2])
    book.note(Use.PUT, names[8:])
    assert {entry.name for entry in book.entries()} == {*names[:2], *names[6:]}


def test_notes_that_nobody_enters_are_bounded() -> None:
    book, names = BlockBook(max_entries=16), chain(64) * 64
    for _ in range(3 * MAX_WAITING_BLOCKS // len(names)):
        book.note(Use.HIT, names)
    assert book.num_lost > 0
    assert len(book.entries()) == 16


def test_lifetime_idle_time_and_reuse_gap_are_counted_by_tier() -> None:
    now, names = Now(), chain(4)
    book = BlockBook(clock=now)
    book.note(Use.PUT, names[:3], b"d")
    now.s = 105.0
    book.note(Use.HIT, names[:2], b"d", ("nvme", "redis"))
    now.s = 125.0
    book.note(Use.HIT, names[:1], b"d", ("nvme",))
    book.note(Use.HIT, names[1:2], b"d")  # on the device
    now.s = 225.0
    book.left("nvme", [name.key for name in names])  # of the last one nothing is known
    nvme, redis = book.residency("nvme"), book.residency("redis")
    assert (nvme["reuse_gap"]["sum"], sum(nvme["reuse_gap"]["counts"])) == (5.0 + 20.0, 2)
    assert (redis["reuse_gap"]["sum"], sum(redis["lifetime"]["counts"])) == (5.0, 0)
    assert (nvme["lifetime"]["sum"], sum(nvme["lifetime"]["counts"])) == (3 * 125.0, 3)
    assert nvme["idle_before_evict"]["sum"] == 100.0 + 100.0 + 125.0
    assert sum(book.residency("host")["lifetime"]["counts"]) == 0
