"""The write policy `second-touch`: a tier is given a block when it is used for a second time, not when it is new.

What is used once only costs such a tier nothing. The second use may be another put, a touch of a copy on the device, or
a load from another tier; the bytes come from whoever has them then. Remembers what was turned away; bounded, so a block
may have to be used once more.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from pagetier.kvstore.block import BlockName

MAX_REMEMBERED = 131_072  # keys; some 20 MB


class SecondTouch:
    """What one tier was offered. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turned_away: OrderedDict[bytes, bool] = OrderedDict()  # guarded by self._lock; False: given since
        self.num_turned_away = 0  # guarded by self._lock

    def turns_away(self, name: BlockName) -> bool:
        """A new block is offered: whether the tier is not to have it yet."""
        with self._lock:
            if name.key in self._turned_away:
                self._turned_away[name.key] = False
                return False
            self._remember(name.key, is_turned_away=True)
            self.num_turned_away += 1
            return True

    def take_due(self, names: Sequence[BlockName], limit: int) -> list[BlockName]:
        """These are used again: those of them, head first and at most so many, that the tier is to have now. They count
        as given."""
        with self._lock:
            due: list[BlockName] = []
            for name in names:
                if len(due) == limit:
                    break
                if self._turned_away.get(name.key):
                    self._turned_away[name.key] = False
                    due.append(name)
            return due

    def take_loaded(self, names: Sequence[BlockName]) -> list[BlockName]:
        """These came from another tier, where their first use had put them: those that this one was not given yet."""
        with self._lock:
            due = [name for name in names if self._turned_away.get(name.key, True)]
            for name in due:
                self._remember(name.key, is_turned_away=False)
            return due

    def give_back(self, names: Sequence[BlockName]) -> None:
        """They could not be given after all: the next use tries again."""
        with self._lock:
            for name in names:
                self._remember(name.key, is_turned_away=True)

    def _remember(self, key: bytes, *, is_turned_away: bool) -> None:
        self._turned_away[key] = is_turned_away
        self._turned_away.move_to_end(key)
        if len(self._turned_away) > MAX_REMEMBERED:
            self._turned_away.popitem(last=False)
