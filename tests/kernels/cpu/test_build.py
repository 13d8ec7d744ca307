"""The shared library: compiled once, named by its sources, put in place whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pagetier.kernels.cpu import build
from pagetier.kernels.cpu.library import ABI_VERSION, Isa, Library
from pagetier.kvstore.places import kernels_dir


def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Makes `script` the only `cc` on PATH, with the system's programs behind it."""
    folder.mkdir()
    (folder / "cc").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_an_existing_library_is_taken_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / build.library_name()
    shutil.copy(build.library_path(kernels_dir()), made)
    monkeypatch.setenv("PATH", "")
    assert build.library_path(tmp_path) == made
    assert Library(made).best_isa() > Isa.NONE


def test_a_library_of_other_sources_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libpagetier_cpu-0123456789abcdef.so").write_bytes(b"old")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.BuildError, match=r"no C compiler found \(looked for cc, gcc, clang\)"):
        build.library_path(tmp_path)


def test_what_the_compiler_says_is_passed_on_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path / "bin", monkeypatch, "echo 'x.c:1: note' >&2; echo 'x.c:2: error: no such register' >&2; exit 1")
    with pytest.raises(build.BuildError, match="cc failed: x.c:2: error: no such register"):
        build.library_path(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_library_is_compiled_once_and_put_in_place_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, log = tmp_path / "cache" / build.library_name(), tmp_path / "log"
    script = (
        f'case "$*" in *-shared*) echo link >> {log};; esac; ls {made.parent} >> {log}; '
        'while [ "$1" != -o ]; do shift; done; echo made > "$2"'
    )
    compiler(tmp_path / "bin", monkeypatch, script)
    assert build.library_path(made.parent) == build.library_path(made.parent) == made
    assert made.read_text() == "made\n"
    lines = log.read_text().splitlines()
    assert lines.count("link") == 1 and made.name not in lines
    assert os.listdir(made.parent) == [made.name]


def test_a_level_that_the_compiler_does_not_know_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an old compiler, or an old assembler, says of the tile instructions is no reason to build nothing."""
    if (real := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    known = Library(build.library_path(kernels_dir()))
    script = (
        'case "$*" in *-DPT_WITHOUT_TILES*) ;; *kernels_amx.c*) echo "error: no such instruction" >&2; exit 1;; esac; '
        f'exec {real} "$@" -O0'
    )
    compiler(tmp_path / "bin", monkeypatch, script)
    made = Library(build.library_path(tmp_path / "cache"))
    assert made.best_isa() == known.best_isa(Isa.AVX512_BF16)
    if known.best_isa() == Isa.AMX:
        assert made.lacks() == "amx: it was built by a compiler that does not know the instructions"
    else:
        assert made.lacks() == known.lacks()


def test_a_library_with_another_interface_is_refused(tmp_path: Path) -> None:
    source, made = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text("int pt_abi_version(void) { return 99; }\n")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    os.spawnlp(os.P_WAIT, "cc", "cc", "-shared", "-fPIC", "-o", str(made), str(source))
    with pytest.raises(RuntimeError, match=f"ABI 99, not {ABI_VERSION}"):
        Library(made)
