"""Offline use: prompts in, answers out, on an engine in this process."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn

from pagetier.engine.batch import TokenLogprobs
from pagetier.engine.build import ServeConfig, build_engine
from pagetier.engine.detokenizer import IncrementalDetokenizer
from pagetier.engine.interrupts import held_interrupts
from pagetier.engine.messages import EngineRequest, TokenOutput
from pagetier.engine.ranking import best_indices, cumulative_logprob, sequence_params
from pagetier.engine.sampling_params import SamplingParams
from pagetier.engine.tokenizer import Tokenizer
from pagetier.kvstore.config import StoreConfig, parse_size
from pagetier.kvstore.errors import ConfigError, PagetierError

Prompt = str | Sequence[int]
STORE_WAIT_S = 0.0005  # between looks at a store that everything waits for


@dataclass(slots=True)
class CompletionOutput:
    """One choice. finish_reason: stop or length. stop_reason: the stop string or token id that ended it, if one did.
    cumulative_logprob: of its tokens, None where no log-probabilities were asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt's answer, its choices in order, with `best_of` the likeliest first. cached_tokens: prompt tokens that
    were not computed, by tier."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    cached_tokens: dict[str, int] = field(default_factory=dict)


class LLM:
    """A model ready to generate.

    model: `smollm2`, a path, or `org/name`. kv_tier: lower tiers in order, e.g. ("nvme", "redis"). Other options are
    the fields of `ServeConfig` and, for the store, of `StoreConfig`; sizes may be text such as "2GiB".

        with LLM("smollm2") as llm:
            print(llm.generate("Hello", SamplingParams(max_tokens=8))[0].outputs[0].text)

    Raises ConfigError for what cannot work. Not thread-safe.
    """

    def __init__(self, model: str = "smollm2", *, kv_tier: Sequence[str] = (), **options: Any) -> None:
        self.config = _serve_config(model, kv_tier, options)
        self._engine = build_engine(self.config, progress=sys.stderr.isatty())
        self._seeds = random.Random(self.config.seed)
        self._num_requests = 0

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def domain(self) -> bytes:
        """The 32 bytes that name this model's cache."""
        return self._engine.domain

    @property
    def weights_version(self) -> str:
        """What tells these weights from others of the same checkpoint; empty until it is set."""
        return self._engine.identity.weights_version

    def set_weights_version(self, version: str | None = None) -> str:
        """Call it when the weights were changed in place, before the next prompt: none of the KV computed so far, on
        the device or in a tier, is used again. Returns the version: yours, or a new UUID.

        Replicas that are given the same version for the same weights share their KV. Raises ConfigError for a version
        of more than 256 characters, ClosedError after `close`.
        """
        with held_interrupts():
            return self._engine.set_weights_version(version)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue prompts (texts or token ids), all in one continuous batch; answers in the prompts' order.

        params: for all, or one for each prompt. Raises ValueError when there are not as many of them; PagetierError
        when a prompt cannot be served, e.g. is too long; the others of the call end then too. Raises ClosedError after
        `close`. Ctrl-C takes effect between two steps, and the next call is served as ever.
        """
        listed = _as_list(prompts)
        one_each = [params or SamplingParams()] * len(listed) if not isinstance(params, Sequence) else params
        if len(one_each) != len(listed):
            raise ValueError(
                f"{len(one_each)} sampling parameters for {len(listed)} prompts; give one, or one for each"
            )
        answers: list[RequestOutput] = []
        open_choices: dict[str, _Choice] = {}
        with held_interrupts() as deliver_interrupt:
            try:
                for prompt, own in zip(listed, one_each, strict=True):
                    answer = self._add(prompt, own, cache_salt, open_choices)
                    answers.append(answer)
                    deliver_interrupt()
                self._run(open_choices, progress, deliver_interrupt)
                for answer, own in zip(answers, one_each, strict=True):
                    _rank(answer, own)
            finally:
                self._engine.core.abort(list(open_choices))
        return answers

    def _add(
        self, prompt: str | list[int], params: SamplingParams, cache_salt: str, open_choices: dict[str, _Choice]
    ) -> RequestOutput:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        answer = RequestOutput(prompt if isinstance(prompt, str) else None, ids, [])
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        own = replace(sequence_params(params), n=1, best_of=None)
        group = f"llm-{self._num_requests}" if params.num_sequences > 1 else ""
        for index in range(params.num_sequences):
            request = self._request(ids, own, seed, index, cache_salt, group)
            answer.outputs.append(CompletionOutput(index))
            open_choices[request.request_id] = _Choice(answer, answer.outputs[-1], request, self.tokenizer)
            self._engine.core.add_request(request)
        return answer

    def chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """Answer a conversation through the model's chat template."""
        text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return self.generate([ids], params, **options)[0]

    def stats(self) -> dict[str, Any]:
        """The `lookup` and `tiers` figures of `GET /stats`."""
        return self._engine.core.stats()

    def _request(
        self, ids: list[int], params: SamplingParams, seed: int, index: int, salt: str, group: str
    ) -> EngineRequest:
        self._num_requests += 1
        return EngineRequest(
            request_id=f"llm-{self._num_requests}",
            prompt_ids=tuple(ids),
            params=params,
            seed=seed & ((1 << 64) - 1),
            choice=index,
            eos_token_ids=tuple(self.tokenizer.eos_token_ids),
            cache_salt=salt,
            arrival_s=time.monotonic(),
            group=group,
        )

    def _run(self, choices: dict[str, _Choice], progress: bool, deliver_interrupt: Callable[[], None]) -> None:
        core = self._engine.core
        with _progress_bar(len(choices), progress) as advance:
            while choices:
                deliver_interrupt()
                outputs = core.step()
                for output in outputs:
                    choice = choices.get(output.request_id)
                    if choice is None:
                        continue
                    if choice.take(output):
                        del choices[output.request_id]
                        core.abort([output.request_id])  # a stop string ends it here, not yet in the core
                        advance()
                if not outputs and core.waits_for_store:
                    time.sleep(STORE_WAIT_S)

    def close(self, timeout_s: float = 10.0) -> None:
        """Write queued saves, then let go of model and store."""
        self._engine.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Choice:
    """A choice under way: tokens in, text out."""

    def __init__(
        self, answer: RequestOutput, output: CompletionOutput, request: EngineRequest, tokenizer: Tokenizer
    ) -> None:
        self._answer, self._output = answer, output
        self._is_first = request.choice == 0
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, request.prompt_ids, stop=request.params.stop, min_tokens=request.params.min_tokens
        )

    def take(self, step: TokenOutput) -> bool:
        """Add a step's tokens; whether the choice ended. Raises PagetierError when it ended with an error."""
        if step.finish_reason == "error":
            raise PagetierError(step.error)
        output, detokenizer = self._output, self._detokenizer
        output.token_ids.extend(step.token_ids)
        output.logprobs.extend(step.logprobs)
        if self._is_first:  # the others share its prompt
            self._answer.cached_tokens = dict(step.cached_tokens)
        text_ids = step.token_ids[:-1] if step.stop_token_id is not None else step.token_ids
        output.text += detokenizer.push(text_ids)
        if detokenizer.stopped is None and step.finish_reason is not None:
            output.text += detokenizer.finish()
            output.finish_reason, output.stop_reason = step.finish_reason, step.stop_token_id
        if detokenizer.stopped is not None:
            output.finish_reason, output.stop_reason = "stop", detokenizer.stopped
        return output.finish_reason is not None


