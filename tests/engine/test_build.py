"""Which model serves: the compiled core where it can, else torch and one warning that says why."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pagetier.engine.build import ServeConfig, build_engine
from pagetier.engine.cli import tiers_shown
from pagetier.engine.config import CPU_KERNELS
from pagetier.engine.llm import LLM
from pagetier.engine.sampling_params import SamplingParams
from pagetier.engine.server.factory import ready_of
from pagetier.kernels.cpu.build import library_path
from pagetier.kernels.cpu.library import Isa, Library
from pagetier.kvstore.config import StoreConfig
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.places import kernels_dir
from tests.engine.checkpoints import byte_level_tokenizer, hf_model, tokenizer_fields, write_gguf

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9]
CPU = str(min(os.sched_getaffinity(0)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path, hf_model("LlamaForCausalLM"), **tokenizer_fields(byte_level_tokenizer()))
    return path


def answer(checkpoint: Path, **options: Any) -> tuple[list[int], bytes]:
    """Greedy tokens, and the domain, which names what computed them."""
    with LLM(str(checkpoint), dtype="float32", kv_cache_memory="1MiB", nvme_allow_unsafe=True, **options) as llm:
        [output] = llm.generate([PROMPT], GREEDY)
        return output.outputs[0].token_ids, llm.domain


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_without_a_compiler_torch_serves_and_one_warning_says_so(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library_path(kernels_dir())  # compiled by now
    caplog.clear()
    compiled, compiled_domain = answer(checkpoint)
    assert warnings(caplog) == []
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("PAGETIER_CACHE_DIR", str(tmp_path))
    tokens, domain = answer(checkpoint)
    assert tokens == compiled and domain != compiled_domain
    [warning] = warnings(caplog)
    assert warning == (
        "the compiled CPU core does not serve: no C compiler found (looked for cc, gcc, clang); torch does instead, "
        "several times slower"
    )


def test_torch_by_choice_is_no_warning(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    library_path(kernels_dir())
    caplog.clear()
    threads = torch.get_num_threads()
    try:
        tokens, domain = answer(checkpoint, cpu_kernels="torch", threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert (tokens, domain) != answer(checkpoint) and tokens == answer(checkpoint)[0]
    assert warnings(caplog) == []


def test_each_level_has_a_domain_of_its_own(checkpoint: Path) -> None:
    best = Library(library_path(kernels_dir())).best_isa()
    levels = [level.name.lower() for level in Isa if Isa.NONE < level <= best]
    answers = [answer(checkpoint, cpu_kernels=level, threads=2) for level in levels]
    assert len({tuple(tokens) for tokens, _ in answers}) == 1
    assert len({domain for _, domain in answers}) == len(levels)
    assert answer(checkpoint) == answers[-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cpu_kernels": "sse"}, "--cpu-kernels: got 'sse'; allowed: auto, avx2, avx512, avx512_bf16, amx, torch"),
        ({"threads": -1}, "--threads: got -1; allowed: 0 to 1024"),
        ({"threads": 1025}, "--threads: got 1025; allowed: 0 to 1024"),
        ({"threads_bind": "99999"}, "--threads-bind: got '99999'; allowed: CPUs of this process"),
        ({"threads": 3, "threads_bind": CPU}, "--threads: got 3; allowed: 0 or 1, the CPUs of --threads-bind"),
        ({"block_size": 0}, "--block-size: got 0; allowed: a power of two from 1 to 128"),
        ({"block_size": -16}, "--block-size: got -16; allowed: a power of two from 1 to 128"),
        ({"block_size": 24}, "--block-size: got 24; allowed: a power of two from 1 to 128"),
    ],
)
def test_what_cannot_be_had_is_refused(checkpoint: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        answer(checkpoint, **options)


def test_what_no_tokenizer_mends_is_told_before_a_missing_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    with pytest.raises(ConfigError, match="architecture MambaForCausalLM is not supported"):
        answer(tmp_path)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"tokenizer__ggml__pre": "nonsense"}, {}),
        ({}, {"kv_hash": "md5"}),
        ({}, {"cpu_kernels": "sse"}),
        ({}, {"max_num_seqs": 0}),
        ({}, {"kv_tier": ("nvme", "redis"), "redis_url": "nonsense://x"}),
    ],
    ids=str,
)
def test_what_fails_to_start_leaves_no_thread_and_no_folder_taken(
    fields: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    path, folder = tmp_path / "tiny.gguf", tmp_path / "kv"
    write_gguf(path, hf_model("LlamaForCausalLM"), **tokenizer_fields(byte_level_tokenizer(), **fields))
    num_threads = []
    for _ in range(4):
        with pytest.raises(ConfigError):
            answer(path, **{"kv_tier": ("nvme",), "nvme_path": folder, "threads": 2, **options})
        num_threads.append(num_native_threads())
    assert num_threads[3] == num_threads[1], num_threads  # torch may make some of its own at the first
    write_gguf(path, hf_model("LlamaForCausalLM"), **tokenizer_fields(byte_level_tokenizer()))
    assert len(answer(path, kv_tier=("nvme",), nvme_path=folder)[0]) == 8
    assert [entry.name for entry in folder.glob("[0-9][0-9]")] == ["00"]


def test_a_tier_without_its_medium_is_named_at_the_start(checkpoint: Path, tmp_path: Path) -> None:
    """And is a tier all the same: it serves as soon as the disk is there."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    store = StoreConfig(tiers=("nvme",), nvme_path=loop, nvme_size=1 << 29, nvme_allow_unsafe=True)
    engine = build_engine(ServeConfig(str(checkpoint), kv_cache_memory=1 << 20, threads=1, store=store))
    try:
        ready = ready_of(engine)
        assert (ready.tiers, ready.tiers_down) == (("device", "nvme"), ("nvme",))
        assert tiers_shown(ready) == "device > nvme (down)"
    finally:
        engine.close()
    loop.unlink()
    engine = build_engine(ServeConfig(str(checkpoint), kv_cache_memory=1 << 20, threads=1, store=store))
    try:
        assert tiers_shown(ready_of(engine)) == "device > nvme"
    finally:
        engine.close()


def num_native_threads() -> int:
    """Of this process, the model's own among them."""
    return len(os.listdir("/proc/self/task"))


def test_a_level_that_this_machine_lacks_is_refused(checkpoint: Path) -> None:
    best = Library(library_path(kernels_dir())).best_isa()
    lacking = [name for name in CPU_KERNELS if name.upper() in Isa.__members__ and Isa[name.upper()] > best]
    if not lacking:
        pytest.skip("this machine has every level")
    with pytest.raises(
        ConfigError, match=f"--cpu-kernels: got '{lacking[0]}'; allowed: what this machine runs: auto, "
    ):
        answer(checkpoint, cpu_kernels=lacking[0])
