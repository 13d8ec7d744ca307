"""The checkout as data: its Python files and what each imports. Knows nothing of how they behave."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("proto", "kvstore", "kernels", "connectors", "engine", "benchmarks")
LOOSE = ("conftest.py", "hatch_build.py", "src/pagetier/__init__.py", "src/pagetier/cli.py")
NOT_OURS = ("benchmarks/results/", "benchmarks/peers/")  # data, and scripts that run in other projects' environments


@dataclass(frozen=True, slots=True)
class Import:
    """One import: the dotted module it names, and the line."""

    module: str
    line: int


def is_generated(path: Path) -> bool:
    return "_pb2" in path.name


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def product_files(folder: str | None = None) -> tuple[Path, ...]:
    """Every Python file of one top-level folder, or of all six and the few beside them; links are not followed."""
    folders = FOLDERS if folder is None else (folder,)
    files = [path for name in folders for path in sorted((ROOT / name).rglob("*.py"))]
    if folder is None:
        files += [ROOT / name for name in LOOSE if (ROOT / name).is_file()]
    return tuple(path for path in files if not relative(path).startswith(NOT_OURS))


@cache
def suite_files() -> tuple[Path, ...]:
    return tuple(sorted((ROOT / "tests").rglob("*.py")))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_of(path: Path) -> Iterator[Import]:
    """All imports, those inside functions and under TYPE_CHECKING too. `from a import b` gives a and a.b; a relative
    import gives its dots."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield Import(base, node.lineno)
            yield from (Import(f"{base}.{alias.name}".replace("..", "."), node.lineno) for alias in node.names)


def module_name(path: Path) -> str:
    """The name a product file is imported under: kvstore/nvme/tier.py is pagetier.kvstore.nvme.tier."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts = parts[1:] if parts[0] == "src" else ["pagetier", *parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
