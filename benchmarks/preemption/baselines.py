"""What others do, on this engine's parts: contiguous reservations instead of pages, batches instead of iterations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagetier.benchmarks.preemption.virtual import BLOCK_SIZE, Admit
from pagetier.engine.request import Request
from pagetier.engine.tables import BlockTables

Reserve = Callable[[Request], int]  # tokens to reserve for a request


def reserving(reserve: Reserve) -> type[BlockTables]:
    """Tables that give a request, when it is admitted, one stretch of neighbouring blocks for all it may ever need, as
    systems without paging must (Orca's allocation as Kwon et al. 2023, section 6.1, describe it). First fit.

    For engines without a prefix cache: only there is every block free or referenced.
    """

    class ReservingTables(BlockTables):
        def take(self, request: Request, shared: list[int], num_kept: int, num_spare: int) -> bool:
            assert not shared, "without a prefix cache nothing is shared"
            blocks = self._stretch(-(-reserve(request) // BLOCK_SIZE))
            if blocks is None:
                return False
            request.block_ids = blocks
            return True

        def _stretch(self, count: int) -> list[int] | None:
            references, pool = self._pool.references, self._pool
            run: list[int] = []
            for block in range(pool.num_blocks):
                if references(block):
                    run.clear()
                    continue
                run.append(block)
                if len(run) == count:
                    given = pool.allocate(pool.num_available)
                    assert given is not None
                    wanted = set(run)
                    pool.release([other for other in given if other not in wanted])
                    return run
            return None

    return ReservingTables


def whole_length(limit: int) -> Reserve:
    """The longest that any request may become."""
    return lambda request: limit


def power_of_two(request: Request) -> int:
    """The prompt, and its output's length rounded up to a power of two: told the output to within a factor of 2."""
    return request.num_prompt_tokens + (1 << (request.max_tokens - request.num_prompt_tokens - 1).bit_length())


def oracle(request: Request) -> int:
    """Exactly what it will need."""
    return request.max_tokens


def static_batches(size: int) -> Admit:
    """A batch begins when the one before has ended to its last row, with as many as have come, `size` at most."""

    def admit(waiting: Sequence[float], now_s: float, is_idle: bool) -> int:
        return min(size, len(waiting)) if is_idle else 0

    return admit


def window_batches(size: int, window_s: float) -> Admit:
    """Dynamic batching: a batch begins when it is full or its first request has waited for the window."""

    def admit(waiting: Sequence[float], now_s: float, is_idle: bool) -> int:
        is_due = len(waiting) >= size or (bool(waiting) and now_s - waiting[0] >= window_s)
        return min(size, len(waiting)) if is_idle and is_due else 0

    return admit
