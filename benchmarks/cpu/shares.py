"""Rows against the machine's limits: each figure of ours beside the limit, measured in turn in the same run.

Limits are those of as many threads as the engine uses. A limit that neighbours on the machine depress does so to both
sides of a pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from pagetier.benchmarks.limits.program import Clock, LimitsProgram
from pagetier.benchmarks.pairing import Pairs, measure_pairs, percentile
from pagetier.benchmarks.report import Row
from pagetier.benchmarks.rig import Rig, Setup, Weights, open_rig
from pagetier.benchmarks.static_rows import GREEDY
from pagetier.benchmarks.workload import PREFILL, Workload, decode
from pagetier.engine.batch import Batch, SampleRow
from pagetier.kernels.cpu.library import OpKind

CONTEXTS = (8_192, 32_768, 100_000)
LIMIT_S = 0.3


@dataclass(frozen=True, slots=True)
class Limits:
    """The machine's limits for one rig's threads, measured anew at every call. Bytes or operations per second."""

    program: LimitsProgram
    threads: int

    def read(self) -> float:
        return self.program.read(Clock(self.threads, LIMIT_S))[0]

    def bf16(self) -> float:
        return self.program.peak(Clock(self.threads, LIMIT_S)).bf16[0]


def share_row(name: str, pairs: Pairs, target: str, note: str) -> Row:
    shares = pairs.ratios
    return Row(name, pairs.ratio, "ratio", target, percentile(shares, 0.5), percentile(shares, 0.99), len(shares), note)


def decode_rows(rig: Rig, limits: Limits, num_pairs: int, num_new: int, note: str) -> Iterator[Row]:
    """Steps per second times the bytes of weights that a step reads, over streaming read."""
    for batch, target in ((1, ">= 0.80"), (16, ">= 0.60")):
        workload = decode(batch, num_new)
        pairs = measure_pairs(lambda workload=workload: weight_bytes_per_s(rig, workload), limits.read, num_pairs)  # type: ignore[misc]
        how = f"{rig.weights.gemm_bytes / 1e6:.0f} MB of weights a step"
        yield share_row(f"decode_{batch}_vs_weight_read", pairs, target, _joined(how, note))


def weight_bytes_per_s(rig: Rig, workload: Workload) -> float:
    _, elapsed_s = rig.generate(workload.requests(seed=1))
    num_steps = workload.lengths[0][1]  # the prefill of a few tokens is one of them
    return rig.weights.gemm_bytes * num_steps / elapsed_s


def gemm_row(rig: Rig, limits: Limits, num_pairs: int, note: str) -> Row:
    """Floating-point operations of a prefill's matrix products over the time within them, over the peak rate."""

    def ours() -> float:
        before = int(rig.model.counters[OpKind.GEMM])
        rig.generate(PREFILL.requests(seed=1))
        per_token, per_sample = rig.weights.gemm_weights()
        operations = 2 * (per_token * PREFILL.lengths[0][0] + per_sample)
        return operations / ((int(rig.model.counters[OpKind.GEMM]) - before) / 1e9)

    path = limits.program.peak(Clock(1, 0.01)).bf16_path
    how = f"the peak is that of {path}"
    return share_row("prefill_gemm_vs_peak", measure_pairs(ours, limits.bf16, num_pairs), ">= 0.50", _joined(how, note))


def attention_rows(weights: Weights, limits: Limits, num_pairs: int, note: str) -> Iterator[Row]:
    """KV bytes that a decode step's attention reads over the time within attention, over streaming read; one row of
    random K and V, its blocks in random order over the pool."""
    num_blocks = -(-max(CONTEXTS) // 16)
    with open_rig(weights, Setup(threads=limits.threads, num_blocks=num_blocks)) as rig:
        fill_randomly(rig.pool.tensor)
        for context in CONTEXTS:
            batch = held_batch(context, num_blocks, 16)
            steps = max(2, 400_000 // context)
            attention_bytes_per_s(rig, batch, 1)
            pairs = measure_pairs(
                lambda batch=batch, steps=steps: attention_bytes_per_s(rig, batch, steps),  # type: ignore[misc]
                limits.read,
                num_pairs,
            )
            yield share_row(f"attention_{context}_vs_read", pairs, ">= 0.75", note)


def fill_randomly(pool: torch.Tensor) -> None:
    """Normal numbers; a piece of 8 Mi of them again and again, which no cache can hold."""
    flat = pool.view(-1)
    piece = torch.randn(1 << 23, generator=torch.Generator().manual_seed(0)).to(pool.dtype)
    for start in range(0, len(flat), len(piece)):
        flat[start : start + len(piece)] = piece[: len(flat) - start]


def held_batch(context: int, num_blocks: int, block_size: int) -> Batch:
    """One row that decodes the last of `context` tokens; it may run again and again."""
    blocks = np.random.default_rng(context).permutation(num_blocks)[: -(-context // block_size)].astype(np.int32)
    position = context - 1
    slot = int(blocks[position // block_size]) * block_size + position % block_size
    return Batch(
        step=0,
        token_ids=np.array([1000], np.int32),
        token_sources=np.array([-1], np.int32),
        positions=np.array([position], np.int32),
        query_start_loc=np.array([0, 1], np.int32),
        seq_lens=np.array([context], np.int32),
        slot_mapping=(np.array([slot], np.int64),),
        block_tables=(blocks[None],),
        logits_indices=np.array([0], np.int32),
        samples=(SampleRow(GREEDY, 0, 0, context, 0),),
        copies=np.zeros((0, 3), np.int32),
        fresh_blocks=np.zeros(0, np.int32),
        request_ids=("held",),
    )


def attention_bytes_per_s(rig: Rig, batch: Batch, num_steps: int) -> float:
    before = int(rig.model.counters[OpKind.ATTENTION])
    for _ in range(num_steps):
        rig.model.forward(torch.from_numpy(batch.token_ids), batch, rig.pool.tensor)
    elapsed_s = (int(rig.model.counters[OpKind.ATTENTION]) - before) / 1e9
    return int(batch.seq_lens[0]) * rig.weights.kv_bytes_per_token * num_steps / elapsed_s


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)
