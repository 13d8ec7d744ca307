"""`pagetier diff-identity`: the fields in which caches differ, from every place that has an identity; and that a
difference in any of them means no hit."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagetier.cli import main
from pagetier.engine.llm import LLM
from pagetier.engine.sampling_params import SamplingParams
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.redis.tier import RedisTier
from tests.engine.checkpoints import byte_level_tokenizer, hf_model, tokenizer_fields, write_gguf
from tests.engine.server.double import IDENTITY
from tests.engine.server.stack import running_stack
from tests.kvstore.valkey import Valkey, valkey, valkey_server  # noqa: F401

Run = Callable[..., tuple[int, str, str]]
OTHER = replace(IDENTITY, attention=(("rope_theta", 2e4),), weights_version="v2")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line's exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pagetier", "diff-identity", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def fields_of(run: Run, *arguments: str) -> dict[str, Any]:
    """Field -> its two sides, and that the exit code says whether there are any."""
    code, out, err = run(*arguments, "--json")
    assert err == ""
    answer = json.loads(out)
    assert (code, answer["same"]) == ((0, True) if not answer["fields"] else (1, False))
    return {entry.pop("field"): entry for entry in answer["fields"]}


def test_a_server_a_folder_and_a_redis_are_compared(run: Run, tmp_path: Path, valkey: Valkey) -> None:  # noqa: F811
    with NvmeTier(tmp_path, 8 << 20, IDENTITY.domain(), refresh_s=0) as nvme:
        for identity in (IDENTITY, OTHER):
            nvme.put_identity(identity.domain(), identity.encode())
    redis = RedisTier(valkey.url, OTHER.domain())
    redis.put_identity(OTHER.domain(), OTHER.encode())
    redis.close()
    expected = {"attention.rope_theta": {"a": 1e4, "b": 2e4}, "weights_version": {"a": "", "b": "v2"}}
    ours, theirs = IDENTITY.domain().hex(), OTHER.domain().hex()
    with running_stack() as stack:
        assert fields_of(run, stack.url, valkey.url) == expected
        assert fields_of(run, stack.url, f"{tmp_path}#{theirs[:6]}") == expected
        assert fields_of(run, stack.url, f"{tmp_path}#{ours}") == {}
        assert fields_of(run, ours, theirs, "--in", str(tmp_path)) == expected
        assert fields_of(run, ours[:10], f"{tmp_path}#{theirs}") == expected
        code, out, _ = run(stack.url, valkey.url)
        assert code == 1 and all(word in out for word in ("attention.rope_theta", "10000.0", "20000.0", "v2"))
        code, out, _ = run(stack.url, f"{tmp_path}#{ours}")
        assert code == 0 and out.startswith("the same: ")
        code, out, err = run(stack.url, str(tmp_path))
        assert code == 2 and out == "" and "holds 2 identities" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("a", "words"),
    [
        ("http://127.0.0.1:1", "no server answers"),
        ("redis://127.0.0.1:1", "cannot be asked"),
        ("redis+cluster://user:wr0ng@127.0.0.1:1", "redis+cluster://…@127.0.0.1:1 cannot be asked"),
        ("redis+sentinel://127.0.0.1:1/service", "cannot be asked"),
        ("/nowhere/at/all", "/nowhere/at/all"),
        ("0123456789", "holds no cache identity that begins with 0123456789"),
    ],
)
def test_what_cannot_be_read_is_wrong_usage_in_one_line(run: Run, tmp_path: Path, a: str, words: str) -> None:
    with NvmeTier(tmp_path, 8 << 20, IDENTITY.domain(), refresh_s=0) as nvme:
        nvme.put_identity(IDENTITY.domain(), IDENTITY.encode())
    code, out, err = run(a, str(tmp_path))
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1


def test_the_servers_key_is_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGETIER_API_KEY", raising=False)
    with running_stack(api_key="key") as stack:
        code, _, err = run(stack.url, stack.url)
        assert code == 2 and "--api-key" in err
        assert fields_of(run, stack.url, stack.url, "--api-key", "key") == {}


# ---- shows: what differs in a model is a miss, and has a name

PROMPT = [int(token) for token in np.random.default_rng(0).integers(3, 440, 40)]
Change = Callable[[Any, dict[str, Any]], None]


def other_weights(model: Any, metadata: dict[str, Any]) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.5)


def one_merged_layer(model: Any, metadata: dict[str, Any]) -> None:
    """As an adapter merged into a single projection leaves it: one tensor, a little different."""
    model.model.layers[0].mlp.up_proj.weight.data[3, 5] += 0.125


def another_rope_base(model: Any, metadata: dict[str, Any]) -> None:
    metadata["llama__rope__freq_base"] = 20_000.0


CHANGES: dict[str, tuple[Change, list[str]]] = {
    "nothing": (lambda model, metadata: None, []),
    "other weights": (other_weights, ["weights_fingerprint"]),
    "one merged layer": (one_merged_layer, ["weights_fingerprint"]),
    "another RoPE base": (another_rope_base, ["attention.rope_theta"]),
}


@pytest.mark.parametrize("tier", ["nvme", "redis"])
def test_a_changed_model_under_the_same_name_finds_nothing_and_the_field_is_named(
    run: Run,
    tmp_path: Path,
    valkey: Valkey,  # noqa: F811
    tier: str,
) -> None:
    path = tmp_path / "model.gguf"
    place = str(tmp_path / "nvme") if tier == "nvme" else valkey.url
    options: dict[str, Any] = {"nvme_path": tmp_path / "nvme"} if tier == "nvme" else {"redis_url": valkey.url}
    first = ""
    for name, (change, fields) in [("first", CHANGES["nothing"]), *CHANGES.items()]:
        model, metadata = hf_model("LlamaForCausalLM"), tokenizer_fields(byte_level_tokenizer())
        change(model, metadata)
        write_gguf(path, model, **metadata)
        with LLM(
            str(path), dtype="float32", kv_cache_memory="2MiB", threads=1, load_budget_s=30.0, kv_tier=[tier], **options
        ) as llm:
            answer = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=1))[0]
            domain = llm.domain.hex()
        first = first or domain
        assert answer.cached_tokens == ({tier: 32} if name == "nothing" else {}), name
        assert list(fields_of(run, f"{place}#{first}", str(path), "--dtype", "float32")) == fields, name
        assert list(fields_of(run, f"{place}#{first}", f"{place}#{domain}")) == fields, name
