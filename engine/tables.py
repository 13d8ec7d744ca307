"""Which device blocks each request holds: given, grown, indexed, given up.

Blocks that a request gives up while a launched step may still touch them are released when that step is collected, so a
free block is touched by nobody. Knows no order of requests.
"""

from __future__ import annotations

from collections import deque

from pagetier.engine.block_pool import BlockPool
from pagetier.engine.config import EngineConfig
from pagetier.engine.plan import StepPlan
from pagetier.engine.prefix_index import Match, Node, PrefixIndex
from pagetier.engine.request import Request, RequestState
from pagetier.kvstore.keys import Hash


class BlockTables:
    """Owner: core thread. launched: the steps under way, oldest first; the scheduler's."""

    def __init__(
        self, config: EngineConfig, pool: BlockPool, index: PrefixIndex, hash_: Hash, launched: deque[StepPlan]
    ) -> None:
        self._config, self._pool, self._index, self._hash = config, pool, index, hash_
        self._launched = launched
        self._fresh_blocks: list[int] = []

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Fresh blocks, or None and no change."""
        blocks = self._pool.allocate(num_blocks)
        if blocks is not None:
            self._fresh_blocks.extend(blocks)
        return blocks

    def take_fresh(self) -> list[int]:
        """Blocks given out since the last call, which no load fills."""
        fresh, self._fresh_blocks = self._fresh_blocks, []
        return fresh

    def forget_fresh(self, blocks: list[int]) -> None:
        """A load fills these: nobody may poison them any more."""
        filled = set(blocks)
        self._fresh_blocks = [block for block in self._fresh_blocks if block not in filled]

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that the request lacks for `num_tokens` tokens."""
        return max(0, -(-num_tokens // self._config.block_size) - len(request.block_ids))

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Give the request blocks for `num_tokens` tokens; False and no change when there are none."""
        missing = self.num_missing(request, num_tokens)
        if not missing:
            return True
        blocks = self.allocate(missing)
        if blocks is None:
            return False
        request.block_ids.extend(blocks)
        return True

    def take(self, request: Request, shared: list[int], num_kept: int, num_spare: int) -> bool:
        """Reference blocks that others hold or the index keeps, and allocate the rest for the request's tokens, leaving
        `num_spare`; False and no change when there is no room.

        The first `num_kept` of `shared` are the beginning of its table; one more is a copy's source.
        """
        missing = -(-request.num_tokens // self._config.block_size) - num_kept
        self._pool.acquire(shared)
        blocks = None
        if self._pool.num_available >= missing + num_spare:
            blocks = self.allocate(missing)
        if blocks is None:
            self._pool.release(shared)
            return False
        request.block_ids = shared[:num_kept] + blocks
        return True

    def hand_over(self, request: Request, heir: Request, num_full: int, num_partial: int) -> bool:
        """Give `heir`, which has none, the request's first `num_full` blocks and those behind them that it has room for
        and nobody else holds or finds; False and no change when it cannot have the `num_partial` slots after those."""
        blocks = request.block_ids
        wanted = min(-(-heir.num_tokens // self._config.block_size), len(blocks))
        count = num_full
        while count < wanted and self._is_private(blocks[count]):
            count += 1
        if num_partial and count == num_full:
            return False
        heir.block_ids, request.block_ids = blocks[:count], blocks[count:]
        request.num_tabled_blocks = 0
        if request.num_in_flight:  # its last step may still write to them
            self._pool.acquire(heir.block_ids)
            self._launched[-1].release_after.extend(heir.block_ids)
        return True

    def _is_private(self, block: int) -> bool:
        return self._pool.references(block) == 1 and self._index.node_of(block) is None

    def give_up_all(self, request: Request) -> None:
        """Release all blocks, after the newest launched step if one that contains the request is under way."""
        self._give_up(request, request.block_ids)
        request.block_ids = []
        request.num_tabled_blocks = 0

    def cut(self, request: Request, num_blocks: int) -> None:
        """Release all but the first `num_blocks` at once: no step knows them."""
        self._pool.release(request.block_ids[num_blocks:])
        del request.block_ids[num_blocks:]
        request.num_tabled_blocks = min(request.num_tabled_blocks, num_blocks)

    def _give_up(self, request: Request, blocks: list[int]) -> None:
        if request.num_in_flight:
            self._launched[-1].release_after.extend(blocks)
        else:
            self._pool.release(blocks)

    # ---- the prefix index

    def match(self, request: Request) -> Match:
        """The device prefix; the last token is always left to compute."""
        if not self._config.enable_prefix_caching:
            return Match(())
        return self._index.match(request.root, request.packed_tokens(), request.num_tokens - 1)

    def touch(self, node: Node) -> None:
        """A request uses the chain that ends in `node`."""
        self._index.touch(node)

    def touch_part(self, node: Node) -> None:
        """A request uses a part of `node`."""
        self._index.touch_part(node)

    def index_blocks(self, request: Request) -> list[Node]:
        """Key and index the request's newly full blocks; their nodes.

        Where an equal block is indexed already, the request changes over to it: two copies would both be stuck, the
        private one in its table and the indexed one below its later blocks.
        """
        if not self._config.enable_prefix_caching or request.state is RequestState.WAITING:
            return []
        full = request.num_committed_tokens // self._config.block_size
        first = request.num_indexed_blocks
        if full <= first:
            return []
        request.name_blocks(full, self._config.block_size, self._hash)
        nodes = self._index.insert(request.names, request.block_ids, first, full, request.tip)
        request.tip, request.num_indexed_blocks = nodes[-1], full
        for i, node in enumerate(nodes, first):
            if node.block != request.block_ids[i]:
                self._pool.acquire([node.block])
                self._give_up(request, [request.block_ids[i]])
                request.block_ids[i] = node.block
                request.num_tabled_blocks = min(request.num_tabled_blocks, i)
        return nodes

    def check(self, requests: set[Request]) -> None:
        """Raise AssertionError, with ids, when a block has fewer references than holders."""
        held = [request.block_ids for request in requests]
        self._pool.check(held + [plan.release_after for plan in self._launched])
