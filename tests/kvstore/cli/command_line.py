"""The command line as a user runs it, in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from pagetier.cli import main


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(self.out)
        return fields


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command; its exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("PAGETIER_URL", raising=False)

    def call(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["pagetier", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert isinstance(end.value.code, int)
        return Ran(end.value.code, *capsys.readouterr())

    return call
