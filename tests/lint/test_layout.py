"""The layout: five folders and benchmarks behind one import name, and imports that go one way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.lint.source_tree import (
    FOLDERS,
    ROOT,
    Import,
    imports_of,
    is_generated,
    module_name,
    product_files,
    relative,
    suite_files,
)

MAY_IMPORT = {
    "proto": {"proto"},
    "kvstore": {"proto", "kvstore"},
    "kernels": {"kernels"},
    "connectors": {"proto", "kvstore", "kernels", "connectors"},
    "engine": {"proto", "kvstore", "kernels", "connectors", "engine"},
    "benchmarks": set(FOLDERS),
}
FOREIGN_ENGINES = ("vllm", "sglang", "lmcache")
TORCH_FREE = ("proto", "kvstore")
# Libraries of the `engine` extra: what `pip install pagetier` alone must start without.
MODEL_LIBRARIES = ("torch", "safetensors", "gguf", "tokenizers", "jinja2", "huggingface_hub")
SERVER_LIBRARIES = ("fastapi", "uvicorn", "sse_starlette", "zmq", "prometheus_client")


def roots(path: Path) -> dict[str, int]:
    """Top-level package -> a line that imports it."""
    return {found.module.split(".")[0]: found.line for found in imports_of(path) if not found.module.startswith(".")}


def pagetier_folder(found: Import) -> str | None:
    parts = found.module.split(".")
    return parts[1] if parts[0] == "pagetier" and len(parts) > 1 and parts[1] in FOLDERS else None


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_init_directly_in_a_folder(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists(), f"{folder}/__init__.py would shadow other packages' {folder}"


def test_every_subfolder_with_code_is_a_package() -> None:
    folders = {path.parent for path in product_files() if path.parent.parent != ROOT and path.parent != ROOT}
    folders -= {ROOT / "src" / "pagetier"}
    lacking = [relative(folder) for folder in folders if not (folder / "__init__.py").is_file()]
    assert not lacking, f"no __init__.py in {lacking}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_link_resolves_to_the_folder(folder: str) -> None:
    link = ROOT / "src" / "pagetier" / folder
    assert link.is_symlink(), f"{relative(link)} is not a link"
    assert os.readlink(link) == f"../../{folder}"
    assert link.resolve() == (ROOT / folder).resolve() and link.is_dir()


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_go_one_way(folder: str) -> None:
    wrong = [
        f"{relative(path)}:{found.line} imports {found.module}"
        for path in product_files(folder)
        for found in imports_of(path)
        if (target := pagetier_folder(found)) is not None and target not in MAY_IMPORT[folder]
    ]
    assert not wrong, "\n".join([f"{folder} may import {sorted(MAY_IMPORT[folder])} only:", *wrong])


def test_imports_are_absolute_and_below_pagetier() -> None:
    wrong = [
        f"{relative(path)}:{found.line} imports {found.module}"
        for path in (*product_files(), *suite_files())
        if not is_generated(path)
        for found in imports_of(path)
        if found.module.startswith(".") or found.module.split(".")[0] in FOLDERS
    ]
    assert not wrong, "\n".join(["write pagetier.kvstore.x, never kvstore.x or .x:", *wrong])


@pytest.mark.parametrize("folder", TORCH_FREE)
def test_never_imports_torch(folder: str) -> None:
    wrong = [relative(path) for path in product_files(folder) if "torch" in roots(path)]
    assert not wrong, f"{wrong} import torch"


@pytest.mark.parametrize("engine", FOREIGN_ENGINES)
def test_a_foreign_engine_is_imported_by_one_file_at_most(engine: str) -> None:
    users = [relative(path) for path in product_files() if engine in roots(path)]
    assert len(users) <= 1, f"{engine} is imported by {users}"


def run_python(code: str, *args: str) -> str:
    """Standard output of a fresh interpreter with warnings as errors."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *args]
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORT_ALL = """
    import importlib, json, sys
    failed = {}
    for name in sys.argv[1:]:
        try:
            importlib.import_module(name)
        except BaseException as error:  # any failure is the finding
            failed[name] = f"{type(error).__name__}: {error}"
    print(json.dumps({"failed": failed, "loaded": sorted({name.split(".")[0] for name in sys.modules})}))
"""


def test_every_module_imports_without_a_warning() -> None:
    names = []
    for path in product_files():
        if path.parent == ROOT or path.name == "__main__.py":
            continue
        if not any(engine in roots(path) for engine in (*FOREIGN_ENGINES, "triton")):
            names.append(module_name(path))
    answer = json.loads(run_python(IMPORT_ALL, *names))
    assert not answer["failed"], "\n".join(f"{name}: {why}" for name, why in answer["failed"].items())


def test_store_and_command_line_load_nothing_of_the_engine_extra() -> None:
    names = [module_name(path) for folder in TORCH_FREE for path in product_files(folder)]
    answer = json.loads(run_python(IMPORT_ALL, "pagetier", "pagetier.cli", *names))
    assert not answer["failed"], answer["failed"]
    loaded = sorted({*MODEL_LIBRARIES, *SERVER_LIBRARIES} & set(answer["loaded"]))
    assert not loaded, f"importing the store and the command line loads {loaded}"


def test_imports_are_found_wherever_they_stand(tmp_path: Path) -> None:
    source = tmp_path / "example.py"
    source.write_text("import a.b\n\ndef late():\n    from pagetier.engine import llm\n    from . import c\n")
    found = {item.module for item in imports_of(source)}
    assert found == {"a.b", "pagetier.engine", "pagetier.engine.llm", ".", ".c"}
    assert {pagetier_folder(item) for item in imports_of(source)} == {None, "engine"}


def test_tests_are_not_kept_in_the_product() -> None:
    inside = [relative(path) for path in product_files() if path.name.startswith("test_")]
    assert not inside, f"tests belong in tests/: {inside}"


def test_results_hold_no_module() -> None:
    modules = [relative(path) for path in sorted((ROOT / "benchmarks" / "results").rglob("*.py"))]
    assert not modules, f"the wheel leaves these out: {modules}"


def test_peers_are_never_imported() -> None:
    users = [
        f"{relative(path)}:{found.line}"
        for path in (*product_files(), *suite_files())
        for found in imports_of(path)
        if found.module.startswith("pagetier.benchmarks.peers")
    ]
    assert not users, f"the wheel leaves benchmarks/peers out, and its scripts run elsewhere: {users}"
