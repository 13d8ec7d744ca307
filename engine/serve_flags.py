"""The flags that `pagetier serve` has to itself: one dataclass, what is not built yet, and the plain fields for the
engine process.

Loads neither torch nor the server. Their meaning is that of `ServeConfig` and `StoreConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from pagetier.engine.config import (
    CPU_KERNELS,
    DEVICES,
    DTYPES,
    MAX_NUM_QUEUED_TOKENS,
    MAX_THREADS,
    PREEMPTION_MODES,
    SCHEDULING_POLICIES,
    SHADOW_ONE_IN,
    TRANSFER_TIMEOUT_S,
    check_transfer_timeout,
    parse_verify,
)
from pagetier.engine.cpu_list import parse_cpus
from pagetier.engine.identity import checked_weights_version
from pagetier.kvstore.config import StoreConfig, parse_size, parse_tiers
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.keys import hash_named
from pagetier.kvstore.mac import load_mac_key
from pagetier.kvstore.tier_flags import TierFlags, tier_option

MODEL, SERVER, SCHEDULER, CACHE = "Model", "Server", "Scheduler", "KV cache on the device"

THREADS_HELP = "Threads of the model on a CPU; 0: one per core it may use. More than there are free cores is slower."
CPU_KERNELS_HELP = (
    f"{', '.join(CPU_KERNELS)}: the best level this CPU has, that level (replicas on unlike CPUs share KV only at the "
    "same one), or torch's modules, several times slower."
)

KV_VERIFY_HELP = (
    f"checksum: every record that is read. shadow[:N]: also, one of N loaded blocks (default {SHADOW_ONE_IN}) is "
    "computed anew and compared; costs that computation."
)
KV_EVENTS_HELP = (
    'KV events over ZMQ as vLLM\'s: {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "topic": "", '
    '"replay_endpoint": …, "buffer_steps": …, "hwm": …}; default endpoint: loopback only.'
)
WRITE_POLICY_HELP = (
    "When a tier is given a prompt's blocks: through (the default: once they are computed) or second-touch (when they "
    "are used again), such as nvme=through,redis=second-touch."
)
TRANSFER_TIMEOUT_HELP = (
    "Seconds, more than 0, after which a read or write of a tier is not waited for; who has no room beside its blocks "
    "gets 503."
)
PREEMPTION_HELP = (
    "How a preempted request gets its KV back: recompute, swap (through the KV tiers) or hybrid (what is cheaper here)."
)
POLICY_HELP = (
    "Who is admitted next: fcfs; priority (smaller values of a request's `priority` first; they preempt larger ones); "
    "lpm (longest cached prefix first); fair (the `user` served least first)."
)


def _option(*names: str, panel: str, text: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=text, **more)


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """One field per flag."""

    model: Annotated[str, _option("--model", panel=MODEL, text="smollm2, a folder or .gguf file, or org/name.")] = (
        "smollm2"
    )
    served_model_name: Annotated[
        list[str] | None, _option("--served-model-name", panel=MODEL, text="Name(s) in the API; default: --model.")
    ] = None
    dtype: Annotated[str, _option("--dtype", panel=MODEL, text=f"{', '.join(DTYPES)}.")] = "auto"
    device: Annotated[str, _option("--device", panel=MODEL, text=f"{', '.join(DEVICES)}.")] = "auto"
    threads: Annotated[int, _option("--threads", panel=MODEL, text=THREADS_HELP, min=0, max=MAX_THREADS)] = 0
    threads_bind: Annotated[
        str, _option("--threads-bind", panel=MODEL, text="CPUs, such as 0-3, to bind a thread each to; default: none.")
    ] = ""
    cpu_kernels: Annotated[str, _option("--cpu-kernels", panel=MODEL, text=CPU_KERNELS_HELP)] = "auto"
    max_model_len: Annotated[
        int | None, _option("--max-model-len", panel=MODEL, text="Longest prompt + output, tokens.", min=2)
    ] = None
    allow_long_context: Annotated[
        bool, _option("--allow-long-context", panel=MODEL, text="Let --max-model-len exceed the model's (speed tests).")
    ] = False
    seed: Annotated[
        int | None, _option("--seed", panel=MODEL, text="For requests that name no seed; default: a new one each.")
    ] = None
    quantization: Annotated[str | None, _option("--quantization", panel=MODEL, text="none (not built yet).")] = None
    tensor_parallel_size: Annotated[int, _option("--tensor-parallel-size", panel=MODEL, text="1 (more: later).")] = 1
    pipeline_parallel_size: Annotated[
        int, _option("--pipeline-parallel-size", panel=MODEL, text="1 (more: later).")
    ] = 1
    speculative_config: Annotated[
        str | None, _option("--speculative-config", panel=MODEL, text="Not built yet.", hidden=True)
    ] = None
    deterministic: Annotated[bool, _option("--deterministic", panel=MODEL, text="Not built yet.", hidden=True)] = False

    host: Annotated[str, _option("--host", panel=SERVER, text="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, _option("--port", panel=SERVER, text="0: any free one.", min=0, max=65535)] = 8000
    api_key: Annotated[
        str | None, _option("--api-key", panel=SERVER, text="What clients must send.", envvar="PAGETIER_API_KEY")
    ] = None
    admin_token: Annotated[
        str | None,
        _option(
            "--admin-token",
            panel=SERVER,
            text="What /admin/, /top, /pin, /purge and the like ask for; without one they answer local programs only.",
            envvar="PAGETIER_ADMIN_TOKEN",
        ),
    ] = None
    engine_process: Annotated[
        str, _option("--engine-process", panel=SERVER, text="auto and on: its own process; off: a thread.")
    ] = "auto"
    kv_events_config: Annotated[
        str | None, _option("--kv-events-config", panel=SERVER, text=KV_EVENTS_HELP, metavar="JSON")
    ] = None
    shutdown_timeout: Annotated[
        float, _option("--shutdown-timeout", panel=SERVER, text="Seconds for running requests and queued puts.", min=0)
    ] = 10.0
    max_num_queued_reqs: Annotated[
        int,
        _option("--max-num-queued-reqs", panel=SERVER, text="Waiting sequences beyond which 503 is answered.", min=1),
    ] = 1024
    max_num_queued_tokens: Annotated[
        int,
        _option(
            "--max-num-queued-tokens",
            panel=SERVER,
            text="Prompt tokens waiting for a first output beyond which 503 is answered.",
            min=1,
        ),
    ] = MAX_NUM_QUEUED_TOKENS
    structured_outputs_backend: Annotated[
        str | None, _option("--structured-outputs-backend", panel=SERVER, text="Not built yet.", hidden=True)
    ] = None

    max_num_seqs: Annotated[int, _option("--max-num-seqs", panel=SCHEDULER, text="Running sequences.", min=1)] = 64
    max_num_batched_tokens: Annotated[
        int | None, _option("--max-num-batched-tokens", panel=SCHEDULER, text="A step's tokens; default: 512.", min=1)
    ] = None
    enable_chunked_prefill: Annotated[
        bool,
        _option("--enable-chunked-prefill/--no-enable-chunked-prefill", panel=SCHEDULER, text="Split long prompts."),
    ] = True
    scheduling_policy: Annotated[str, _option("--scheduling-policy", panel=SCHEDULER, text=POLICY_HELP)] = "fcfs"
    preemption_mode: Annotated[str, _option("--preemption-mode", panel=SCHEDULER, text=PREEMPTION_HELP)] = "hybrid"
    itl_target_ms: Annotated[
        float | None, _option("--itl-target-ms", panel=SCHEDULER, text="Not built yet.", hidden=True)
    ] = None
    paranoid: Annotated[
        bool, _option("--paranoid", panel=SCHEDULER, text="Check all invariants, poison fresh and freed bytes. Slow.")
    ] = False

    kv_cache_memory: Annotated[
        str, _option("--kv-cache-memory", panel=CACHE, text="Device pool on CPU, e.g. 2GiB.")
    ] = "2GiB"
    gpu_memory_utilization: Annotated[
        float, _option("--gpu-memory-utilization", panel=CACHE, text="Share of a GPU for weights and pool.")
    ] = 0.9
    block_size: Annotated[int, _option("--block-size", panel=CACHE, text="Tokens per block.")] = 16
    enable_prefix_caching: Annotated[
        bool, _option("--enable-prefix-caching/--no-enable-prefix-caching", panel=CACHE, text="Reuse known prefixes.")
    ] = True
    kv_cache_dtype: Annotated[str, _option("--kv-cache-dtype", panel=CACHE, text="auto (others: later).")] = "auto"
    kv_hash: Annotated[
        str, _option("--kv-hash", panel=CACHE, text="sha256, or xxh3-128 where all clients are trusted.")
    ] = "sha256"

    weights_version: Annotated[
        str,
        _option(
            "--weights-version",
            panel=CACHE,
            text="Of weights that are not the checkpoint's; replicas share KV at the same one only.",
        ),
    ] = ""

    kv_tier: Annotated[str, tier_option("--kv-tier", text="Tiers, fastest first, e.g. nvme,redis; default: none.")] = ""
    kv_store_url: Annotated[
        str | None,
        tier_option(
            "--kv-store-url",
            text="A running `pagetier store` instead of own tiers: local, unix:///path, grpc://host:port or "
            "grpcs://host:port?ca=FILE, with ?token_file=FILE where it has a token.",
        ),
    ] = None
    kv_host_size: Annotated[str, tier_option("--kv-host-size", text="Host arena, e.g. 4GiB; default 0: none.")] = "0"
    kv_write_policy: Annotated[str, tier_option("--kv-write-policy", text=WRITE_POLICY_HELP)] = ""
    kv_transfer_timeout: Annotated[float, tier_option("--kv-transfer-timeout", text=TRANSFER_TIMEOUT_HELP)] = (
        TRANSFER_TIMEOUT_S
    )
    kv_verify: Annotated[str, tier_option("--kv-verify", text=KV_VERIFY_HELP)] = "checksum"


# Flags whose feature does not exist yet: field -> the values that ask for nothing.
UNBUILT: dict[str, tuple[Any, ...]] = {
    "quantization": (None, "none"),
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "speculative_config": (None,),
    "deterministic": (False,),
    "structured_outputs_backend": (None,),
    "itl_target_ms": (None,),
    "kv_cache_dtype": ("auto",),
}


def refuse_unbuilt(flags: ServeFlags) -> None:
    """Raise ConfigError for a flag that asks for what does not exist yet: better than to take it and do nothing."""
    for name, neutral in UNBUILT.items():
        value = getattr(flags, name)
        if value not in neutral:
            allowed = " or ".join(str(one) for one in neutral if one not in (None, False)) or "to leave it out"
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}: got {value!r}, which is not built yet; allowed: {allowed}")


def refuse_empty_secrets(flags: ServeFlags) -> None:
    """Raise ConfigError for a secret that everybody knows. Secrets are named, never shown."""
    for flag, secret in (("--api-key", flags.api_key), ("--admin-token", flags.admin_token)):
        if secret is not None and not secret.strip():
            raise ConfigError(f"{flag}: got an empty one; allowed: at least one character, or leave it out")


def store_fields(flags: ServeFlags, tiers: TierFlags) -> dict[str, Any]:
    """The fields of `StoreConfig`, JSON-able and checked. Raises ConfigError."""
    fields: dict[str, Any] = tiers.store_fields() | {
        "tiers": parse_tiers(flags.kv_tier),
        "host_size": parse_size(flags.kv_host_size, "--kv-host-size"),
        "write_policy": flags.kv_write_policy,
        "store_url": flags.kv_store_url,
    }
    if tiers.kv_mac_key is not None:
        load_mac_key(tiers.kv_mac_key.expanduser())  # refused before a model is loaded
    StoreConfig(**fields)  # refuses here what it would refuse there
    plain = {name: str(value) for name, value in fields.items() if isinstance(value, Path)}
    return fields | plain | {"tiers": list(fields["tiers"])}


def engine_fields(flags: ServeFlags, tiers: TierFlags | None = None) -> dict[str, Any]:
    """The fields of `ServeConfig`, JSON-able, as far as they can be checked without the model. Raises ConfigError."""
    refuse_unbuilt(flags)
    refuse_empty_secrets(flags)
    for flag, value, allowed in (
        ("--dtype", flags.dtype, DTYPES),
        ("--device", flags.device, DEVICES),
        ("--cpu-kernels", flags.cpu_kernels, CPU_KERNELS),
        ("--scheduling-policy", flags.scheduling_policy, SCHEDULING_POLICIES),
        ("--preemption-mode", flags.preemption_mode, PREEMPTION_MODES),
        ("--engine-process", flags.engine_process, ("auto", "on", "off")),
    ):
        if value not in allowed:
            raise ConfigError.bad_value(flag, value, ", ".join(allowed))
    parse_cpus(flags.threads_bind)
    hash_named(flags.kv_hash)
    parse_verify(flags.kv_verify)
    check_transfer_timeout(flags.kv_transfer_timeout)
    return {
        "model": flags.model,
        "dtype": flags.dtype,
        "device": flags.device,
        "threads": flags.threads,
        "threads_bind": flags.threads_bind,
        "cpu_kernels": flags.cpu_kernels,
        "block_size": flags.block_size,
        "max_model_len": flags.max_model_len,
        "allow_long_context": flags.allow_long_context,
        "max_num_seqs": flags.max_num_seqs,
        "max_num_batched_tokens": flags.max_num_batched_tokens,
        "max_num_queued_reqs": flags.max_num_queued_reqs,
        "max_num_queued_tokens": flags.max_num_queued_tokens,
        "scheduling_policy": flags.scheduling_policy,
        "preemption_mode": flags.preemption_mode,
        "kv_cache_memory": parse_size(flags.kv_cache_memory, "--kv-cache-memory"),
        "gpu_memory_utilization": flags.gpu_memory_utilization,
        "enable_prefix_caching": flags.enable_prefix_caching,
        "enable_chunked_prefill": flags.enable_chunked_prefill,
        "kv_hash": flags.kv_hash,
        "weights_version": checked_weights_version(flags.weights_version),
        "kv_verify": flags.kv_verify,
        "kv_transfer_timeout_s": flags.kv_transfer_timeout,
        "paranoid": flags.paranoid,
        "store": store_fields(flags, tiers or TierFlags()),
    }
