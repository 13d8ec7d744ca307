"""Puts the compiled CPU core into wheels. Built without a compiler, or not on x86-64 Linux, a wheel is pure Python and
compiles the core on first use; an editable install always does."""

from __future__ import annotations

import importlib.util
import platform
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledCore(BuildHookInterface[Any]):
    """Adds kernels/cpu/libpagetier_cpu-DIGEST.so, the name that kernels/cpu/build.py looks for beside its sources."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version` is the wheel's kind: standard or editable."""
        if version == "editable" or sys.platform != "linux" or platform.machine() != "x86_64":
            return
        core = _core_build(Path(self.root))
        self._folder = tempfile.TemporaryDirectory()
        try:
            library = core.compile_library(Path(self._folder.name) / core.library_name())
        except core.BuildError as error:
            self.app.display_warning(f"the wheel has no compiled CPU core: {error}")
            return
        build_data["force_include"][str(library)] = f"pagetier/kernels/cpu/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The library is in the wheel by now."""
        if folder := getattr(self, "_folder", None):
            folder.cleanup()


def _core_build(root: Path) -> ModuleType:
    """kernels/cpu/build.py, which needs nothing but the standard library; the package itself is not installed yet."""
    spec = importlib.util.spec_from_file_location("pagetier_core_build", root / "kernels" / "cpu" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
