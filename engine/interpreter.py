"""How the interpreter of a process that runs an engine is set, for `serve` and for benchmarks that stand in for it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_INTERVAL_S = 0.0002  # the runner's thread comes out of a kernel to find planning at work: 5 ms is half a step
GC_THRESHOLDS = (1_000_000, 20, 50)  # objects more than before: 100,000 short prompts that wait, or 160 of 100,000
# tokens. A collection of 50,000 takes 20 ms, and in a growing queue finds nothing
MIN_COLLECTED = 20_000  # objects, below which a process at rest is left alone


def switch_often() -> None:
    """A thread that waits for the interpreter gets it soon."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def calm_the_collector() -> None:
    """To be called with the model loaded. Model and modules stay, and requests die by reference count: walking them
    all every few steps, thousands of waiting ones among them, would be the longest part of a step."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def collect_at_rest() -> None:
    """To be called when there is nothing to do: what went in circles goes now, since under load the collector hardly
    ever runs."""
    if gc.get_count()[0] >= MIN_COLLECTED:
        gc.collect()


@contextmanager
def set_for_an_engine() -> Iterator[None]:
    """Both, and back to what was before."""
    interval_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    switch_often()
    calm_the_collector()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        sys.setswitchinterval(interval_s)
