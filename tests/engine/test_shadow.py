"""The shadow check finds records that verify and are wrong, before they are used, and finds nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagetier.connectors.local import LocalConnector
from pagetier.engine.config import SHADOW_ONE_IN, EngineConfig, parse_verify
from pagetier.engine.core import EngineCore
from pagetier.engine.device_pool import DevicePool, PoolShape
from pagetier.engine.llm import LLM
from pagetier.engine.runner.model_runner import SHADOW_TOLERANCE
from pagetier.engine.sampling_params import SamplingParams
from pagetier.engine.shadow import is_chosen
from pagetier.kvstore.block import BlockName, Part
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.executor import SeededExecutor
from pagetier.kvstore.keys import chain_names, root_key
from pagetier.kvstore.memory import MemoryTier
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.store import TieredStore
from pagetier.kvstore.tier import BlockRead, BlockWrite
from tests.engine.checkpoints import byte_level_tokenizer, hf_model, tokenizer_fields, write_gguf
from tests.engine.ledger import LedgerBlocks, LedgerRunner, expected_tokens
from tests.engine.test_ledger import DOMAIN, SOUND, Clock, make_store, random_config, random_tiers, run_trace, verify
from tests.engine.trace import VOCAB_SIZE, TracedRequest, make_trace
from tests.kvstore.tier_contract import soon

PART = Part(0, 0, 1, 0, 1)
NUM_SEEDS = 25


# ---- the choice


@pytest.mark.parametrize("one_in", [1, 2, 10, 1000])
def test_one_in_n_is_chosen_by_key_alone(one_in: int) -> None:
    names = chain_names(root_key(DOMAIN), list(range(20_000)), 1)
    chosen = [name for name in names if is_chosen(name, one_in)]
    assert abs(len(chosen) - 20_000 / one_in) <= 5 * (20_000 / one_in) ** 0.5 * (one_in > 1)
    moved = [name._replace(position=0, root=bytes(32)) for name in names]
    assert [name.key for name in moved if is_chosen(name, one_in)] == [name.key for name in chosen]
    assert not any(is_chosen(name, 0) for name in names[:100])


def test_the_flag_is_read() -> None:
    assert [parse_verify(text) for text in ("checksum", "shadow", "shadow:1", "shadow:77")] == [0, SHADOW_ONE_IN, 1, 77]
    for text in ("", "shadow:", "shadow:0", "shadow:-1", "shadow:x", "shadow:1.5", "checksum:3", "crc"):
        with pytest.raises(ConfigError, match=r"--kv-verify: got .*checksum, shadow .* or shadow:N"):
            parse_verify(text)
    with pytest.raises(ConfigError, match="--max-num-batched-tokens >= --block-size"):
        EngineConfig(num_blocks=4, max_model_len=64, block_size=16, max_num_batched_tokens=15, shadow_one_in=5)


# ---- on the ledger: the whole engine, right to the slot


class Rig:
    """Engines of one block size over tiers that outlive them."""

    def __init__(self, seed: int, *, faults: bool) -> None:
        self.rng = random.Random(seed)
        self.trace = make_trace(self.rng, 25, abort_rate=0.1)
        self.clock, self.is_patient = Clock(), False
        self.block_size = self.rng.choice((1, 2, 4, 8))
        nbytes = LedgerBlocks(1, self.block_size).block_nbytes
        names = self.rng.choice((("nvme",), ("redis",), ("nvme", "redis")))
        self.tiers = (
            random_tiers(SOUND, self.rng, self.clock, nbytes) if faults else [self.roomy(name) for name in names]
        )

    def store(self, nbytes: int) -> TieredStore:
        if not self.is_patient:
            return make_store(self.rng, self.tiers, self.clock, nbytes)
        inline = SeededExecutor.inline().factory
        return TieredStore(
            self.tiers, part=PART, payload_bytes=nbytes, load_budget_s=1e6, clock=self.clock, make_executor=inline
        )

    def roomy(self, name: str) -> MemoryTier:
        """A tier that takes everything and does not fail."""
        at_once, clock = name == "nvme", self.clock
        return MemoryTier(1 << 24, name=name, answers_at_once=at_once, clock=clock, sleep=clock.sleep)

    def run(self, one_in: int, **options: Any) -> EngineCore:
        config = random_config(self.rng, self.trace)
        needed = -(-config.max_model_len // self.block_size)
        values = {
            "block_size": self.block_size,
            "num_blocks": max(config.num_blocks, needed),
            "max_num_batched_tokens": max(config.max_num_batched_tokens, self.block_size),
            "shadow_one_in": one_in,
            **options,
        }
        config = replace(config, **values)
        blocks = LedgerBlocks(config.num_blocks, config.block_size)
        expected = {t.request.request_id: [*t.request.prompt_ids, *t.output] for t in self.trace}
        runner = LedgerRunner(blocks, VOCAB_SIZE, expected, lazy=self.rng.random() < 0.7)
        connector = LocalConnector(self.store(blocks.block_nbytes), blocks)
        core = EngineCore(
            config,
            runner,
            connector,
            root_of=lambda salt: root_key(DOMAIN, salt.encode()),
            poison=blocks.poison,
            clock=self.clock,
        )
        try:
            verify(core, self.trace, run_trace(core, self.trace, self.clock))
            core.flush(5.0)
            core.check()
            assert all(tier.num_pinned == 0 for tier in self.tiers), "pins leaked"
        finally:
            core.close()
        return core


def test_sound_blocks_never_differ_under_any_configuration_and_fault() -> None:
    num_checked = 0
    for seed in range(NUM_SEEDS):
        rig = Rig(seed, faults=True)
        for one_in in (0, rig.rng.choice((1, 2, 5))):
            core = rig.run(one_in)
            counts = core.stats()["verify"]
            assert counts["differing"] == 0, f"seed {seed}"
            assert one_in or not counts["checked"], f"seed {seed}"
            num_checked += counts["checked"]
    assert num_checked > NUM_SEEDS


def blocks_of(trace: list[TracedRequest], block_size: int) -> dict[bytes, BlockName]:
    """All full blocks of all prompts, by key."""
    root, found = root_key(DOMAIN), dict[bytes, BlockName]()
    for traced in trace:
        ids = traced.request.prompt_ids
        full = list(ids[: len(ids) // block_size * block_size])
        found |= {name.key: name for name in chain_names(root, full, block_size)}
    return found


def stored(tier: MemoryTier, name: BlockName, nbytes: int) -> bytes | None:
    buffer = bytearray(nbytes)
    (status,) = tier.get([BlockRead(name, PART, memoryview(buffer))], float("inf"))
    return bytes(buffer) if status == "ok" else None


def plant(tier: MemoryTier, name: BlockName, payload: bytes) -> None:
    """Make the tier's record of this name another payload, which verifies."""
    tier.delete([BlockRead(name, PART, memoryview(bytearray())).address])
    assert tier.put([BlockWrite(name, PART, memoryview(payload))], float("inf")) == ["ok"]


