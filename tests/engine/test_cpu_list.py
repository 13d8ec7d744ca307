"""CPU lists: what is written is what is read, and what this process may not use is refused."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetier.engine.cpu_list import _written, parse_cpus
from pagetier.kvstore.errors import ConfigError

CPUS = sorted(os.sched_getaffinity(0))


@given(cpus=st.sets(st.sampled_from(CPUS)))
def test_a_written_list_is_read_back(cpus: set[int]) -> None:
    assert parse_cpus(_written(sorted(cpus))) == tuple(sorted(cpus))


def test_order_is_kept() -> None:
    text = ",".join(map(str, reversed(CPUS)))
    assert parse_cpus(text) == tuple(reversed(CPUS))


@pytest.mark.parametrize(
    "text", ["x", "-1", "1-0", "0-", "99999", f"{CPUS[0]},{CPUS[0]}", f"{CPUS[-1]}-99999", "0;1", "1e3"]
)
def test_what_is_no_list_of_own_cpus_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--threads-bind"):
        parse_cpus(text)
