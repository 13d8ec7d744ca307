"""The engine's commands: flags reach the engine, what is not built is refused by name, and errors are one line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from pagetier.cli import main
from pagetier.engine.build import ServeConfig
from pagetier.engine.serve_flags import UNBUILT, ServeFlags, engine_fields
from pagetier.engine.server.factory import serve_config
from pagetier.kvstore.config import StoreConfig
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.tier_flags import TierFlags
from tests.engine.server.real_server import model_path

ENGINE_ONLY = ("torch", "tokenizers", "safetensors", "jinja2", "fastapi", "uvicorn", "zmq", "prometheus_client", "gguf")
WITHOUT_ENGINE = f"""
import sys
for name in {ENGINE_ONLY!r}:
    sys.modules[name] = None
from pagetier.cli import main
main()
"""


def pagetier(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagetier.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@dataclass(frozen=True)
class Ran:
    returncode: int
    stdout: str
    stderr: str


Here = Callable[..., Ran]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """Run the command line in this process: a second faster than in its own."""

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["pagetier", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert isinstance(end.value.code, int)
        return Ran(end.value.code, *capsys.readouterr())

    return run


def without_engine(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_ENGINE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_no_flags_mean_the_engines_own_defaults() -> None:
    config = serve_config(json.loads(json.dumps(engine_fields(ServeFlags(), TierFlags(kv_redis_url="embedded")))))
    assert config == ServeConfig()


def test_every_flag_reaches_the_engine(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(bytes(32))
    flags = ServeFlags(
        model="m",
        dtype="float32",
        device="cpu",
        threads=1,
        threads_bind=str(min(os.sched_getaffinity(0))),
        cpu_kernels="avx2",
        max_model_len=100,
        allow_long_context=True,
        max_num_seqs=3,
        max_num_batched_tokens=7,
        max_num_queued_reqs=9,
        max_num_queued_tokens=99,
        scheduling_policy="lpm",
        preemption_mode="swap",
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        kv_cache_memory="3MiB",
        gpu_memory_utilization=0.5,
        block_size=8,
        kv_hash="xxh3-128",
        weights_version="v2",
        kv_verify="shadow:7",
        kv_transfer_timeout=7.5,
        paranoid=True,
        kv_tier="redis, nvme",
        kv_host_size="1GiB",
        kv_write_policy="redis=second-touch",
    )
    tiers = TierFlags(
        kv_nvme_path="/tmp/x,/tmp/y",
        kv_nvme_size="5MiB",
        kv_nvme_io="buffered",
        kv_nvme_fsync="none",
        kv_nvme_allow_unsafe=True,
        kv_nvme_scrub="3MiB",
        kv_redis_url="redis://r",
        kv_redis_size="6KiB",
        kv_codec="redis=planes-zstd",
        kv_warmup="9KiB",
        kv_redis_ttl=5,
        kv_redis_linger=2.5,
        kv_load_budget_ms=50,
        kv_mac_key=tmp_path / "key",
    )
    config = serve_config(json.loads(json.dumps(engine_fields(flags, tiers))))
    own, store = ServeConfig(), StoreConfig()
    same = [f.name for f in fields(own) if getattr(config, f.name) == getattr(own, f.name)]
    assert same == ["pipeline_depth", "seed"], "neither is the engine's flag"
    same = [f.name for f in fields(store) if getattr(config.store, f.name) == getattr(store, f.name)]
    assert same == ["poison", "pins_path", "store_url", "copier", "limits"], "--paranoid sets the first"
    assert config.store.tiers == ("redis", "nvme") and config.store.load_budget_s == 0.05
    assert config.store.mac_key_file == tmp_path / "key"


def test_a_store_service_is_used_instead_of_own_tiers() -> None:
    config = serve_config(json.loads(json.dumps(engine_fields(ServeFlags(kv_store_url="unix:///run/s")))))
    assert config.store.store_url == "unix:///run/s" and config.store.tier_names == ()
    for flags in (ServeFlags(kv_store_url="local", kv_tier="nvme"), ServeFlags(kv_store_url="http://x")):
        with pytest.raises(ConfigError, match="--kv-store-url"):
            engine_fields(flags)


@pytest.mark.parametrize(
    ("flag", "flags"), [("--api-key", ServeFlags(api_key="")), ("--admin-token", ServeFlags(admin_token=" "))]
)
def test_an_empty_secret_is_refused(flag: str, flags: ServeFlags) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: got an empty one"):
        engine_fields(flags)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_transfer_timeout_that_is_none_is_refused_before_a_model_is_loaded(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="--kv-transfer-timeout: got .*more than 0 seconds"):
        engine_fields(ServeFlags(kv_transfer_timeout=timeout_s))


def test_a_key_that_is_none_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--kv-mac-key: got '{tmp_path}'; allowed: "):
        engine_fields(ServeFlags(), TierFlags(kv_mac_key=tmp_path))


def other_than(neutral: tuple[Any, ...]) -> Any:
    first = next((value for value in neutral if value is not None), "something")
    return {bool: True, int: 2}.get(type(first), "other")


@pytest.mark.parametrize("name", UNBUILT)
def test_flags_of_features_that_do_not_exist_are_refused_by_name(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"^{flag}: got .*not built yet; allowed: "):
        engine_fields(ServeFlags(**{name: other_than(UNBUILT[name])}))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "--dtype", "int3"), "--dtype: got 'int3'; allowed: auto, float32"),
        (("serve", "--kv-tier", "nvm"), "unknown tier in --kv-tier 'nvm' (did you mean 'nvme'?)"),
        (("serve", "--kv-tier", ","), "--kv-tier: got ','; allowed: names separated by commas, of host, nvme, redis"),
        (("serve", "--kv-nvme-size", "3x"), "--kv-nvme-size: got '3x'; allowed: a number of bytes"),
        (("serve", "--kv-hash", "md5"), "unknown --kv-hash 'md5'"),
        (("serve", "--engine-process", "maybe"), "--engine-process: got 'maybe'; allowed: auto, on, off"),
        (("serve", "--host", "no.such.host.invalid"), "--host: got 'no.such.host.invalid'"),
        (("serve", "--port", "0", "--model", "/no/such/folder"), "model '/no/such/folder': no such file or folder"),
        (("serve", "--port", "many"), "--port"),
        (("serve", "--cpu-kernels", "sse"), "--cpu-kernels: got 'sse'; allowed: auto, avx2, avx512"),
        (("serve", "--threads", "-1"), "--threads"),
        (("generate", "--prompt", "x", "--cpu-kernels", "sse"), "--cpu-kernels: got 'sse'; allowed: auto, avx2"),
        (("generate",), "--prompt"),
        (("generate", "--prompt", "x", "--temperature", "-1"), "temperature: got -1.0; allowed: 0 to 100"),
        (("generate", "--prompt", ""), "--prompt: got ''"),
        (("pull", "smollm3"), "did you mean 'smollm2'?"),
        (("demo", "--dtype", "x"), "--dtype: got 'x'"),
        (("nothing",), "No such command 'nothing'"),
    ],
    ids=str,
)
def test_wrong_usage_is_one_line_and_status_2(here: Here, arguments: tuple[str, ...], words: str) -> None:
    ran = here(*arguments)
    assert ran.returncode == 2 and ran.stdout == ""
    assert words in ran.stderr
    assert ran.stderr.startswith("pagetier: ") and ran.stderr.count("\n") == 1


def test_no_command_shows_the_help_and_says_why(here: Here) -> None:
    ran = here()
    assert ran.returncode == 2 and "Usage: " in ran.stdout
    assert ran.stderr.startswith("pagetier: no command was given (see ") and ran.stderr.count("\n") == 1


@pytest.mark.parametrize("engine_process", ["on", "off"])
def test_what_only_the_engine_can_refuse_is_told_the_same_way(engine_process: str) -> None:
    flags = ("--max-model-len", "9000", "--port", "0", "--engine-process", engine_process)
    ran = pagetier("serve", "--model", str(model_path()), *flags)
    assert ran.returncode == 2, ran.stderr
    assert "--max-model-len: got 9000; the model was made for 8192" in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_a_port_in_use_is_told_before_anything_is_loaded(here: Here) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = here("serve", "--model", "/no/such", "--port", str(port))
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use; choose another --port" in ran.stderr


def test_a_base_install_helps_and_says_what_to_install() -> None:
    helped = without_engine("--help")
    assert helped.returncode == 0, helped.stderr
    assert all(name in helped.stdout for name in ("serve", "generate", "stats", "demo", "pull"))
    assert "Example: pagetier serve" in without_engine("serve", "--help").stdout
    for arguments in (("serve",), ("generate", "--prompt", "x"), ("demo",), ("pull", "smollm2")):
        ran = without_engine(*arguments)
        assert ran.returncode == 2
        assert f"pagetier {arguments[0]} needs the engine (torch, " in ran.stderr
        assert "pip install 'pagetier[engine]'" in ran.stderr and ran.stderr.count("\n") == 1
    stats = without_engine("stats", "--url", "http://127.0.0.1:9")
    assert stats.returncode == 1 and "no Pagetier server answers" in stats.stderr


def test_the_command_line_loads_no_torch() -> None:
    code = "import sys, pagetier.cli; sys.exit(any(m in sys.modules for m in ('torch', 'fastapi', 'zmq')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_generate_prints_text_and_json() -> None:
    path = str(model_path())
    asked = ("generate", "--model", path, "--dtype", "float32", "--chat", "--prompt", "What is the capital of France?")
    text = pagetier(*asked, "--max-tokens", "12")
    assert text.returncode == 0 and "Paris" in text.stdout, text.stderr
    fields = json.loads(pagetier(*asked, "--max-tokens", "3", "--n", "2", "--json").stdout)
    assert [choice["finish_reason"] for choice in fields["choices"]] == ["length", "length"]
    assert fields["completion_tokens"] == 6 == sum(len(choice["token_ids"]) for choice in fields["choices"])
    assert text.stdout.startswith(fields["choices"][0]["text"])


def test_every_command_shows_an_example(here: Here) -> None:
    for name in ("serve", "generate", "demo", "pull", "stats"):
        assert f"Example: pagetier {name}" in here(name, "--help").stdout


def test_a_bug_is_one_line_too(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("of\nthe programmer's")

    monkeypatch.setattr("pagetier.engine.cli.engine_fields", broken)
    ran = here("serve")
    assert ran.returncode == 1
    assert ran.stderr.startswith("pagetier: KeyError: ") and ran.stderr.count("\n") == 1
    assert "PAGETIER_DEBUG=1" in ran.stderr
