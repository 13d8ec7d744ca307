"""The C code under the address and the undefined-behaviour sanitizer, at every level, in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pagetier.kernels.cpu import build
from pagetier.kvstore.places import kernels_dir
from tests.kernels.cpu.tiny_models import EMULATE_TILES, levels

ROOT = Path(__file__).parents[3]
FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
RUNTIMES = ("libasan.so", "libubsan.so")


def runtimes(compiler: str) -> list[str]:
    """The sanitizers' libraries, which must be loaded before Python's own; empty when the compiler has none."""
    found = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False
        ).stdout.strip()
        for name in RUNTIMES
    ]
    return found if all(Path(path).is_file() for path in found) else []


@pytest.fixture(scope="module")
def sanitized() -> tuple[Path, list[str]]:
    """The library with sanitizers, kept beside the plain one, and what to preload. Tiles are emulated on every machine:
    the instructions read and write behind the sanitizers' back."""
    compiler = next((found for name in build.COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C compiler")
    preload = runtimes(compiler)
    if not preload:
        pytest.skip(f"{compiler} has no {' and '.join(RUNTIMES)}")
    path = kernels_dir() / f"sanitized-{build.source_digest()}.so"
    if not path.is_file():
        for old in path.parent.glob("sanitized-*.so"):
            old.unlink(missing_ok=True)
        build.compile_library(path, (*FLAGS, EMULATE_TILES))
    return path, preload


def run(sanitized: tuple[Path, list[str]], what: str) -> subprocess.CompletedProcess[str]:
    path, preload = sanitized
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaks
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.kernels.cpu.sanitized_run", str(path), what]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)


@pytest.mark.timeout(300)  # compiles twice the code of the plain library
def test_every_level_runs_without_a_finding(sanitized: tuple[Path, list[str]]) -> None:
    done = run(sanitized, "run")
    assert done.returncode == 0, done.stderr[:4000]
    assert "runtime error" not in done.stderr and "AddressSanitizer" not in done.stderr, done.stderr[:4000]
    assert done.stdout.startswith(f"levels {' '.join(level.name for level in levels())};")
    refused = re.search(r"(\d+) batches refused", done.stdout)
    assert refused is not None and int(refused[1]) > 100, done.stdout


@pytest.mark.timeout(300)
def test_a_buffer_overrun_is_found(sanitized: tuple[Path, list[str]]) -> None:
    """Guards the test above: the sanitizer is at work."""
    done = run(sanitized, "overrun")
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[:4000]
