"""What a checkpoint file offers the loader: tensors as stored, under Hugging Face names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from pagetier.engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class StoredInfo:
    """One tensor as stored. name, dtype, shape: the file's own words ("blk.0.attn_q.weight", "Q4_1"); numpy order."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Source(Protocol):
    """An open checkpoint. `infos` is keyed by Hugging Face name, in file order."""

    files: tuple[Path, ...]
    config: ModelConfig
    infos: dict[str, StoredInfo]

    def raw(self, name: str) -> torch.Tensor:
        """(nbytes,) uint8 view of the stored bytes; valid until `close`."""

    def build(self, name: str, raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor of `dtype` in the Hugging Face layout; shares no memory with `raw`. Raises ConfigError."""

    def close(self) -> None:
        """Unmap. Idempotent."""
