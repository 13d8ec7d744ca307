"""From a configuration to a running engine: model, pool, store, connector, core. Used by `LLM` and by the server."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from pagetier.connectors.base import BlockStore, Connector
from pagetier.connectors.cuda_blocks import CudaStaging
from pagetier.connectors.local import LocalConnector
from pagetier.connectors.remote import RemoteConnector, open_remote_store
from pagetier.connectors.staged import StagedConnector
from pagetier.engine.config import (
    BLOCK_SIZES,
    BLOCK_SIZES_ALLOWED,
    CPU_KERNELS,
    DEVICES,
    DTYPES,
    MAX_NUM_QUEUED_TOKENS,
    MAX_THREADS,
    TRANSFER_TIMEOUT_S,
    EngineConfig,
    parse_verify,
)
from pagetier.engine.core import EngineCore
from pagetier.engine.cpu_list import parse_cpus
from pagetier.engine.device_pool import DevicePool, PoolShape, kv_group, torch_dtype
from pagetier.engine.identity import cache_identity, checked_weights_version, roots_of
from pagetier.engine.models.compiled import CompiledModel, UnsupportedError
from pagetier.engine.models.config import ModelConfig
from pagetier.engine.models.llama import Llama
from pagetier.engine.pull import resolve_model
from pagetier.engine.runner.model_runner import Model, ModelRunner
from pagetier.engine.tokenizer import Tokenizer, load_tokenizer
from pagetier.engine.weights.loader import Checkpoint, load_checkpoint, load_config
from pagetier.kernels.cpu.build import BuildError, library_path
from pagetier.kernels.cpu.copying import StreamingCopier
from pagetier.kernels.cpu.library import Isa, Library
from pagetier.kvstore.block import Part
from pagetier.kvstore.breaker import BreakerState
from pagetier.kvstore.config import GIB, StoreConfig, format_size
from pagetier.kvstore.copier import Copier
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.identity import CacheIdentity
from pagetier.kvstore.places import kernels_dir
from pagetier.kvstore.service.remote_store import RemoteStore
from pagetier.kvstore.store import open_store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What to serve and with how much. Each field is the `serve` flag of the same name.

    kv_cache_memory: device pool in bytes on CPU; 2 GiB holds 91,000 tokens of the default model in bf16.
    threads: that run the model on a CPU; 0 is one for each core this process may use. threads_bind: the CPUs that the
    compiled core's threads are bound to, one each, as "0-3,8"; "" leaves them to the system. cpu_kernels: the compiled
    core's instruction-set level, `auto` for the machine's best, `torch` for none of it.
    weights_version: what tells the weights apart beside their fingerprint, for those that are changed in place.
    gpu_memory_utilization: share of a GPU that weights and pool may take together. max_model_len: None is the model's.
    """

    model: str = "smollm2"
    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    max_model_len: int | None = None
    allow_long_context: bool = False
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int = MAX_NUM_QUEUED_TOKENS
    scheduling_policy: str = "fcfs"
    preemption_mode: str = "hybrid"
    kv_cache_memory: int = 2 * GIB
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    pipeline_depth: int = 2
    threads: int = 0
    threads_bind: str = ""
    cpu_kernels: str = "auto"
    seed: int = 0
    kv_hash: str = "sha256"
    weights_version: str = ""
    kv_verify: str = "checksum"
    kv_transfer_timeout_s: float = TRANSFER_TIMEOUT_S
    paranoid: bool = False
    store: StoreConfig = field(default_factory=StoreConfig)


@dataclass(slots=True)
class Engine:
    """A core and the facts its front ends need. Owner: core thread. identity: of the KV that is computed now.
    tiers_down: those that it started without.
    """

    core: EngineCore
    tokenizer: Tokenizer
    model_config: ModelConfig
    config: EngineConfig
    dtype: str
    identity: CacheIdentity
    tiers: tuple[str, ...]
    tiers_down: tuple[str, ...]

    @property
    def domain(self) -> bytes:
        """The 32 bytes that name the cache of this model with these weights."""
        return self.identity.domain()

    def root_of(self, salt: str) -> bytes:
        """The root key of a tenant's chains, as the core itself uses it."""
        return roots_of(self.identity)(salt)

    def set_weights_version(self, version: str | None = None) -> str:
        """The weights were changed in place: no KV of before is used again (`EngineCore.set_identity`); the version.

        Replicas with equal weights share KV when they are told the same version; None: a new UUID, shared with nobody.
        The present version changes nothing. Raises ConfigError for a version that cannot be part of an identity.
        """
        version = checked_weights_version(str(uuid.uuid4()) if version is None else version)
        if version != self.identity.weights_version:
            self.identity = replace(self.identity, weights_version=version)
            self.core.set_identity(self.identity)
        return version

    def close(self, timeout_s: float = 10.0) -> None:
        """Write queued saves for at most `timeout_s` seconds, then let go of everything."""
        self.core.flush(timeout_s)
        self.core.close()


