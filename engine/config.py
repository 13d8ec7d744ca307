"""The engine's configuration: one frozen object, validated here, with the unit and reason of every default."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagetier.kvstore.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
CPU_KERNELS = ("auto", "avx2", "avx512", "avx512_bf16", "amx", "torch")
MAX_THREADS = 1024
SCHEDULING_POLICIES = ("fcfs", "priority", "lpm", "fair")
PREEMPTION_MODES = ("recompute", "swap", "hybrid")
SHADOW_ONE_IN = 1000
MAX_NUM_QUEUED_TOKENS = 1 << 20
TRANSFER_TIMEOUT_S = 60.0
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
BLOCK_SIZES_ALLOWED = "a power of two from 1 to 128"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a core needs to know beyond the model.

    block_size: tokens per KV block; 16 wastes little on short tails and keeps records of small models at 360 KiB.
    num_blocks: device pool size in blocks; set from memory by the caller (kv_cache_memory / bytes per block).
    max_num_seqs: running requests; 64 is past the knee of batch throughput on a small CPU.
    max_num_batched_tokens: the step's token budget; 512 keeps a step near 0.2 s for a 135M model on two cores.
    max_model_len: longest prompt + output in tokens.
    vocab_size: prompts with other ids are refused: the step that meets one fails for all its requests. None: any.
    pipeline_depth: batches in flight; 2 plans step N+1 while step N runs.
    scheduling_policy: who is admitted next and who gives way; fcfs surprises nobody.
    preemption_mode: how a preempted request gets its KV back: computed again, from the lower tiers, or whichever is
        cheaper by this process's own measurements.
    max_num_queued_reqs: waiting requests beyond which new ones are refused with 503.
    max_num_queued_tokens: prompt tokens that wait for their first output beyond which new requests are refused with
        503; a million is ten prompts of 100,000, and on a small CPU ten minutes of work.
    transfer_timeout_s: a read or write of a tier that takes longer is not waited for: a load is computed instead, and a
        request without room beside the blocks that the tier still uses ends with an error; 60, in which the slowest
        medium worth waiting for (128 MiB/s) loads 7.5 GiB.
    paranoid: run every `check()` after every step (the store's now and then), poison fresh and freed bytes.
    shadow_one_in: of that many loaded blocks one is computed anew and compared; 0: none.
    """

    num_blocks: int
    max_model_len: int
    vocab_size: int | None = None
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    pipeline_depth: int = 2
    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int = MAX_NUM_QUEUED_TOKENS
    scheduling_policy: str = "fcfs"
    preemption_mode: str = "hybrid"
    transfer_timeout_s: float = TRANSFER_TIMEOUT_S
    seed: int = 0
    paranoid: bool = False
    shadow_one_in: int = 0

    def __post_init__(self) -> None:
        for name, ok, allowed in (
            ("--block-size", self.block_size in BLOCK_SIZES, BLOCK_SIZES_ALLOWED),
            ("--kv-cache-memory", self.num_blocks >= 1, "room for at least one block"),
            ("--max-num-seqs", self.max_num_seqs >= 1, "at least 1"),
            ("--max-num-batched-tokens", self.max_num_batched_tokens >= 1, "at least 1"),
            ("--max-model-len", self.max_model_len >= 2, "at least 2"),
            ("--max-num-queued-reqs", self.max_num_queued_reqs >= 1, "at least 1"),
            ("--max-num-queued-tokens", self.max_num_queued_tokens >= 1, "at least 1"),
            (
                "--scheduling-policy",
                self.scheduling_policy in SCHEDULING_POLICIES,
                ", ".join(SCHEDULING_POLICIES),
            ),
            ("--preemption-mode", self.preemption_mode in PREEMPTION_MODES, ", ".join(PREEMPTION_MODES)),
            ("--kv-verify", self.shadow_one_in >= 0, "shadow:N with N at least 1"),
            ("pipeline_depth", self.pipeline_depth in (1, 2), "1 or 2"),
        ):
            if not ok:
                field = name.lstrip("-").replace("-", "_")
                raise ConfigError.bad_value(name, getattr(self, field, self.num_blocks), allowed)
        check_transfer_timeout(self.transfer_timeout_s)
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"--no-enable-chunked-prefill needs --max-num-batched-tokens >= --max-model-len "
                f"({self.max_num_batched_tokens} < {self.max_model_len}); raise the one or lower the other"
            )
        if self.shadow_one_in and self.max_num_batched_tokens < self.block_size:
            raise ConfigError(
                f"--kv-verify shadow needs --max-num-batched-tokens >= --block-size "
                f"({self.max_num_batched_tokens} < {self.block_size}): it computes whole blocks"
            )


def check_transfer_timeout(timeout_s: float) -> None:
    """Raises ConfigError for what is no time to wait."""
    if not 0 < timeout_s < math.inf:
        raise ConfigError.bad_value("--kv-transfer-timeout", timeout_s, "more than 0 seconds")


def parse_verify(text: str) -> int:
    """Of how many loaded blocks `--kv-verify` has one computed anew: 0 for checksum. Raises ConfigError."""
    mode, colon, number = text.partition(":")
    if mode == "checksum" and not colon:
        return 0
    if mode == "shadow" and not colon:
        return SHADOW_ONE_IN
    if mode == "shadow" and number.isascii() and number.isdigit() and int(number) >= 1:
        return int(number)
    raise ConfigError.bad_value("--kv-verify", text, f"checksum, shadow (of {SHADOW_ONE_IN} blocks one) or shadow:N")