def test_every_planted_record_that_a_load_meets_is_found_and_none_is_used() -> None:
    """One in one: the ledger runner would fail on the first wrong slot that attention reads."""
    num_found = 0
    for seed in range(NUM_SEEDS):
        rig = Rig(seed, faults=False)
        rig.run(0, enable_prefix_caching=True)
        names = list(blocks_of(rig.trace, rig.block_size).values())
        nbytes = LedgerBlocks(1, rig.block_size).block_nbytes
        sound = {(tier.name, name.key): stored(tier, name, nbytes) for tier in rig.tiers for name in names}
        planted = []
        for tier in rig.tiers:
            there = [name for name in names if sound[tier.name, name.key] is not None]
            for name in rig.rng.sample(there, min(len(there), 3)):
                wrong = bytearray(sound[tier.name, name.key] or b"")
                wrong[rig.rng.randrange(nbytes)] ^= 1 << rig.rng.randrange(8)
                plant(tier, name, bytes(wrong))
                planted.append((tier, name))
        core = rig.run(1, enable_prefix_caching=True, num_blocks=4000)  # there is always a scratch block
        counts = core.stats()["verify"]
        found = counts["differing"]
        gone = [n for t, n in planted if stored(t, n, nbytes) in (None, sound[t.name, n.key])]
        assert len(gone) >= bool(found), f"seed {seed}: found, and still there"
        num_found += found
    assert num_found > NUM_SEEDS


