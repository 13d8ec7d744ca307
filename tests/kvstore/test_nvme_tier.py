"""The NVMe tier keeps the contract, with direct and with buffered I/O, on real files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.tier import Tier
from tests.kvstore.tier_contract import DOMAIN, TierContract


class TestNvmeTier(TierContract):
    @pytest.fixture(params=["auto", "buffered"])
    def tier(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Tier]:
        with NvmeTier(tmp_path / "nvme", 8 << 20, DOMAIN, io=request.param) as tier:
            yield tier
