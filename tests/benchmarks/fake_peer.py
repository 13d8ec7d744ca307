"""A peer without a model, run by benchmarks/peers/run.py: the next ids of a prompt count on from its last."""

from __future__ import annotations

import os
import sys
from typing import Any


class Engine:
    version = "fake 1.0"

    def __init__(self, settings: dict[str, Any]) -> None:
        self._mode = settings["model"]
        sys.stdout.write("libraries chatter on stdout\n")
        os.write(1, b"and C libraries on descriptor 1\n")

    def generate(self, requests: list[dict[str, Any]]) -> list[list[int]]:
        if self._mode == "dies":
            os.write(2, b"out of luck\n")
            os._exit(3)
        if self._mode == "fails":
            raise ValueError("this prompt is not for me")
        lacks = 1 if self._mode == "short" else 0
        return [[r["prompt_ids"][-1] + i for i in range(1, r["num_new"] + 1 - lacks)] for r in requests]


def open_engine(settings: dict[str, Any]) -> Engine:
    if settings["model"] == "absent":
        raise FileNotFoundError("no such model")
    return Engine(settings)