def test_a_wrong_record_before_a_chosen_block_is_found_by_it() -> None:
    """A chosen block's answer depends on all before it, so one check covers the prefix; all suspects leave."""
    prompt = [(7 * i) % VOCAB_SIZE for i in range(100)]
    one_in, size = 5, 4
    names = chain_names(root_key(DOMAIN), prompt, size)
    chosen = [i for i, name in enumerate(names[:24]) if is_chosen(name, one_in)]
    assert chosen and chosen[0] > 0, "choose another prompt"
    rig = Rig(0, faults=False)
    rig.block_size, rig.tiers = size, [rig.roomy("nvme")]
    rig.trace, rig.is_patient = [traced_of(prompt)], True
    options = {"enable_prefix_caching": True, "enable_chunked_prefill": True, "num_blocks": 60, "pipeline_depth": 1}
    options["max_num_batched_tokens"] = 64
    rig.run(0, **options)
    nbytes = LedgerBlocks(1, size).block_nbytes
    sound = [stored(rig.tiers[0], name, nbytes) for name in names[:24]]
    wrong = bytes(sound[7] or b"")
    plant(rig.tiers[0], names[chosen[0]], wrong)
    core = rig.run(one_in, **options)
    assert core.stats()["verify"]["differing"] >= 1
    assert core.scheduler.hits.hit_tokens.get("nvme", 0) == 0, "nothing of that load was used"
    assert [stored(rig.tiers[0], name, nbytes) for name in names[:24]] == sound, "what was computed instead is stored"
    core = rig.run(one_in, **options)
    assert core.stats()["verify"]["differing"] == 0 and core.scheduler.hits.hit_tokens["nvme"] == 96


def traced_of(prompt: list[int]) -> TracedRequest:
    (made,) = make_trace(random.Random(1), 1, 0.0)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    request = replace(made.request, prompt_ids=tuple(prompt), params=params)
    output = expected_tokens(prompt, 4, VOCAB_SIZE)[len(prompt) :]
    return TracedRequest(request, 0, None, tuple(output), "length")


# ---- comparing


def test_equal_bits_are_equal_and_a_tolerance_is_per_layer_and_plane() -> None:
    pool = DevicePool(PoolShape(3, 4, 2, 8, 16), torch.float32)
    generator = torch.Generator().manual_seed(1)
    pool.tensor[0] = torch.randn(pool.tensor.shape[1:], generator=generator)
    pool.tensor[0, 2] *= 1000.0
    pool.tensor[1] = pool.tensor[0]
    assert not pool.differ(1, 0, 0.0) and not pool.differ(1, 0, 1e-3)
    pool.tensor[1, 0, 1, 0, 3, 5] += 1e-6
    assert pool.differ(1, 0, 0.0) and not pool.differ(1, 0, 1e-3)
    pool.tensor[1, 0, 1] = pool.tensor[2, 0, 1]
    assert pool.differ(1, 0, 0.05), "a large layer hides none of the others"
    pool.tensor[1].fill_(torch.nan)
    assert pool.differ(1, 0, 0.1)
    pool.tensor[0].fill_(torch.nan)
    assert not pool.differ(1, 0, 0.0), "bits, not numbers"
    pool.close()


# ---- on a real model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path, hf_model("LlamaForCausalLM"), **tokenizer_fields(byte_level_tokenizer()))
    return path


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    text, other = ([rng.randrange(3, 440) for _ in range(120)] for _ in range(2))
    return [text[:33], text[:97], other[:64], text[:120]]


