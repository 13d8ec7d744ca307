"""`pagetier store` as a user starts it: a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def store_process(cache: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """One that answers; killed afterwards. cache: its cache folder."""
    command = [sys.executable, "-m", "pagetier.cli", "store", "--kv-nvme-allow-unsafe", *flags]
    environment = os.environ | {"PAGETIER_CACHE_DIR": str(cache)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            told = process.stderr.readline()
            assert "store ready at" in told, told
            yield process
        finally:
            process.kill()
