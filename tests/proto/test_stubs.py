"""The committed stubs are what the pinned compiler makes of kvstore.proto."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUBS = ("kvstore_pb2.py", "kvstore_pb2.pyi", "kvstore_pb2_grpc.py", "kvstore_pb2_grpc.pyi")


def test_stubs_are_what_the_compiler_makes(tmp_path: Path) -> None:
    if version("grpcio-tools") != "1.76.0":
        pytest.skip("stubs are made with grpcio-tools 1.76.0: newer ones ask for newer libraries than users may have")
    out = str(tmp_path)
    command = [
        *(sys.executable, "-m", "grpc_tools.protoc", "-Isrc", f"--python_out={out}", f"--mypy_out=quiet:{out}"),
        *(f"--grpc_python_out={out}", f"--mypy_grpc_out=quiet:{out}", "src/pagetier/proto/kvstore.proto"),
    ]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=60)
    made = tmp_path / "pagetier" / "proto"
    for name in STUBS:
        same = (made / name).read_text() == (ROOT / "proto" / name).read_text()
        assert same, f"proto/{name} is stale: see CONTRIBUTING.md for the command that makes it"
