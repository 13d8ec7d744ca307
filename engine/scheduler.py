"""Which tokens of which requests are computed next, and what their results mean.

One token budget per step and no phases: each request's computed tokens catch up with its tokens. Running requests come
first, by the policy's rank; then waiting ones in the policy's order, none in a step that preempted. Plans on counts
alone: tokens that launched steps will sample are placeholders, so step N+1 is planned while step N runs.

Which blocks a request holds is tables.py, who gives them up preemption.py, who is passed over turns.py, what the tiers
have lookups.py, who waits for another's prefill leaders.py, how the choices of one prompt share it forks.py.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from pagetier.engine.admission import has_outgrown, refusal
from pagetier.engine.batch import StepResult, TokenLogprobs
from pagetier.engine.block_pool import BlockPool
from pagetier.engine.coming_free import ComingFree
from pagetier.engine.config import EngineConfig
from pagetier.engine.forks import Fork, Forks
from pagetier.engine.hit_counters import HitCounters
from pagetier.engine.leaders import Leaders, is_following
from pagetier.engine.lookups import LOOKAHEAD, Lookups
from pagetier.engine.messages import EngineRequest, TokenOutput
from pagetier.engine.plan import PlannedRow, StepPlan
from pagetier.engine.policies.base import Policy
from pagetier.engine.preemption import Preemption
from pagetier.engine.prefix_index import Match, Node, PrefixIndex
from pagetier.engine.queues import Queues
from pagetier.engine.request import Request, RequestState
from pagetier.engine.shadow import ShadowChecks
from pagetier.engine.tables import BlockTables
from pagetier.engine.timeline import Timelines
from pagetier.engine.transfers import Loaded, Transfers
from pagetier.engine.turns import MAX_PASSED, Turns
from pagetier.engine.withheld import Withheld
from pagetier.kvstore.keys import Hash

logger = logging.getLogger(__name__)

# With all fields, in order: their own constructors take twice as long, and a step makes one a row.
_row_of: Callable[[tuple[Request, int, int, int, int, int, int]], PlannedRow] = partial(tuple.__new__, PlannedRow)
_output_of: Callable[[tuple[Any, ...]], TokenOutput] = partial(tuple.__new__, TokenOutput)

MAX_FOLLOWING = 1024  # followers passed over in a step; a look at one takes 0.2 us
MAX_MATCHED = 32  # new followers in a step: to match the first 10,000 tokens of a prompt takes 0.1 ms


class Scheduler:
    """Owner: core thread."""

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        index: PrefixIndex,
        transfers: Transfers,
        root_of: Callable[[str], bytes],
        hash_: Hash,
        policy: Policy,
        clock: Callable[[], float] = time.monotonic,
        make_tables: Callable[..., BlockTables] = BlockTables,
    ) -> None:
        self.config = config
        self.pool = pool
        self.index = index
        self.transfers = transfers
        self.hits = HitCounters()
        self.timelines = Timelines(clock)
        self.launched: deque[StepPlan] = deque()
        self.queues = Queues(policy)
        self.tables = make_tables(config, pool, index, hash_, self.launched)
        self.lookups = Lookups(config, transfers)
        self.leaders = Leaders(config.block_size, policy.rank)
        self.forks = Forks(config.block_size)
        self.withheld = Withheld(config, pool, index, transfers)
        self.turns = Turns(self.withheld, self.tables, self.forks, config.transfer_timeout_s, clock)
        self.preemption = Preemption(
            config,
            pool,
            self.tables,
            transfers,
            self.queues,
            ComingFree(pool, transfers, self.launched),
            self.withheld,
            self.turns,
            self.timelines,
            is_held_up=self._is_held_up,
            send_back=self._send_back,
            end=self._end_for_lack_of_room,
            fail=self._fail,
        )
        self.shadow = ShadowChecks(config, self.tables.allocate, transfers.quarantine, self._take_loaded)
        self._root_of = root_of
        self._hash = hash_
        self._requests: dict[str, Request] = {}
        self._num_added = 0
        self._num_steps = 0
        self._ended: list[TokenOutput] = []  # outputs that no step result carries

    # ---- requests come and go

    def add(self, spec: EngineRequest) -> None:
        """Queue a request; one that can never run is answered with an error by the next `take_ended`."""
        reason = refusal(spec, self.config)
        if spec.request_id in self._requests:
            reason = f"request id {spec.request_id!r} is already in use"
        if reason:
            self._ended.append(TokenOutput(spec.request_id, (), finish_reason="error", error=reason))
            return
        request = Request(spec, self._num_added, self._root_of(spec.cache_salt), self.config.block_size, self._hash)
        request.max_tokens = min(request.max_tokens, self.config.max_model_len)
        self._num_added += 1
        self._requests[spec.request_id] = request
        self.timelines.begin(request)
        self.forks.add(request)
        self.queues.wait(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; unknown ids are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, "abort")
                self._ended.append(request.output((), ()))

    def take_ended(self) -> list[TokenOutput]:
        """Outputs of requests that ended outside a step: aborted, refused, out of room."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` has something to hand out."""
        return bool(self._ended)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def _finish(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        self.queues.leave(request)
        request.state = RequestState.FINISHED
        del self._requests[request.request_id]
        self.timelines.end(request)
        self.queues.waiting.finish(request)
        self.forks.remove(request)
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """Give back all that it holds: tickets, blocks, the lead."""
        self.transfers.release(request)
        self.shadow.forget(request)
        self.leaders.resign(request)
        request.following = None
        self.tables.give_up_all(request)

    # ---- planning

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute now."""
        plan = StepPlan(self._num_steps, tiers_busy=self.transfers.holds_blocks)
        self.withheld.begin_step()
        self._look_ahead()
        self.transfers.poll_lookups()
        num_preemptions = self.preemption.num_preemptions
        self.preemption.make_way()
        self.preemption.start_early()
        may_admit = self._plan_running(plan) and self.preemption.num_preemptions == num_preemptions
        self.shadow.plan(plan, self._budget(plan))
        if may_admit:
            self._plan_waiting(plan)
            self._plan_more(plan)
        if not plan.rows:
            return None
        plan.fresh_blocks = self.tables.take_fresh()
        self._num_steps += 1
        self.launched.append(plan)
        return plan

    def _budget(self, plan: StepPlan) -> int:
        return self.config.max_num_batched_tokens - plan.num_tokens

    def _plan_running(self, plan: StepPlan) -> bool:
        """Rows for running requests in order; whether all of them found their blocks, so that more may be admitted.

        Behind one that waits for blocks only those go on that need none: the next to come free are not theirs. But who
        misses blocks that a tier keeps holds up nobody.
        """
        budget, is_blocked = self._budget(plan), False
        num_later, block_size = len(self.queues.running), self.config.block_size
        for request in self.queues.running.copy():
            num_later -= 1
            if request.state is not RequestState.RUNNING:
                continue  # preempted below for an earlier one
            num_new = self._num_new_tokens(request, budget, num_later)
            if num_new == 0:
                continue
            end = request.num_computed_tokens + num_new
            if end > len(request.block_ids) * block_size:  # it lacks blocks
                if is_blocked:
                    continue
                if not self.preemption.find_blocks(request, end):
                    is_blocked = not self.withheld.are_missed(end, request.block_ids)
                    continue
            self._add_row(plan, request, num_new)
            budget -= num_new
        return not is_blocked

    def _num_new_tokens(self, request: Request, budget: int, num_later: int = 0) -> int:
        """Tokens to compute of a running request within `budget`; 0 when it only waits for its last sample.

        The prefill of one that came first but waited, for a tier or after preemption, leaves each of the `num_later`
        running ones behind it its next token.
        """
        num_tokens = request.num_known_tokens + request.num_placeholders
        if num_tokens >= request.max_tokens:
            return 0
        missing = num_tokens - request.num_computed_tokens
        if budget <= 0 or missing == 1:
            return 1 if budget > 0 else 0
        if not self.config.enable_chunked_prefill:
            return missing if missing <= budget else 0
        return min(missing, max(1, budget - num_later))

    def _end_for_lack_of_room(self, request: Request) -> None:
        room = self.pool.num_blocks * self.config.block_size
        logger.warning(
            "request %s ends after %d tokens: the KV cache holds %d; raise --kv-cache-memory for longer ones",
            request.request_id,
            request.num_tokens,
            room,
        )
        self._finish(request, "length")
        self._ended.append(request.output((), ()))

    def _fail(self, request: Request, reason: str) -> None:
        logger.warning("request %s ends after %d tokens: %s", request.request_id, request.num_tokens, reason)
        self._finish(request, "error")
        self._ended.append(TokenOutput(request.request_id, (), finish_reason="error", error=reason))

    def _send_back(self, request: Request) -> None:
        """A running or loading request waits again, with the tokens it has and without KV."""
        request.epoch += 1
        self.queues.leave(request)
        self._let_go(request)
        request.num_computed_tokens = request.num_committed_tokens = request.num_indexed_blocks = 0
        request.tip = None
        request.lookup_tries = 0
        self.queues.wait(request)

    def change_roots(self, root_of: Callable[[str], bytes]) -> None:
        """From now on other weights answer: blocks are named below other roots, and every request starts over with the
        tokens it has. KV of before, that of launched steps included, is read by no later step and named by nobody."""
        self._root_of = root_of
        for request in [*self.queues.running, *self.queues.loading]:
            self._send_back(request)
        for request in self.queues.waiting:
            self.transfers.release(request)
            request.lookup_tries = 0
            request.rename(root_of(request.spec.cache_salt), self.config.block_size, self._hash)

    def _add_row(self, plan: StepPlan, request: Request, num_new: int) -> None:
        start = request.num_computed_tokens
        end, num_known = start + num_new, request.num_known_tokens
        pending_row = -1
        if end > num_known:
            assert request.sampled_step == plan.step - 1, "a placeholder is resolved by the step before"
            pending_row = request.sampled_row
        sample = -1
        if end == num_known + request.num_placeholders:
            sample = plan.num_samples
            request.num_placeholders += 1
            request.sampled_step, request.sampled_row = plan.step, sample
        plan.rows.append(_row_of((request, start, end, sample, request.epoch, pending_row, -1)))
        plan.num_tokens += num_new
        plan.num_samples += sample >= 0
        if num_new > 1:
            self.timelines.computed(request, start, end)
        self.queues.waiting.charge(request, num_new)
        request.num_computed_tokens = end
        request.num_in_flight += 1

    def _plan_waiting(self, plan: StepPlan) -> None:
        """Admit waiting requests in order while budget, seats and blocks last, past a few that miss blocks which a tier
        keeps.

        Ends at a few that the lower tiers are yet to be asked about: to match thousands of prompts for that in every
        step would take longer than the step.
        """
        num_unasked = num_following = num_matched = num_passed = 0
        for request in self.queues.waiting.candidates():
            budget = self._budget(plan)
            if budget <= 0 or self.queues.num_seated >= self.config.max_num_seqs:
                return
            if request.num_placeholders:
                continue  # preempted with a token still on its way
            if has_outgrown(request, self.config):
                self._end_for_lack_of_room(request)
                continue
            if is_following(request):
                num_following += 1
                if num_following == MAX_FOLLOWING:
                    return
                continue
            if self.lookups.is_open(request):
                continue
            if not self.config.enable_chunked_prefill and request.num_tokens > budget:
                return
            if not self._admit(plan, request):
                num_passed += 1
                if complaint := self.turns.complaint(request):
                    self._fail(request, complaint)
                elif not self.turns.is_passed_over(request):
                    return
                if num_passed == MAX_PASSED:
                    return
                continue
            num_unasked += request.state is RequestState.WAITING and request.following is None
            num_matched += request.following is not None
            if num_unasked == LOOKAHEAD or num_matched == MAX_MATCHED:
                return

    def _plan_more(self, plan: StepPlan) -> None:
        """Admit those who could only be asked about now, while the step has room and that fills it: tiers that know
        what they hold answer at once, and a few requests with short tails would leave a step nearly empty."""
        num_tokens = -1
        while num_tokens < plan.num_tokens < self.config.max_num_batched_tokens and self._look_ahead():
            num_tokens = plan.num_tokens
            self.transfers.poll_lookups()
            self._plan_waiting(plan)

    def _admit(self, plan: StepPlan, request: Request) -> bool:
        """Give `request` its blocks and first row, or start loading them, or let it wait for what another computes;
        False when there is no room for it."""
        match = self.tables.match(request)
        num_device = len(match.nodes)
        fork = self.forks.fork_of(request)
        if fork is not None and fork.num_full >= num_device:
            return self._admit_fork(plan, request, fork)
        if self._follow(request, num_device):
            return True
        if self.lookups.wants(request, num_device):
            return True  # asked by _look_ahead, when it is among the first
        tier_end = self.lookups.tier_end(request, num_device)
        if tier_end > num_device:
            match = Match(match.nodes)
        if match.partial is not None and not self._take_blocks(request, match):
            match = Match(match.nodes)  # the copy's source may be the very block that is missing
        if not request.block_ids and not self._take_blocks(request, match):
            return False
        self.queues.leave(request)
        self.transfers.touch(match.nodes)
        tiers_state = self.transfers.tiers_state
        self.transfers.save([node for node in match.nodes if node.saved != tiers_state])
        if match.nodes:
            self.tables.touch(match.nodes[-1])
            request.tip = match.nodes[-1]
        request.num_indexed_blocks = num_device
        self._set_computed(request, num_device * self.config.block_size)
        if self.config.enable_prefix_caching:
            self.leaders.lead(request, num_device)
        if tier_end > num_device:
            self.tables.forget_fresh(request.block_ids[num_device:tier_end])
            self.queues.load(request)
            self.transfers.load(request, num_device, tier_end)
            self.timelines.note(request, "loading", tokens=[t * self.config.block_size for t in (num_device, tier_end)])
            return True
        if match.partial is not None:
            self.tables.touch_part(match.partial)
            self._copy_partial(plan, request, match.partial.block, match.num_partial)
        self._run(plan, request)
        return True

    def _admit_fork(self, plan: StepPlan, request: Request, fork: Fork) -> bool:
        """Give `request` the prompt's blocks of another choice, its own copy of the last one, and a row for its first
        token; False when there is no room for it."""
        num_shared = fork.num_full + (fork.num_partial > 0)
        shared = fork.source.block_ids[:num_shared]
        if not self.tables.take(request, shared, fork.num_full, len(self.queues.running)):
            return False
        self._fork(request, fork.source, fork.num_full)
        if fork.num_partial:
            self._copy_partial(plan, request, shared[-1], fork.num_partial)
        self.timelines.note(request, "forked", source=fork.source.request_id, tokens=request.num_computed_tokens)
        self._run(plan, request)
        return True

    def _fork(self, request: Request, source: Request, num_full: int) -> None:
        """A waiting choice has the first blocks of another one; they are computed, and indexed as far as there."""
        self.queues.leave(request)
        request.num_indexed_blocks = min(num_full, source.num_indexed_blocks)
        if request.num_indexed_blocks:
            request.tip = self.index.node_of(request.block_ids[request.num_indexed_blocks - 1])
        self._set_computed(request, num_full * self.config.block_size)
        request.counted = True  # its prompt was looked up once, for the choice that computed it

    def _bequeath(self, request: Request) -> None:
        """A choice ends before those that wait for its prompt could fork: one of them goes on in its blocks."""
        heir = self.forks.heir_of(request)
        if heir is None or request.state is not RequestState.RUNNING:
            return
        heir.counted = True  # its prompt was looked up once, for the choice that computed it
        num_full, num_partial = self.forks.shared_by(heir)
        if not self.tables.hand_over(request, heir, num_full, num_partial):
            return  # it finds them in the prefix index
        self._fork(heir, request, num_full)
        self._set_computed(heir, heir.num_computed_tokens + num_partial)
        self.timelines.note(heir, "forked", source=request.request_id, tokens=heir.num_computed_tokens)
        self._start_running(heir, {})

    def _run(self, plan: StepPlan, request: Request) -> None:
        """An admitted request runs, from this step on as far as the budget goes."""
        self._start_running(request, {"device": request.num_computed_tokens})
        num_new = self._num_new_tokens(request, self._budget(plan))
        if num_new:
            self._add_row(plan, request, num_new)

    def _follow(self, request: Request, num_device: int) -> bool:
        """Whether a waiting request is to wait for what another computes or loads."""
        return self.forks.follow(request) or self.leaders.follow(request, num_device)

    def _is_held_up(self, request: Request) -> bool:
        """Whether a waiting request could not be admitted yet, however much room the running ones made."""
        if request.num_placeholders or self.lookups.is_open(request) or is_following(request):
            return True
        if self.turns.lacks_withheld(request):
            return True
        if self.forks.fork_of(request) is not None:
            return False
        return self._follow(request, len(self.tables.match(request).nodes))

    def _look_ahead(self) -> bool:
        """Ask the lower tiers about the first waiting requests that follow nobody; whether any was asked about now."""
        if not self.lookups.enabled:
            return False
        num_asked = 0
        candidates = itertools.islice(self.queues.waiting.candidates(), MAX_FOLLOWING)
        for request in itertools.islice(itertools.filterfalse(is_following, candidates), LOOKAHEAD):
            if self.lookups.may_ask(request) and self.forks.fork_of(request) is None:
                num_device = len(self.tables.match(request).nodes)
                if not self._follow(request, num_device):
                    num_asked += self.lookups.ask(request, num_device)
        return num_asked > 0

    def _take_blocks(self, request: Request, match: Match) -> bool:
        """Reference the matched blocks and allocate the rest of the known tokens', leaving a block of growth to each
        running request; False and no change when there is no room."""
        shared = [node.block for node in match.nodes]
        num_kept = len(shared)
        if match.partial is not None:
            shared.append(match.partial.block)
        return self.tables.take(request, shared, num_kept, len(self.queues.running))

    def _copy_partial(self, plan: StepPlan, request: Request, source: int, num_tokens: int) -> None:
        """Copy-on-write of the block in which what is shared ends; `source` was referenced with the blocks before."""
        destination = request.block_ids[request.num_computed_tokens // self.config.block_size]
        plan.copies.append((source, destination, num_tokens))
        plan.release_after.append(source)
        self._set_computed(request, request.num_computed_tokens + num_tokens)

    def _set_computed(self, request: Request, num_tokens: int) -> None:
        request.num_computed_tokens = request.num_committed_tokens = num_tokens

    def _start_running(self, request: Request, cached_tokens: dict[str, int], num_loaded_blocks: int = 0) -> None:
        self.transfers.release(request)
        self.preemption.resumed(request, num_loaded_blocks)
        self.queues.start(request)
        self.timelines.note(request, "running", cached_tokens={tier: n for tier, n in cached_tokens.items() if n})
        if not request.counted:
            request.counted = True
            request.cached_tokens = {tier: n for tier, n in cached_tokens.items() if n}
            self.hits.count(request.num_prompt_tokens - 1, request.cached_tokens, self.config.block_size)

    # ---- results

    def poll_transfers(self) -> None:
        """Take in finished lookups, loads and saves."""
        for loaded in self.transfers.poll():
            self._end_load(loaded)

    def _end_load(self, loaded: Loaded) -> None:
        """What arrived becomes computed and indexed, at once or after a shadow check; the rest is computed as usual."""
        request, block_size = loaded.request, self.config.block_size
        num_device = request.num_computed_tokens // block_size
        end = num_device + len(loaded.tiers)
        if not loaded.quiesced:  # bytes may still land in the others: leave them to the transfer
            self.tables.cut(request, end)
        if not self.shadow.begin(request, num_device, loaded.tiers):
            self._take_loaded(request, loaded.tiers)

    def _take_loaded(self, request: Request, tiers: tuple[str, ...]) -> None:
        """Go on with the blocks that these tiers served, in order, behind those from the device."""
        block_size = self.config.block_size
        cached = {"device": request.num_computed_tokens}
        for tier in tiers:
            cached[tier] = cached.get(tier, 0) + block_size
        self.queues.leave(request)
        self._set_computed(request, request.num_computed_tokens + len(tiers) * block_size)
        tiers_state = self.transfers.tiers_state
        for node in self.tables.index_blocks(request):
            node.saved = tiers_state
        self.leaders.advance(request)
        self._start_running(request, cached, len(tiers))

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenOutput]:
        """Take in the oldest launched step's samples: outputs, newly full blocks, ended requests."""
        assert self.launched.popleft() is plan and result.step == plan.step
        token_ids, block_size = result.token_ids.tolist(), self.config.block_size
        outputs = []
        for row in plan.rows:
            request = row.request
            request.num_in_flight -= 1
            if request.state is RequestState.FINISHED:
                continue  # overshoot: the token is discarded and its slot never keyed
            if row.scratch >= 0:
                self.shadow.take(row, row.scratch in result.differing)
                continue
            if row.epoch == request.epoch:
                request.num_committed_tokens = row.end
            if row.sample >= 0:
                output = self._accept(request, token_ids[row.sample], result.logprobs[row.sample])
                outputs.append(output)
            fills = request.num_committed_tokens // block_size > request.num_indexed_blocks
            if fills and row.epoch == request.epoch and (nodes := self.tables.index_blocks(request)):
                self._save_new(request, nodes)
                self.leaders.advance(request)
            if request.finish_reason is not None:
                self._bequeath(request)
                self._finish(request, request.finish_reason)
        self.pool.release(plan.release_after)
        return outputs

    def _accept(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> TokenOutput:
        """Append a sampled token and decide whether it was the last."""
        request.num_placeholders -= 1
        request.append(token_id)
        spec = request.spec
        params = spec.params
        stops = token_id in params.stop_token_ids or (not params.ignore_eos and token_id in spec.eos_token_ids)
        if stops and request.num_output_tokens >= params.min_tokens:
            request.finish_reason = "stop"
            return request.output((token_id,), (logprobs,), stop_token_id=token_id)
        if request.num_known_tokens >= request.max_tokens:
            request.finish_reason = "length"
        return _output_of(
            (spec.request_id, (token_id,), (logprobs,), request.finish_reason, None, request.cached_tokens, "")
        )

    def _save_new(self, request: Request, nodes: list[Node]) -> None:
        """Prompt blocks go to the lower tiers at once; a decode block only when a later request touches it."""
        prompt_blocks = request.num_prompt_tokens // self.config.block_size
        first = request.num_indexed_blocks - len(nodes)
        self.transfers.save([n for i, n in enumerate(nodes, first) if i < prompt_blocks and not n.saved])

    def fail_launched(self, reason: str) -> list[TokenOutput]:
        """The runner failed: end every request of the launched steps with an error, and forget those steps."""
        outputs = []
        while self.launched:
            plan = self.launched.popleft()
            for row in plan.rows:
                request = row.request
                request.num_in_flight = 0
                if request.state is RequestState.FINISHED:
                    continue
                self._finish(request, "error")
                outputs.append(TokenOutput(request.request_id, (), finish_reason="error", error=reason))
            self.pool.release(plan.release_after)
        return outputs

    def check(self) -> None:
        """Raise AssertionError, with ids, when blocks, requests and queues disagree."""
        requests = set(self._requests.values())
        self.queues.check(requests)
        self.tables.check(requests)
        self.transfers.check(self.queues.loading)
        self.shadow.check(self.queues.loading)
        for request in self.queues.loading:
            assert request.job is not None or self.shadow.checks(request), f"{request.request_id} loads nothing"
        self.leaders.check([*self.queues.running, *self.queues.loading])
        self.forks.check(requests)