Wrap = Callable[[Connector, int], Connector]


def build_engine(config: ServeConfig, *, progress: bool = False, wrap: Wrap | None = None) -> Engine:
    """Load the model and open the store. Takes about a second for the default model; pulls it first if need be.

    wrap: puts something between engine and store, for measurements; given the connector and the bytes of a block.
    Raises ConfigError or CapacityError, one line, for anything that cannot work.
    """
    device = _resolve_device(config.device)
    if config.dtype not in DTYPES:
        raise ConfigError.bad_value("--dtype", config.dtype, ", ".join(DTYPES))
    path = resolve_model(config.model, progress=progress)
    try:
        tokenizer = load_tokenizer(path)
    except ConfigError:
        load_config(path)  # of two faults the one that no tokenizer mends is told
        raise
    with ExitStack() as undo:  # a caller that tries again must not find threads and folders still taken
        return _assembled(config, path, device, tokenizer, undo, wrap)


def _assembled(
    config: ServeConfig, path: Path, device: str, tokenizer: Tokenizer, undo: ExitStack, wrap: Wrap | None
) -> Engine:
    """The engine; `undo` is left empty, or ends what was begun before something failed."""
    checkpoint = load_checkpoint(path, config.dtype)
    model_config, dtype = checkpoint.config, checkpoint.dtype
    group = kv_group(model_config, dtype)
    engine_config = _engine_config(config, model_config, group.nbytes_per_token, device)
    shape = PoolShape.of(model_config, engine_config.num_blocks, config.block_size)
    pool = DevicePool(shape, torch_dtype(dtype), device)
    undo.callback(pool.close)
    model = _build_model(config, checkpoint, pool, engine_config.max_num_batched_tokens)
    undo.callback(model.close)
    checkpoint.tensors.clear()  # what the model needs it holds
    _return_freed_memory()
    identity = cache_identity(
        model_config,
        group,
        numerics={"weight_path": dtype, "activation_dtype": dtype, **model.numerics},
        block_size=config.block_size,
        fingerprint=checkpoint.fingerprint,
        hash_name=config.kv_hash,
        weights_version=config.weights_version,
    )
    root_of = roots_of(identity)
    connector = None
    tier_names = config.store.tier_names
    if tier_names or config.store.store_url is not None:
        part = Part(0, 0, model_config.num_layers, 0, model_config.num_kv_heads)
        store = _open_store(config, identity, part, pool.block_nbytes)
        undo.callback(store.close)
        connector = _connector(store, pool)
        tier_names = tier_names or tuple(store.stats())
        connector = wrap(connector, pool.block_nbytes) if wrap is not None else connector
    core = EngineCore(
        engine_config,
        ModelRunner(model, pool, threaded=config.pipeline_depth > 1, paranoid=config.paranoid),
        connector,
        root_of=root_of,
        hash_name=config.kv_hash,
        block_nbytes=pool.block_nbytes,
        poison=pool.poison if config.paranoid else None,
    )
    undo.pop_all()
    return Engine(
        core=core,
        tokenizer=tokenizer,
        model_config=model_config,
        config=engine_config,
        dtype=dtype,
        identity=identity,
        tiers=("device", *tier_names),
        tiers_down=tuple(name for name, tier in core.stats()["tiers"].items() if tier["breaker"] == BreakerState.OPEN),
    )


