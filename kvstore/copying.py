"""Copies blocks that one tier lacks from the others, a few at a time: what pins and warm-up have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pagetier.kvstore.block import BlockName, BlockStatus, Part
from pagetier.kvstore.port import TierPort
from pagetier.kvstore.tier import BlockRead, BlockWrite

COPY_BLOCKS = 16  # at once
CALL_S = 2.0  # longest that one call of a tier may take


class TierCopier:
    """Between the ports of one store; blocks on I/O, any thread."""

    def __init__(
        self,
        ports: Sequence[TierPort],
        part: Part,
        payload_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ports, self.part, self.payload_bytes, self._clock = ports, part, payload_bytes, clock

    def fill(self, index: int, names: Sequence[BlockName], domain: bytes | None, lost: set[bytes]) -> int:
        """Copy blocks, parents first, into tier `index` from the others; how many are there now.

        lost: keys that nobody has. Their children are useless, so they are not asked for; those found here are added.
        """
        done = 0
        for first in range(0, len(names), COPY_BLOCKS):
            if not self.ports[index].writes.would_allow():
                break
            done += self._fill_some(index, names[first : first + COPY_BLOCKS], domain, lost)
        return done

    def _fill_some(self, index: int, names: Sequence[BlockName], domain: bytes | None, lost: set[bytes]) -> int:
        port, wanted = self.ports[index], self._with_parents(names, lost)
        buffers = {name: memoryview(bytearray(self.payload_bytes)) for name in wanted}
        missing = list(wanted)
        for other in self.ports:
            if other is port or not missing or not other.reads.would_allow():
                continue
            reads = [BlockRead(name, self.part, buffers[name], domain) for name in missing]
            statuses = other.get(reads, self._clock() + CALL_S)
            missing = [name for name, status in zip(missing, statuses, strict=True) if status is not BlockStatus.OK]
        lost.update(name.key for name in missing)
        writes = [BlockWrite(n, self.part, buffers[n], domain) for n in self._with_parents(wanted, lost)]
        answers = port.put(writes, self._clock() + CALL_S) if writes else []
        return sum(answer in (BlockStatus.OK, BlockStatus.EXISTS) for answer in answers)

    @staticmethod
    def _with_parents(names: Sequence[BlockName], lost: set[bytes]) -> list[BlockName]:
        """Those that are not lost; a child of a lost one is lost, too."""
        kept = []
        for name in names:
            if name.parent in lost:
                lost.add(name.key)
            elif name.key not in lost:
                kept.append(name)
        return kept
