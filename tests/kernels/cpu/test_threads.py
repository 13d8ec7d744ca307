"""The library's threads run where they are told to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.kernels.cpu.tiny_models import library

CPUS = sorted(os.sched_getaffinity(0))


def tasks() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


@pytest.mark.parametrize("cpus", [(), tuple(CPUS[:2]), tuple(reversed(CPUS[:2]))])
def test_each_worker_is_bound_to_its_cpu_or_to_none(cpus: tuple[int, ...]) -> None:
    before = tasks()
    threads = library().create_threads(2 if not cpus else len(cpus), cpus)
    try:
        workers = tasks() - before
        assert len(workers) == (len(cpus) or 2) - 1  # the caller is the first
        for worker, cpu in zip(workers, cpus[1:] if cpus else [None], strict=True):
            assert os.sched_getaffinity(worker) == ({cpu} if cpus else set(CPUS))
    finally:
        library().destroy_threads(threads)


def test_as_many_cpus_as_threads() -> None:
    with pytest.raises(ValueError, match="1 CPUs for 3 threads"):
        library().create_threads(3, CPUS[:1])


def test_parked_workers_come_back_and_end() -> None:
    threads = library().create_threads(4)
    for num_active in (1, 4, 2, 0, 9, 3, 1):
        library().use_threads(threads, num_active)
    library().destroy_threads(threads)  # waits for all of them
