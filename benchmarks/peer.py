"""A peer engine in a process and an environment of its own (benchmarks/peers), spoken to in JSON lines.

Knows how to find, start, pause and end one; what it is asked is `workload`'s, what it means `cpu`'s.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from pagetier.benchmarks.workload import Request
from pagetier.kvstore.places import cache_dir

SCRIPTS = Path(__file__).parent / "peers"
START_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 900.0
END_TIMEOUT_S = 20.0


class PeerError(Exception):
    """A peer that is not there or failed; one line that says why."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a peer loads. model: a Hugging Face folder, or for llama.cpp a GGUF file."""

    model: str
    dtype: str
    threads: int
    max_model_len: int = 4096
    max_num_seqs: int = 64


def find_environment(name: str) -> Path:
    """The interpreter of a peer's environment. Raises PeerError, naming the command that makes it.

    transformers is in this project's `bench` extra and runs in this interpreter.
    """
    if not SCRIPTS.is_dir():
        raise PeerError("peers run from a checkout of the repository alone")
    if name == "transformers":
        if find_spec("transformers") is None:
            raise PeerError("transformers is not installed: pip install 'pagetier[bench]'")
        return Path(sys.executable)
    folder = cache_dir() / "peers" / name
    if not any(folder.glob("ready-*")):
        raise PeerError(f"{name} is not installed: benchmarks/peers/setup.sh {name}")
    return folder / "bin" / "python"


class Peer:
    """One running peer. `started_s`: perf_counter when its process was begun.

    Between calls it can be stopped, so that its threads take nothing from the other side of a comparison.
    """

    def __init__(self, python: Path, script: Path, settings: Settings) -> None:
        """Starts loading and returns; `wait_ready` says when it is done."""
        self._log = tempfile.TemporaryFile()
        self.started_s = time.perf_counter()
        self.version = ""
        self._paused = False
        self._process = subprocess.Popen(
            [str(python), str(SCRIPTS / "run.py"), str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": str(settings.threads)},
            start_new_session=True,
        )
        self._send(asdict(settings))

    @classmethod
    def start(cls, name: str, settings: Settings) -> Self:
        """The peer of benchmarks/peers/<name>_peer.py in its own environment. Raises PeerError when it has none."""
        return cls(find_environment(name), SCRIPTS / f"{name}_peer.py", settings)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> float:
        """Seconds that it says loading took. Raises PeerError."""
        answer = self._answer(START_TIMEOUT_S)
        self.version = str(answer["version"])
        return float(answer["load_s"])

    def generate(self, requests: Sequence[Request]) -> tuple[list[list[int]], float]:
        """New ids of every request, and the seconds that it took. Raises PeerError."""
        self.resume()
        self._send({"requests": [asdict(request) for request in requests]})
        answer = self._answer(ANSWER_TIMEOUT_S)
        return answer["outputs"], float(answer["elapsed_s"])

    def pause(self) -> None:
        """Stop its threads until the next call."""
        if not self._paused:
            self._signal(signal.SIGSTOP)
            self._paused = True

    def resume(self) -> None:
        if self._paused:
            self._signal(signal.SIGCONT)
            self._paused = False

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)  # start_new_session made it the leader of its own group
        except ProcessLookupError:
            raise PeerError(f"the peer has ended: {self._last_line()}") from None

    def _send(self, values: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(values).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"the peer has ended: {self._last_line()}") from None

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise PeerError(f"no answer within {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"the peer has ended: {self._last_line()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(str(answer["error"]))
        return answer

    def _last_line(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"

    def close(self) -> None:
        """End it. Idempotent."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._process.returncode is None:
            self.resume()
            try:
                self._process.stdin.close()
                self._process.wait(END_TIMEOUT_S)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
