"""Pagetier: a paged LLM inference engine whose KV cache is one content-addressed store across tiers.

Importing the package is light; `LLM` and `SamplingParams` load the engine (and torch) on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from pagetier.engine.llm import LLM
    from pagetier.engine.sampling_params import SamplingParams


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from pagetier.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from pagetier.engine.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'pagetier' has no attribute {name!r}")
