"""A `pagetier serve` process with the default model, as a user starts it; skipped where the model cannot be fetched."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagetier.engine.pull import resolve_model
from pagetier.kvstore.errors import ConfigError


def model_path() -> Path:
    """The default model's file, pulled into the normal cache folder once."""
    try:
        return resolve_model("smollm2", progress=False)
    except ConfigError as error:
        if "cannot download" not in str(error):
            raise
        pytest.skip(str(error))


@dataclass
class RealServer:
    process: subprocess.Popen[str]
    url: str

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@contextlib.contextmanager
def real_server(cache: Path, *flags: str, wrapper: Sequence[str] = ()) -> Iterator[RealServer]:
    """Serve on a free port with `cache` as cache folder. It is killed at the end if it has not been stopped.

    wrapper: a command that becomes the server's, such as `setpriv …`.
    """
    command = [*wrapper, sys.executable, "-m", "pagetier.cli", "serve", "--model", str(model_path())]
    command += ["--served-model-name", "smollm2", "--port", "0", *flags]
    environment = os.environ | {"PAGETIER_CACHE_DIR": str(cache)}
    environment.pop("REDIS_URL", None)
    log = cache / "server.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            banner = process.stdout.readline()
            assert " at http://" in banner, log.read_text()
            yield RealServer(process, next(word for word in banner.split() if word.startswith("http://")))
        finally:
            process.kill()
