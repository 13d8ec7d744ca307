"""Tests live in tests/ only: collected elsewhere, a module would be imported a second time under a bare name. None of
them fails for being slow: the machine may be busy with something else."""

from pathlib import Path

from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

ROOT = Path(__file__).resolve().parent
FOLDERS = ("benchmarks", "connectors", "engine", "kernels", "kvstore", "proto", "src")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    inside = collection_path.is_relative_to(ROOT) and collection_path.relative_to(ROOT).parts[:1]
    return True if inside and inside[0] in FOLDERS else None