def _return_freed_memory() -> None:
    """Give the system back what loading needed in between, as much as the weights again; glibc would keep it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _resolve_device(device: str) -> str:
    if device not in DEVICES:
        raise ConfigError.bad_value("--device", device, ", ".join(DEVICES))
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu or install a CUDA torch")
    return ("cuda" if available else "cpu") if device == "auto" else device


def _engine_config(config: ServeConfig, model: ModelConfig, nbytes_per_token: int, device: str) -> EngineConfig:
    max_model_len = config.max_model_len or model.max_model_len
    if max_model_len > model.max_model_len and not config.allow_long_context:
        raise ConfigError(
            f"--max-model-len: got {max_model_len}; the model was made for {model.max_model_len} "
            f"(--allow-long-context lifts this, for speed tests only)"
        )
    if config.block_size not in BLOCK_SIZES:  # before it divides anything
        raise ConfigError.bad_value("--block-size", config.block_size, BLOCK_SIZES_ALLOWED)
    memory = config.kv_cache_memory if device == "cpu" else _free_gpu_memory(config.gpu_memory_utilization)
    num_blocks = memory // (nbytes_per_token * config.block_size)
    if num_blocks < 1:
        need = format_size(nbytes_per_token * config.block_size)
        raise ConfigError.bad_value("--kv-cache-memory", format_size(memory), f"at least one block, {need}")
    budget = config.max_num_batched_tokens
    if budget is None:
        budget = 512 if config.enable_chunked_prefill else max(512, max_model_len)
    return EngineConfig(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        pipeline_depth=config.pipeline_depth,
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
        scheduling_policy=config.scheduling_policy,
        preemption_mode=config.preemption_mode,
        transfer_timeout_s=config.kv_transfer_timeout_s,
        seed=config.seed,
        paranoid=config.paranoid,
        shadow_one_in=parse_verify(config.kv_verify),
    )


def _free_gpu_memory(utilization: float) -> int:
    """Bytes for the pool: `utilization` of the whole device less what is taken already."""
    if not 0.0 < utilization <= 1.0:
        raise ConfigError.bad_value("--gpu-memory-utilization", utilization, "above 0, at most 1")
    free, total = torch.cuda.mem_get_info()
    return max(0, int(total * utilization) - (total - free))


def _build_model(config: ServeConfig, checkpoint: Checkpoint, pool: DevicePool, max_tokens: int) -> Model:
    """The compiled core where it runs: on a CPU, in float32 or bfloat16; else torch, which on a CPU is much slower."""
    if pool.device.type != "cpu":
        return Llama(checkpoint.config, checkpoint.tensors, pool.device)
    if config.cpu_kernels not in CPU_KERNELS:
        raise ConfigError.bad_value("--cpu-kernels", config.cpu_kernels, ", ".join(CPU_KERNELS))
    if not 0 <= config.threads <= MAX_THREADS:
        raise ConfigError.bad_value("--threads", config.threads, f"0 to {MAX_THREADS}")
    if config.threads not in (0, len(cpus := parse_cpus(config.threads_bind)) or config.threads):
        raise ConfigError.bad_value("--threads", config.threads, f"0 or {len(cpus)}, the CPUs of --threads-bind")
    if config.cpu_kernels != "torch":
        try:
            return _compiled_model(config, checkpoint, pool, max_tokens)
        except (BuildError, OSError, UnsupportedError) as error:
            logger.warning("the compiled CPU core does not serve: %s; torch does instead, several times slower", error)
    if config.threads:
        torch.set_num_threads(config.threads)
    return Llama(checkpoint.config, checkpoint.tensors)


def _compiled_model(config: ServeConfig, checkpoint: Checkpoint, pool: DevicePool, max_tokens: int) -> CompiledModel:
    """Raises ConfigError for a level that this machine lacks: a lower one would share no cache with the one named."""
    library = Library(library_path(kernels_dir()))
    limit = Isa.AMX if config.cpu_kernels == "auto" else Isa[config.cpu_kernels.upper()]
    best = library.best_isa(limit)
    if config.cpu_kernels != "auto" and best != limit:
        allowed = ", ".join(("auto", *(level.name.lower() for level in Isa if Isa.NONE < level <= best), "torch"))
        raise ConfigError.bad_value("--cpu-kernels", config.cpu_kernels, f"what this machine runs: {allowed}")
    if config.cpu_kernels == "auto" and (lacks := library.lacks()):
        logger.warning(
            "the compiled CPU core runs at level %s, slower in bfloat16; it lacks %s", best.name.lower(), lacks
        )
    cpus = parse_cpus(config.threads_bind)
    return CompiledModel(
        checkpoint.config,
        checkpoint.tensors,
        pool,
        library,
        max_tokens=max_tokens,
        num_threads=len(cpus) or config.threads or len(os.sched_getaffinity(0)),
        limit=limit,
        cpus=cpus,
    )


def _open_store(config: ServeConfig, identity: CacheIdentity, part: Part, payload_bytes: int) -> BlockStore:
    is_remote = config.store.store_url is not None
    copier = _copier() if is_remote or config.store.host_size else None
    store = replace(config.store, poison=config.paranoid, copier=copier)
    return (open_remote_store if is_remote else open_store)(store, identity, part, payload_bytes)


def _copier() -> Copier | None:
    """The compiled core's, for the host tier or a store service's memory."""
    try:
        return StreamingCopier(Library(library_path(kernels_dir())))
    except (BuildError, OSError) as error:
        logger.warning("numpy copies blocks from and to memory, at about half the speed: %s", error)
        return None


def _connector(store: BlockStore, pool: DevicePool) -> Connector:
    if pool.device.type == "cpu":
        blocks = _PoolBytes(pool)
        return RemoteConnector(store, blocks) if isinstance(store, RemoteStore) else LocalConnector(store, blocks)
    return StagedConnector(store, CudaStaging(pool.tensor.view(pool.shape.num_blocks, -1).view(torch.uint8)))


class _PoolBytes:
    """The device pool's blocks in host memory, as a connector sees them."""

    def __init__(self, pool: DevicePool) -> None:
        self.readable = pool.view
        self.writable = pool.view
