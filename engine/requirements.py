"""Whether the `engine` extra is installed: commands that need it say so in one line, before anything is loaded."""

from __future__ import annotations

import importlib.util

from pagetier.kvstore.errors import ConfigError

ENGINE_MODULES = ("torch", "tokenizers", "safetensors", "jinja2", "fastapi", "uvicorn", "zmq", "prometheus_client")


def require_engine(name: str) -> None:
    """Raise ConfigError unless the `engine` extra is installed."""
    missing = [module for module in ENGINE_MODULES if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"pagetier {name} needs the engine ({', '.join(missing)} not installed): pip install 'pagetier[engine]'"
        )
