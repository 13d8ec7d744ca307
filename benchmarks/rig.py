"""The engine's parts by hand, as `engine.build` puts them together for a CPU, for benchmarks that look inside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from pagetier.benchmarks.report import num_cores
from pagetier.benchmarks.workload import Request
from pagetier.engine.config import EngineConfig
from pagetier.engine.core import EngineCore
from pagetier.engine.device_pool import DevicePool, PoolShape, torch_dtype
from pagetier.engine.interpreter import set_for_an_engine
from pagetier.engine.messages import EngineRequest
from pagetier.engine.models.compiled import CompiledModel
from pagetier.engine.models.config import ModelConfig
from pagetier.engine.pull import resolve_model
from pagetier.engine.runner.model_runner import ModelRunner
from pagetier.engine.sampling_params import SamplingParams
from pagetier.engine.weights.loader import load_checkpoint
from pagetier.kernels.cpu.build import library_path
from pagetier.kernels.cpu.library import Library
from pagetier.kvstore.keys import hash_named, root_key
from pagetier.kvstore.places import kernels_dir

MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class Weights:
    """A checkpoint in one dtype. Shared by rigs: each packs its own copy."""

    config: ModelConfig
    dtype: str
    tensors: dict[str, Tensor]

    @classmethod
    def load(cls, dtype: str) -> Weights:
        checkpoint = load_checkpoint(resolve_model(MODEL), dtype)
        return cls(checkpoint.config, checkpoint.dtype, checkpoint.tensors)

    @property
    def itemsize(self) -> int:
        return torch_dtype(self.dtype).itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.itemsize

    def gemm_weights(self) -> tuple[int, int]:
        """How many weights a step multiplies (for each token, for each sample): past the last layer's K and V, only
        rows that are sampled go on."""
        per_token = per_sample = 0
        last = f"model.layers.{self.config.num_layers - 1}."
        unused = "lm_head" if self.config.tie_word_embeddings else "embed_tokens"
        for name, tensor in self.tensors.items():
            if tensor.dim() != 2 or unused in name:
                continue
            sampled = not name.startswith("model.layers.") or (name.startswith(last) and not _is_qkv(name))
            per_sample += tensor.numel() if sampled else 0
            per_token += 0 if sampled else tensor.numel()
        return per_token, per_sample

    @property
    def gemm_bytes(self) -> int:
        """Bytes of weights that every step reads."""
        return sum(self.gemm_weights()) * self.itemsize


def _is_qkv(name: str) -> bool:
    return any(f".{part}_proj." in name for part in "qkv")


@dataclass(frozen=True, slots=True)
class Setup:
    """Defaults are those of `serve`, without a prefix cache: no prompt here repeats another."""

    threads: int = field(default_factory=num_cores)
    num_blocks: int = 2048
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    make_runner: Callable[[CompiledModel, DevicePool], ModelRunner] = lambda model, pool: ModelRunner(
        model, pool, threaded=True
    )


@dataclass(frozen=True, slots=True)
class Rig:
    """An engine whose parts are in reach. `model.counters` are nanoseconds by op kind."""

    weights: Weights
    setup: Setup
    pool: DevicePool
    model: CompiledModel
    runner: ModelRunner
    core: EngineCore

    @property
    def kernel_s(self) -> float:
        """Seconds within kernels since the model was made."""
        return float(self.model.counters.sum()) / 1e9

    def generate(self, requests: Sequence[Request]) -> tuple[list[list[int]], float]:
        """New ids of every request, all queued at once, and the seconds that it took. No text is made of them."""
        start_s = time.perf_counter()
        outputs = self.add(requests)
        while self.core.has_work():
            self.take_step(outputs)
        return list(outputs.values()), time.perf_counter() - start_s

    def add(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        """Queue greedy requests; where their tokens go, by request id. Needs an engine without requests."""
        outputs: dict[str, list[int]] = {str(index): [] for index in range(len(requests))}
        for request_id, request in zip(outputs, requests, strict=True):
            params = SamplingParams(temperature=0.0, max_tokens=request.num_new, ignore_eos=True)
            self.core.add_request(EngineRequest(request_id, tuple(request.prompt_ids), params, seed=0))
        return outputs

    def take_step(self, outputs: dict[str, list[int]]) -> int:
        """One step of the core; how many requests got a token. Raises RuntimeError when one failed."""
        found = self.core.step()
        for output in found:
            if output.finish_reason == "error":
                raise RuntimeError(output.error)
            outputs[output.request_id] += output.token_ids
        return len(found)


@contextmanager
def open_rig(weights: Weights, setup: Setup | None = None) -> Iterator[Rig]:
    """Raises BuildError or UnsupportedError where the compiled core does not run: these benchmarks are of it."""
    setup = setup or Setup()
    config = weights.config
    pool = DevicePool(PoolShape.of(config, setup.num_blocks, setup.block_size), torch_dtype(weights.dtype))
    model = CompiledModel(
        config,
        weights.tensors,
        pool,
        Library(library_path(kernels_dir())),
        max_tokens=setup.max_num_batched_tokens,
        num_threads=setup.threads,
    )
    runner = setup.make_runner(model, pool)
    engine_config = EngineConfig(
        num_blocks=setup.num_blocks,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        block_size=setup.block_size,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        enable_prefix_caching=False,
    )
    hash_ = hash_named("sha256")
    core = EngineCore(engine_config, runner, None, root_of=lambda salt: root_key(bytes(32), salt.encode(), hash_))
    try:
        with set_for_an_engine():
            yield Rig(weights, setup, pool, model, runner, core)
    finally:
        core.close()
