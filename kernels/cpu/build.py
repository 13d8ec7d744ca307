"""Finds or makes the shared library: pre-built in a wheel, else compiled once into a cache folder.

The file name carries a digest of the sources, so that a new version is never served by an old library.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
CFLAGS = (
    "-O3",
    "-std=c11",
    "-D_GNU_SOURCE",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-Wno-psabi",
)
LIBRARIES = ("-lm", "-lpthread")
COMPILERS = ("cc", "gcc", "clang")
TIMEOUT_S = 300.0
# A level with instructions that a compiler or its assembler may not know, and the flag that leaves it out.
OPTIONAL = {"kernels_amx.c": "-DPT_WITHOUT_TILES"}


class BuildError(Exception):
    """The library could not be compiled; one line that says why."""


def source_digest() -> str:
    """Changes with every source, header or flag."""
    digest = hashlib.sha256(" ".join((*CFLAGS, *LIBRARIES)).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".c", ".h", ".inc"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def library_name() -> str:
    """The file name of the library for these sources."""
    return f"libpagetier_cpu-{source_digest()}.so"


def library_path(cache: Path) -> Path:
    """The library for these sources, compiled into `cache` if there is none yet (some 10 s). Raises BuildError."""
    name = library_name()
    for candidate in (SOURCES / name, cache / name):
        if candidate.is_file():
            return candidate
    if _compiler() is not None:
        logger.warning("compiling the CPU core for this machine; once, some 10 s")
    return compile_library(cache / name)


def compile_library(target: Path, extra_flags: tuple[str, ...] = ()) -> Path:
    """Compile the sources to `target`, each by a process of its own, put in place atomically. Raises BuildError."""
    compiler = _compiler()
    if compiler is None:
        raise BuildError(f"no C compiler found (looked for {', '.join(COMPILERS)})")
    target.parent.mkdir(parents=True, exist_ok=True)
    sources = sorted(SOURCES.glob("*.c"), key=lambda path: -path.stat().st_size)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler, *CFLAGS, *extra_flags, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        list(pool.map(_compile, sources, commands))
        made = Path(folder) / target.name
        _run([compiler, "-shared", *CFLAGS, *extra_flags, *map(str, objects), "-o", str(made), *LIBRARIES])
        os.replace(made, target)
    return target


def _compiler() -> str | None:
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def _compile(source: Path, command: list[str]) -> None:
    try:
        _run(command)
    except BuildError as error:
        if source.name not in OPTIONAL:
            raise
        logger.warning(
            "%s is left out, the CPU core will be slower where the CPU has its instructions: %s", source.name, error
        )
        _run([*command, OPTIONAL[source.name]])


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise BuildError(f"{command[0]} failed: {first}")