def _rank(answer: RequestOutput, params: SamplingParams) -> None:
    """Leave the `n` likeliest sequences, best first, where more were generated."""
    if params.logprobs is None and not params.is_ranked:
        return
    scores = [cumulative_logprob(output.logprobs) for output in answer.outputs]
    for output, score in zip(answer.outputs, scores, strict=True):
        output.cumulative_logprob = score
    if not params.is_ranked:
        return
    answer.outputs = [answer.outputs[index] for index in best_indices(scores, params.n)]
    for index, output in enumerate(answer.outputs):
        output.index = index
        if params.logprobs is None:
            output.logprobs = []


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """One entry per prompt. Raises ConfigError for a mixture, which would otherwise lose some."""
    if isinstance(prompts, str):
        return [prompts]
    entries: list[Any] = list(prompts)
    ids = [entry for entry in entries if isinstance(entry, Integral)]  # numpy's too
    if ids and len(ids) < len(entries):
        allowed = "texts and lists of token ids, or the token ids of one prompt"
        raise ConfigError.bad_value("prompts", f"the token id {ids[0]} beside whole prompts", allowed)
    if ids:
        return [[int(token) for token in ids]]
    return [entry if isinstance(entry, str) else [int(token) for token in entry] for entry in entries]


def _serve_config(model: str, kv_tier: Sequence[str], options: dict[str, Any]) -> ServeConfig:
    """Sort keyword options into the engine's and the store's; unknown ones are named."""
    store_fields, own_fields = StoreConfig.__dataclass_fields__, ServeConfig.__dataclass_fields__
    store: dict[str, Any] = {"tiers": tuple(kv_tier)}
    own: dict[str, Any] = {"model": model}
    for name, value in options.items():
        is_size = name in ("kv_cache_memory", "host_size", "nvme_size", "nvme_scrub", "redis_size", "warmup")
        given = parse_size(value, name) if is_size else value
        if name in store_fields and name != "tiers":
            store[name] = given
        elif name in own_fields and name != "store":
            own[name] = given
        else:
            raise ConfigError.unknown_name("option of LLM", name, (store_fields | own_fields).keys() - {"tiers"})
    return ServeConfig(**own, store=StoreConfig(**store))


@contextlib.contextmanager
def _progress_bar(total: int, wanted: bool) -> Iterator[Any]:
    if not wanted:
        yield lambda: None
        return
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TaskProgressColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("generating", total=total)
        yield lambda: bar.advance(task)
