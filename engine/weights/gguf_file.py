"""A GGUF file as a checkpoint: llama.cpp's tensor names and row order turned into Hugging Face's."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch

from pagetier.engine.models.config import ModelConfig
from pagetier.engine.models.gguf_config import config_from_gguf
from pagetier.engine.weights.dequantize import dequantize
from pagetier.engine.weights.gguf_header import map_file, read_header
from pagetier.engine.weights.stored import StoredInfo
from pagetier.kvstore.errors import ConfigError

ROPE_FACTORS = "rope_freqs.weight"  # part of the config, not a weight
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAME = re.compile(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)")


def hf_name(name: str) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None for a name that means nothing here."""
    match = _GGUF_NAME.fullmatch(name)
    if match is None:
        return None
    layer, stem, kind = match.groups()
    if layer is None:
        return f"{_TOP[stem]}.{kind}" if stem in _TOP else None
    return f"model.layers.{int(layer)}.{_LAYER[stem]}.{kind}" if stem in _LAYER else None


def unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order of q and k, (rows, cols) or (rows,): interleaved RoPE pairs -> two halves.

    The inverse of `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py. Returns a contiguous copy.
    """
    pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


class GGUFFile:
    """An open GGUF checkpoint; implements `Source`. Raises ConfigError naming the file and what is wrong with it."""

    def __init__(self, path: Path) -> None:
        self._map = map_file(path)
        self.files: tuple[Path, ...] = (path,)
        try:
            self.header = read_header(path, self._map)
            self._bytes: torch.Tensor | None = torch.frombuffer(self._map, dtype=torch.uint8)
            self.config = self._read_config()
            self.infos = self._read_infos()
        except BaseException:
            self.close()
            raise

    def _read_config(self) -> ModelConfig:
        if (factors := self.header.tensors.get(ROPE_FACTORS)) is None:
            return config_from_gguf(self.header)
        values = dequantize(self._slice(ROPE_FACTORS), factors.ggml_type, factors.shape, torch.float32)
        return config_from_gguf(self.header, values.tolist())

    def _read_infos(self) -> dict[str, StoredInfo]:
        infos: dict[str, StoredInfo] = {}
        for tensor in self.header.tensors.values():
            if tensor.name == ROPE_FACTORS:
                continue
            name = hf_name(tensor.name)
            if name is None:
                raise ConfigError(
                    f"{self.files[0]}: tensor {tensor.name!r} has no place in this {self.config.architecture} model"
                )
            infos[name] = StoredInfo(tensor.name, tensor.ggml_type, tensor.shape)
        return infos

    def _slice(self, stored_name: str) -> torch.Tensor:
        tensor = self.header.tensors[stored_name]
        assert self._bytes is not None, "used after close"
        raw = self._bytes[tensor.offset : tensor.offset + tensor.nbytes]
        return raw if tensor.offset % 8 == 0 else raw.clone()  # files with a small general.alignment

    def raw(self, name: str) -> torch.Tensor:
        return self._slice(self.infos[name].name)

    def build(self, name: str, raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        info = self.infos[name]
        try:
            tensor = dequantize(raw, info.dtype, info.shape, dtype)
        except ConfigError as exc:
            raise ConfigError(f"{self.files[0]}: tensor {info.name!r}: {exc}") from None
        if self.config.architecture == "llama":
            for projection, heads in (("q_proj", self.config.num_heads), ("k_proj", self.config.num_kv_heads)):
                if f".self_attn.{projection}." in name:
                    return unpermute(tensor, heads)
        return tensor

    def close(self) -> None:
        self._bytes = None
        with contextlib.suppress(BufferError):  # a caller's slice still looks into it: unmapped when that one goes
            self._map.close()
