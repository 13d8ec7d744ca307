"""GGUF container: metadata and where each tensor's bytes lie. Knows nothing of what the tensors mean.

Our own reader because `gguf.GGUFReader` builds a numpy view per string (2-5 s for the default model; this takes 0.1 s).
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagetier.kvstore.errors import ConfigError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NESTING = 2  # arrays of arrays; nothing in the field nests deeper

# ggml type id -> (name, values per quantisation block, bytes per quantisation block); ids of ggml.h, sizes of gguf-py
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}

# metadata value type id -> struct format; 8 is a string, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor as stored. shape: outermost dimension first (numpy order; the file has the reverse).

    offset: of the first byte, from the start of the file. nbytes: as stored.
    """

    name: str
    ggml_type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """A parsed header. metadata values are int, float, bool, str or lists of them."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


class _Cursor:
    """Reads forward through the mapped file; every overrun is a ConfigError that says what was being read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size, self.at = path, data, len(data), 0
        self.what = "the header"

    def fail(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.path}: not a usable GGUF file: {reason}")

    def need(self, nbytes: int) -> None:
        if nbytes > self.size - self.at:
            raise self.fail(
                f"truncated in {self.what}: {nbytes} bytes wanted at byte {self.at}, the file has {self.size}"
            )

    def unpack(self, fmt: str) -> Any:
        layout = struct.Struct("<" + fmt)
        self.need(layout.size)
        (value,) = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return value

    def text(self) -> str:
        length = self.unpack("Q")
        self.need(length)
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as exc:
            raise self.fail(f"{self.what} is not UTF-8 (byte {self.at - length + exc.start})") from None

    def texts(self, count: int) -> list[str]:
        """`count` strings: the hot loop (98,000 of them in the default model), so no call per string."""
        data, size, at, read = self.data, self.size, self.at, _U64.unpack_from
        out: list[str] = []
        try:
            for _ in range(count):
                (length,) = read(data, at)
                at += 8 + length
                if at > size:
                    raise struct.error
                out.append(data[at - length : at].decode("utf-8"))
        except struct.error:
            raise self.fail(
                f"truncated in {self.what}: string {len(out)} of {count} passes the end of the file ({size} bytes)"
            ) from None
        except UnicodeDecodeError:
            raise self.fail(f"{self.what}: string {len(out)} is not UTF-8") from None
        self.at = at
        return out

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self.fail(f"{self.what} has the unknown value type {kind}")
        if depth >= MAX_NESTING:
            raise self.fail(f"{self.what} nests arrays too deeply")
        item, count = self.unpack("I"), self.unpack("Q")
        least = struct.calcsize("<" + _SCALARS[item]) if item in _SCALARS else 8 if item == _STRING else 12
        if count * least > self.size - self.at:
            raise self.fail(f"{self.what} claims {count} array items, more than the rest of the file can hold")
        if item == _STRING:
            return self.texts(count)
        if item in _SCALARS:
            layout = struct.Struct(f"<{count}{_SCALARS[item]}")
            values = list(layout.unpack_from(self.data, self.at))
            self.at += layout.size
            return values
        return [self.value(item, depth + 1) for _ in range(count)]


def map_file(path: Path) -> mmap.mmap:
    """The file as a private, copy-on-write mapping (writable, so that torch accepts it; the file never changes).

    Raises ConfigError when the file cannot be opened or is empty. The caller closes it.
    """
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError:
        raise ConfigError(f"{path}: the file is empty") from None
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror or exc}") from None


def read_header(path: Path, data: mmap.mmap) -> GGUFHeader:
    """Parse and check the header of a file mapped by `map_file`.

    Every tensor's bytes are known to lie inside the file afterwards. Raises ConfigError, one line that names the file
    and the fault: bad magic, unsupported version, byte order, truncation, absurd counts, unknown types, duplicates.
    """
    cursor = _Cursor(path, data)
    if data[:4] != MAGIC:
        raise cursor.fail(f"it starts with {data[:4]!r}, not {MAGIC!r}")
    cursor.at = 4
    version = cursor.unpack("I")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        why = "big-endian files are not supported" if swapped in (1, 2, 3) else "supported: 2 and 3"
        raise cursor.fail(f"version {version if swapped not in (1, 2, 3) else swapped}; {why}")
    num_tensors, num_fields = cursor.unpack("Q"), cursor.unpack("Q")
    # a field takes at least 8 + 4 + 1 bytes, a tensor info at least 8 + 4 + 8 + 4 + 8
    for count, least, noun in ((num_fields, 13, "metadata fields"), (num_tensors, 32, "tensors")):
        if count * least > len(data):
            raise cursor.fail(f"it claims {count} {noun}, more than {len(data)} bytes can hold")
    metadata: dict[str, Any] = {}
    for index in range(num_fields):
        cursor.what = f"metadata field {index}"
        name = cursor.text()
        cursor.what = f"metadata field {name!r}"
        if name in metadata:
            raise cursor.fail(f"{cursor.what} is there twice")
        metadata[name] = cursor.value(cursor.unpack("I"))
    return GGUFHeader(path, version, metadata, _read_tensor_infos(cursor, num_tensors, metadata))


def _read_tensor_infos(cursor: _Cursor, num_tensors: int, metadata: dict[str, Any]) -> dict[str, GGUFTensor]:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, not a power of two")
    infos: dict[str, GGUFTensor] = {}
    for index in range(num_tensors):
        cursor.what = f"tensor info {index}"
        name = cursor.text()
        cursor.what = f"the info of tensor {name!r}"
        if name in infos:
            raise cursor.fail(f"tensor {name!r} is there twice")
        num_dims = cursor.unpack("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise cursor.fail(f"tensor {name!r} has {num_dims} dimensions; 1 to {MAX_DIMS} are possible")
        shape = tuple(cursor.unpack("Q") for _ in range(num_dims))[::-1]
        kind, offset = cursor.unpack("I"), cursor.unpack("Q")
        if kind not in GGML_TYPES:
            raise cursor.fail(f"tensor {name!r} has the unknown type {kind}")
        ggml_type, block, block_bytes = GGML_TYPES[kind]
        count = 1
        for dim in shape:
            count *= dim
        if count < 1 or shape[-1] % block:
            raise cursor.fail(f"tensor {name!r} of type {ggml_type} cannot have the shape {list(shape)}")
        if offset % alignment:
            raise cursor.fail(f"tensor {name!r} starts at {offset}, not a multiple of {alignment}")
        infos[name] = GGUFTensor(name, ggml_type, shape, offset, count // block * block_bytes)
    start = -(-cursor.at // alignment) * alignment
    placed = {t.name: GGUFTensor(t.name, t.ggml_type, t.shape, start + t.offset, t.nbytes) for t in infos.values()}
    for tensor in placed.values():
        if tensor.offset + tensor.nbytes > cursor.size:
            raise cursor.fail(
                f"truncated: tensor {tensor.name!r} ends at byte {tensor.offset + tensor.nbytes}, "
                f"the file has {cursor.size}"
            )
    return placed
