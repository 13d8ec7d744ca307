"""Ctrl-C between two steps: an engine that is interrupted in the middle of one could not go on."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """While entered, SIGINT waits for the next call of the function this yields, or for the end; a second one does not.

    What it does then is what it did before: raise KeyboardInterrupt, as a rule. Outside the main thread, to which
    Python brings signals, and where SIGINT has no Python handler, nothing is changed.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield lambda: None
        return
    handle, is_held = previous, False

    def hold(number: int, frame: object) -> None:
        nonlocal is_held
        if is_held:  # whoever asks twice does not want to wait for a step
            handle(number, None)
        is_held = True

    def deliver() -> None:
        nonlocal is_held
        if is_held:
            is_held = False
            handle(signal.SIGINT, None)

    signal.signal(signal.SIGINT, hold)
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, previous)
        deliver()
