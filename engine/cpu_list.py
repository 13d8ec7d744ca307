"""Lists of CPUs as the kernel and taskset write them: "0-3,8"."""

from __future__ import annotations

import os
import re

from pagetier.kvstore.errors import ConfigError

FLAG = "--threads-bind"


def parse_cpus(text: str) -> tuple[int, ...]:
    """The CPUs of a list, in the order given; () for "". Raises ConfigError for one that is no list, names a CPU twice
    or names one that this process may not run on."""
    allowed = sorted(os.sched_getaffinity(0))
    cpus: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or not set(range(first, last + 1)) <= set(allowed):
            raise ConfigError.bad_value(FLAG, text, f"CPUs of this process, {_written(allowed)}, such as 0-3 or 0,2")
        cpus += range(first, last + 1)
    if len(set(cpus)) < len(cpus):
        raise ConfigError.bad_value(FLAG, text, "each CPU once")
    return tuple(cpus)


def _written(cpus: list[int]) -> str:
    """The shortest list: "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
