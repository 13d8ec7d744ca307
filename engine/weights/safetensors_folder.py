"""A Hugging Face folder as a checkpoint: `config.json` and one or several safetensors files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pagetier.engine.models.hf_config import load_hf_config, load_json
from pagetier.engine.weights.stored import StoredInfo
from pagetier.kvstore.errors import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
AUTO = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# saved by old transformers versions, recomputed by everyone
_BUFFERS = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")


class SafetensorsFolder:
    """An open folder; implements `Source`. Raises ConfigError naming the file or tensor that is wrong."""

    def __init__(self, folder: Path) -> None:
        self.config = load_hf_config(folder)
        config_json = load_json(folder / "config.json")
        shards = _shards(folder)
        self.files: tuple[Path, ...] = (folder / "config.json", *shards)
        self.infos: dict[str, StoredInfo] = {}
        self._where: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for shard, wanted in shards.items():
            self._add(shard, wanted)
        if not (config_json.get("dtype") or config_json.get("torch_dtype")):
            embedding = self.infos.get("model.embed_tokens.weight")
            own = AUTO.get(embedding.dtype, "float32") if embedding is not None else "float32"
            self.config = replace(self.config, torch_dtype=own)

    def _add(self, shard: Path, wanted: set[str] | None) -> None:
        header = read_safetensors_header(shard)
        for name in wanted or ():
            if name not in header:
                raise ConfigError(f"{shard}: tensor {name!r} is not in it, though {INDEX} says so")
        try:
            self._open[shard] = safe_open(shard, framework="pt")
        except (SafetensorError, OSError) as exc:
            raise ConfigError(f"{shard}: not a usable safetensors file: {_one_line(exc)}") from None
        for name, info in header.items():
            if name.endswith(_BUFFERS) or (wanted is not None and name not in wanted):
                continue
            if name in self.infos:
                raise ConfigError(f"{shard}: tensor {name!r} is also in {self._where[name].name}")
            self.infos[name] = info
            self._where[name] = shard

    def raw(self, name: str) -> torch.Tensor:
        info, shard = self.infos[name], self._where[name]
        if info.dtype not in DTYPES:
            raise ConfigError(f"{shard}: tensor {name!r} is {info.dtype}; supported: {', '.join(DTYPES)}")
        try:
            tensor: torch.Tensor = self._open[shard].get_tensor(name)
        except (SafetensorError, RuntimeError) as exc:
            raise ConfigError(f"{shard}: tensor {name!r}: {_one_line(exc)}") from None
        return tensor.reshape(-1).view(torch.uint8)

    def build(self, name: str, raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        info = self.infos[name]
        kind = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[info.dtype]
        return raw.view(kind).reshape(info.shape).to(dtype, copy=True)  # the mapping must not outlive the load

    def close(self) -> None:
        self._open.clear()


def read_safetensors_header(path: Path) -> dict[str, StoredInfo]:
    """Tensor infos in file order, checked against the file's size before anything is mapped.

    Format: https://huggingface.co/docs/safetensors#format. Raises ConfigError.
    """

    def fail(reason: str) -> ConfigError:
        return ConfigError(f"{path}: not a usable safetensors file: {reason}")

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise fail(f"its header claims {length} bytes, the file has {size}")
            header = json.loads(file.read(length))
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror or exc}") from None
    except ValueError:
        raise fail("its header is not JSON") from None
    if not isinstance(header, dict):
        raise fail("its header is not a JSON object")
    infos: dict[str, StoredInfo] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = str(entry["dtype"]), tuple(int(dim) for dim in entry["shape"])
            start, end = (int(offset) for offset in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise fail(f"tensor {name!r} has a malformed entry") from None
        if 8 + length + end > size:
            raise fail(f"truncated: tensor {name!r} ends at byte {8 + length + end}, the file has {size}")
        if start > end or (dtype in DTYPES and math.prod(shape) * DTYPES[dtype] != end - start):
            raise fail(f"tensor {name!r} of shape {list(shape)} and dtype {dtype} does not fill {end - start} bytes")
        infos[name] = StoredInfo(name, dtype, shape)
    return infos


def _shards(folder: Path) -> dict[Path, set[str] | None]:
    """File -> the tensors it should hold (None: whatever is in it)."""
    index = folder / INDEX
    if index.is_file():
        weight_map = load_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index}: weight_map is missing or empty")
        shards: dict[Path, set[str] | None] = {}
        for tensor, name in weight_map.items():
            shard = folder / str(name)
            if str(name) != shard.name:
                raise ConfigError(f"{index}: shard {name!r} of tensor {tensor!r} is not a plain file name")
            if shard not in shards and not shard.is_file():
                raise ConfigError(f"{shard}: the shard that {INDEX} names is missing")
            wanted = shards.setdefault(shard, set())
            assert wanted is not None
            wanted.add(tensor)
        return shards
    found = sorted(folder.glob("*.safetensors"))
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    if len(found) == 1:
        return {found[0]: None}
    if found:
        raise ConfigError(f"{folder}: {len(found)} safetensors files but no {INDEX}")
    hint = "; convert pytorch_model.bin to safetensors" if any(folder.glob("pytorch_model*.bin")) else ""
    raise ConfigError(f"{folder}: no safetensors files{hint}")


def _one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split())
