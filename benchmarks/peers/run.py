"""Runs one peer and speaks JSON lines with whoever measures. Needs nothing but the peer's own environment.

    ENVIRONMENT/bin/python run.py PEER_FILE < requests > answers

PEER_FILE defines `open_engine(settings) -> engine` with `generate(requests) -> list[list[int]]` and `version`.

First line in:    {"model": PATH, "dtype": "bfloat16", "threads": 2, "max_model_len": 4096, "max_num_seqs": 64}
first line out:   {"version": "...", "load_s": 12.3}
each line in:     {"requests": [{"prompt_ids": [..], "num_new": 16}, ..]}
each line out:    {"outputs": [[..], ..], "elapsed_s": 1.2}    greedy, EOS ignored, outputs in the requests' order
any fault:        {"error": "..."}, then the end

`load_s` counts from the start of this script. What a peer prints on stdout goes to stderr.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

START_S = time.perf_counter()


def load_peer(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def private_stdout() -> Any:
    """The answers' own descriptor; descriptor 1 is stderr from here on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def serve(peer: Path, lines: Any, answers: Any) -> int:
    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    try:
        engine = load_peer(peer).open_engine(json.loads(lines.readline()))
        answer(version=engine.version, load_s=time.perf_counter() - START_S)
        while line := lines.readline():
            requests = json.loads(line)["requests"]
            start_s = time.perf_counter()
            outputs = engine.generate(requests)
            elapsed_s = time.perf_counter() - start_s
            wanted = [request["num_new"] for request in requests]
            if [len(ids) for ids in outputs] != wanted:
                raise RuntimeError(f"{[len(ids) for ids in outputs]} new tokens, not {wanted}")
            answer(outputs=outputs, elapsed_s=elapsed_s)
    except Exception as error:  # the process's boundary: whoever measures gets the reason in one line
        answer(error=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1]), sys.stdin, private_stdout()))
