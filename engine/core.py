"""The engine core: requests in, tokens out, one step at a time. Ties scheduler, runner and connector together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pagetier.connectors.base import Connector
from pagetier.engine.block_pool import BlockPool
from pagetier.engine.config import EngineConfig
from pagetier.engine.identity import roots_of
from pagetier.engine.inspection import Inspection, Report
from pagetier.engine.kv_events import EventTap
from pagetier.engine.messages import EngineRequest, TokenOutput
from pagetier.engine.plan import build_batch
from pagetier.engine.policies.make import POLICIES, MakePolicy
from pagetier.engine.prefix_index import PrefixIndex
from pagetier.engine.restore_cost import RestoreCost
from pagetier.engine.runner.base import Runner
from pagetier.engine.scheduler import Scheduler
from pagetier.engine.tables import BlockTables
from pagetier.engine.transfers import Transfers
from pagetier.engine.waiting_reasons import count_reasons
from pagetier.kvstore.errors import ClosedError
from pagetier.kvstore.events import EventLog
from pagetier.kvstore.identity import CacheIdentity
from pagetier.kvstore.keys import hash_named

logger = logging.getLogger(__name__)

STORE_CHECK_STEPS = 32  # with `paranoid`, the store is checked once in so many steps: it looks at every record


class EngineCore:
    """One model's engine. Every method belongs to one thread, which it blocks only while it waits for the runner.

    root_of: `cache_salt` -> root key of its chains. block_nbytes: bytes of one block over all KV groups, for
    statistics. make_policy: a policy of one's own instead of the configuration's. poison: overwrites device blocks;
    with it, blocks are overwritten as soon as they are free. clock: seconds. make_tables: another way to give requests
    their blocks, for comparisons. Closing closes the runner and the connector.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        connector: Connector | None,
        *,
        root_of: Callable[[str], bytes],
        hash_name: str = "sha256",
        block_nbytes: int = 0,
        num_groups: int = 1,
        make_policy: MakePolicy | None = None,
        poison: Callable[[Sequence[int]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        make_tables: Callable[..., BlockTables] = BlockTables,
    ) -> None:
        self.config = config
        self._runner = runner
        self._connector = connector
        self._num_groups = num_groups
        self._block_nbytes = block_nbytes
        index = PrefixIndex(config.block_size, clock)
        pool = BlockPool(config.num_blocks, index, poison)
        self._tap = EventTap(index, EventLog() if connector is None else connector.events)
        self._inspection = Inspection(
            index,
            pool,
            None if connector is None else connector.admin,
            block_size=config.block_size,
            block_nbytes=block_nbytes,
            hash_=hash_named(hash_name),
            prefill_s=runner.prefill_s,
            clock=clock,
        )
        cost = RestoreCost(runner.prefill_s)
        used = connector if config.enable_prefix_caching else None
        transfers = Transfers(used, pool, cost, clock, config.transfer_timeout_s)
        policy = (make_policy or POLICIES[config.scheduling_policy])(index)
        self.scheduler = Scheduler(
            config, pool, index, transfers, root_of, hash_named(hash_name), policy, clock, make_tables
        )
        self._drained: list[TokenOutput] = []  # outputs of steps that `set_identity` waited for
        self._closed = False
        self._is_stepping = self._is_stalled = False
        self._num_steps = 0

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. One that can never run is answered with finish reason `error` by the next step.

        Raises ClosedError after `close`.
        """
        if self._closed:
            raise ClosedError("the engine is closed")
        self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; their last output, finish reason `abort`, comes with the next step. Unknown ids are
        ignored.
        """
        self.scheduler.abort(request_ids)

    def set_identity(self, identity: CacheIdentity) -> None:
        """The weights were changed in place: from now on KV is computed, named, looked up and saved under `identity`.

        Waits for the launched steps: their tokens count, their KV does not. Every request then starts over with the
        tokens it has, so that no later step reads KV of the former weights; saves under way land under the former
        identity. Hash and block size must be the former one's. Raises ClosedError after `close`.
        """
        if self._closed or self._is_stepping:
            raise ClosedError("the engine is closed, or was interrupted in the middle of a step; build a new one")
        self.scheduler.change_roots(roots_of(identity))
        while self.scheduler.launched:
            try:
                self._drained += self.scheduler.commit(self.scheduler.launched[0], self._runner.collect())
            except Exception as error:  # the runner's boundary, as in a step
                logger.exception("a step failed; its requests end with an error")
                self._drained += self._fail(error)
        if self._connector is not None:
            self._connector.set_identity(identity)
        self._tap.all_cleared()

    def step(self) -> list[TokenOutput]:
        """Poll, plan, launch and, when the pipeline is full or dry, commit. Returns at once if nothing can be done
        now.

        Raises ClosedError when an earlier step was left in the middle by an exception that was not its own, such as
        KeyboardInterrupt: what was planned and what was launched disagree then, and going on could wait for ever.
        """
        if self._is_stepping:
            raise ClosedError("the engine was interrupted in the middle of a step and cannot go on; build a new one")
        self._is_stepping = True
        outputs = self._step()
        self._is_stepping = False
        return outputs

    def _step(self) -> list[TokenOutput]:
        self.scheduler.poll_transfers()
        plan = self.scheduler.plan()
        self._is_stalled = plan is None and not self.scheduler.launched
        outputs, self._drained = self._drained + self.scheduler.take_ended(), []
        try:
            if plan is not None:
                self._runner.launch(build_batch(plan, self.config.block_size, self._num_groups))
            launched = self.scheduler.launched
            if launched and (plan is None or len(launched) >= self.config.pipeline_depth):
                result = self._runner.collect()
                outputs += self.scheduler.commit(launched[0], result)
        except Exception as error:  # the runner's boundary: its requests end with an error, the engine goes on
            logger.exception("a step failed; its requests end with an error")
            outputs += self._fail(error)
        if self.config.paranoid:
            self.scheduler.check()
            self._num_steps += 1
            if self._connector is not None and self._num_steps % STORE_CHECK_STEPS == 0:
                self._connector.check()
        return outputs

    def _fail(self, error: Exception) -> list[TokenOutput]:
        for _ in range(len(self.scheduler.launched)):
            try:
                self._runner.collect()
            except Exception as other:  # noqa: BLE001 - draining; the first error is the one to report
                logger.debug("while draining: %s", other)
        return self.scheduler.fail_launched(f"the model step failed: {type(error).__name__}: {error}")

    def has_work(self) -> bool:
        """Whether `step` has, or will have, something to do without new requests."""
        scheduler = self.scheduler
        answers = self._drained or scheduler.has_ended
        return bool(answers or scheduler.num_unfinished or scheduler.launched or scheduler.transfers.holds_blocks)

    @property
    def waits_for_store(self) -> bool:
        """Whether the last step found nothing to compute and nothing under way: requests wait for lower tiers, or for
        blocks that these hold. The caller may sleep a moment, and should: they need the interpreter."""
        return self._is_stalled

    def stats(self) -> dict[str, Any]:
        """`lookup`, `tiers`, `preemptions` and the counts of `GET /stats`, and `requests` by state."""
        scheduler, preemption = self.scheduler, self.scheduler.preemption
        tiers = {"device": self._device_stats()}
        tiers.update(self._connector.stats() if self._connector is not None else {})
        for name, tier in tiers.items():
            tier["hit_blocks"] = scheduler.hits.hit_blocks.get(name, 0)
            tier["hit_tokens"] = scheduler.hits.hit_tokens.get(name, 0)
            tier["hit_rate"] = scheduler.hits.rate(name)
        return {
            "lookup": scheduler.hits.as_dict(),
            "tiers": tiers,
            "preemptions": {
                "recompute": preemption.num_preemptions - preemption.num_swaps,
                "swap": preemption.num_swaps,
            },
            "resumptions": {
                "recomputed_tokens": preemption.recomputed_tokens,
                "swapped_out_bytes": preemption.swapped_out_blocks * self._block_nbytes,
                "swapped_in_bytes": preemption.swapped_in_blocks * self._block_nbytes,
            },
            "waiting": count_reasons(scheduler.queues),
            "harmful_hits": scheduler.transfers.num_harmful,
            "given_up_loads": scheduler.transfers.num_given_up,
            "verify": scheduler.shadow.as_dict(),
            "block_size": self.config.block_size,
            "residency": scheduler.index.residency.as_dict(),
            "requests": {
                "running": len(scheduler.queues.running),
                "waiting": len(scheduler.queues.waiting),
                "loading": len(scheduler.queues.loading),
            },
        }

    def ask(self, verb: str, fields: Mapping[str, Any], report: Report) -> None:
        """A question about what is cached (engine/inspection.py). `report` is called with the answer, on any thread."""
        self._inspection.ask(verb, fields, report)

    def follow_events(self, wanted: bool) -> None:
        """Keep what comes into the cache and leaves it for `take_events` from now on, or no longer."""
        if wanted:
            self._tap.open()
        else:
            self._tap.close()

    def take_events(self) -> tuple[list[tuple[Any, ...]], int]:
        """Some of what came and went since the last call, as `KvEvent`s, and how many events before it are lost."""
        return self._tap.take()

    def timelines(self, name: str) -> list[dict[str, Any]]:
        """What happened to a request, or to each sequence of an API request, and when; empty for unknown names."""
        return self.scheduler.timelines.of(name)

    def _device_stats(self) -> dict[str, Any]:
        pool, index = self.scheduler.pool, self.scheduler.index
        return {
            "blocks": len(index),
            "bytes": len(index) * self._block_nbytes,
            "capacity_bytes": pool.num_blocks * self._block_nbytes,
            "referenced_blocks": pool.num_referenced,
            "capacity_blocks": pool.num_blocks,
            "evictions": pool.num_evictions,
            "errors": 0,
            "corrupt": 0,
            "quarantined": 0,
            "scrubbed_bytes": 0,
            "read_bytes": 0,
            "written_bytes": 0,
            "breaker": None,
        }

    def check(self) -> None:
        """Raise AssertionError, with ids, when an invariant of the engine or of its store is broken."""
        self.scheduler.check()
        if self._connector is not None:
            self._connector.check()

    def flush(self, timeout_s: float) -> bool:
        """Wait for queued saves; whether all were written."""
        return self._connector is None or self._connector.flush(timeout_s)

    def close(self) -> None:
        """Drop all requests, end the runner, let go of the store. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._inspection.close()
        self._runner.close()
        if self._connector is not None:
            self._connector.close()