def llm_of(checkpoint: Path, folder: Path, **options: Any) -> LLM:
    fixed: dict[str, Any] = {
        "kv_tier": ("nvme",),
        "nvme_path": folder,
        "nvme_allow_unsafe": True,
        "load_budget_s": 30.0,
    }
    return LLM(str(checkpoint), kv_cache_memory=1 << 22, threads=1, **(fixed | options))


@pytest.fixture(params=["float32 compiled", "bfloat16 compiled", "float32 torch", "bfloat16 torch"])
def numerics(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    dtype, kernels = request.param.split()
    yield {"dtype": dtype, **({"cpu_kernels": "torch"} if kernels == "torch" else {})}


GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def test_what_this_engine_wrote_is_what_it_computes(checkpoint: Path, tmp_path: Path, numerics: dict[str, Any]) -> None:
    """In other chunks, other batches, beside other requests: to the bit on the compiled core, within noise on torch."""
    with llm_of(checkpoint, tmp_path, max_num_batched_tokens=64, **numerics) as llm:
        first = [output.outputs[0].token_ids for output in llm.generate(prompts(), GREEDY)]
    with llm_of(
        checkpoint, tmp_path, kv_verify="shadow:1", max_num_batched_tokens=16, paranoid=True, **numerics
    ) as llm:
        again = [output.outputs[0].token_ids for output in llm.generate(prompts(), GREEDY)]
        stats = llm.stats()
    assert stats["verify"] == {"shadow_one_in": 1, "checked": stats["verify"]["checked"], "differing": 0, "skipped": 0}
    assert stats["verify"]["checked"] == 10, "each block that they have between them, once"
    assert again == first or "torch" in str(numerics)


def test_a_record_that_verifies_and_is_wrong_is_found_quarantined_and_not_used(
    checkpoint: Path, tmp_path: Path, numerics: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompts()[3]
    with llm_of(checkpoint, tmp_path, **numerics) as llm:
        answer = llm.generate([prompt], GREEDY)[0].outputs[0].token_ids
        domain, group = llm.domain, llm._engine.model_config
        names = chain_names(llm._engine.root_of(""), prompt[:112], 16)
    part = Part(0, 0, group.num_layers, 0, group.num_kv_heads)
    nbytes = 16 * 2 * group.num_layers * group.num_kv_heads * group.head_dim * (2 if "bf" in numerics["dtype"] else 4)
    with NvmeTier(tmp_path, 1 << 30, domain, refresh_s=0) as tier:
        other, mine = bytearray(nbytes), names[4]
        read = [BlockRead(names[2], part, memoryview(other)), BlockRead(mine, part, memoryview(bytearray(nbytes)))]
        assert tier.get(read, soon()) == ["ok", "ok"]
        tier.delete([read[1].address])
        assert tier.put([BlockWrite(mine, part, memoryview(other))], soon()) == ["ok"]
    with llm_of(checkpoint, tmp_path, kv_verify="shadow:1", **numerics) as llm:
        output = llm.generate([prompt], GREEDY)[0]
        assert output.outputs[0].token_ids == answer
        assert output.cached_tokens.get("nvme", 0) == 0
        verify = llm.stats()["verify"]
    assert verify["checked"] == 7 and verify["differing"] >= 1
    [line] = [record.getMessage() for record in caplog.records if "is not what this engine computes" in record.msg]
    assert mine.key.hex()[:16] in line and "nvme" in line
    assert len(list(tmp_path.glob("00/quarantine/*-shadow-check.rec"))) == 5, "it, and what its answer depends on"
    with llm_of(checkpoint, tmp_path, kv_verify="shadow:1", **numerics) as llm:
        output = llm.generate([prompt], GREEDY)[0]
        assert output.outputs[0].token_ids == answer and output.cached_tokens["nvme"] == 112
        assert llm.stats()["verify"]["differing"] == 0


def test_every_dtype_has_a_tolerance() -> None:
    assert set(SHADOW_TOLERANCE) == {torch.float32, torch.float16, torch.bfloat16}
