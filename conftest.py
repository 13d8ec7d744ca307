"""Tests live in tests/ only: collected elsewhere, a module would be imported a second time under a bare name."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent
FOLDERS = ("benchmarks", "connectors", "engine", "kernels", "kvstore", "proto", "src")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    inside = collection_path.is_relative_to(ROOT) and collection_path.relative_to(ROOT).parts[:1]
    return True if inside and inside[0] in FOLDERS else None
