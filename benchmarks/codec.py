"""`pagetier bench codec`: what the lossless codec makes of real KV, and below which bandwidth it pays.

The KV of a prompt is computed and stored in an NVMe tier of a scratch folder, and its blocks are read back; encoding
and decoding are timed on one thread, each block by itself, best of three. A read thread that decodes what it received
wins over one that receives it raw while the link carries less than (1 - ratio) x the speed of decoding.
"""

from __future__ import annotations

import importlib.resources
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pagetier.benchmarks.report import Row
from pagetier.engine.llm import LLM
from pagetier.engine.sampling_params import SamplingParams
from pagetier.kvstore.codec import PLANES_ZSTD, decode, encode
from pagetier.kvstore.config import MIB
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.tier import BlockRead

DTYPES = ("bfloat16", "float32")
NUM_CHARS = {False: 6_000, True: 24_000}  # of the prompt; English and Python, some 4 to a token
NUM_RUNS = 3


def run(full: bool, say: Callable[[str], None]) -> list[Row]:
    """Quick: some 1,500 tokens; full: 6,000."""
    rows = []
    for dtype in DTYPES:
        say(f"{dtype}: computing KV")
        blocks = real_blocks(dtype, NUM_CHARS[full])
        say(f"{dtype}: {len(blocks)} blocks of {len(blocks[0])} bytes")
        rows += measured(dtype, blocks)
    return rows


def real_blocks(dtype: str, num_chars: int) -> list[memoryview]:
    """The KV of a prompt, block by block, as tiers store it."""
    texts = importlib.resources.files("pagetier.kvstore")
    prompt = "".join(texts.joinpath(name).read_text() for name in ("store.py", "loads.py", "admin.py"))[:num_chars]
    with tempfile.TemporaryDirectory(prefix="pagetier-codec-", dir=Path.home()) as folder:
        place = {"nvme_path": Path(folder), "nvme_size": 1 << 30, "nvme_allow_unsafe": True}
        llm = LLM("smollm2", kv_tier=("nvme",), dtype=dtype, kv_cache_memory=512 * MIB, **place)
        try:
            llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0))
        finally:
            llm.close()
        with NvmeTier(Path(folder), 1 << 30, bytes(32), refresh_s=0) as tier:
            found = list(tier.records(float("inf")))
            buffers = [memoryview(bytearray(record.nbytes)) for record in found]
            pairs = zip(found, buffers, strict=True)
            reads = [BlockRead(record.name, record.part, buffer, record.domain) for record, buffer in pairs]
            assert set(tier.get(reads, time.monotonic() + 60.0)) == {"ok"}, "what was just stored cannot be read"
    return buffers


def measured(dtype: str, blocks: Sequence[memoryview]) -> list[Row]:
    nbytes = sum(len(block) for block in blocks)
    encoded = [encode(block, PLANES_ZSTD) for block in blocks]
    stored = [block if one is None else one for block, one in zip(blocks, encoded, strict=True)]
    ratio = sum(map(len, stored)) / nbytes
    destination = memoryview(bytearray(len(blocks[0])))
    for one, block in zip(encoded, blocks, strict=True):
        assert one is None or (decode(one, destination, PLANES_ZSTD) and destination == block), "not what it was"

    def decode_all() -> None:
        for one in encoded:
            if one is not None:
                decode(one, destination, PLANES_ZSTD)

    encode_s = best_s(lambda: [encode(block, PLANES_ZSTD) for block in blocks])
    decode_s = best_s(decode_all)
    note = f"{len(blocks)} blocks of SmolLM2, one thread"
    return [
        Row(f"{dtype}_ratio", ratio, "ratio", note=note),
        Row(f"{dtype}_encode", nbytes / encode_s / 1e9, "GB/s", runs=NUM_RUNS),
        Row(f"{dtype}_decode", nbytes / decode_s / 1e9, "GB/s", runs=NUM_RUNS),
        Row(f"{dtype}_pays_below", (1 - ratio) * nbytes / decode_s / 1e9, "GB/s", note="of the link, for a thread"),
    ]


def best_s(call: Callable[[], object]) -> float:
    times = []
    for _ in range(NUM_RUNS):
        begun_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun_s)
    return min(times)
