"""The header reader agrees with gguf's own, and says in one line what is wrong with an unfit file."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetier.engine.weights.gguf_header import GGML_TYPES, GGUFHeader, map_file, read_header
from pagetier.kvstore.errors import ConfigError
from tests.engine.checkpoints import add_field, finish

FIELDS: dict[str, Any] = {
    "a.bool": True,
    "a.text": "naïve 日本",
    "a.int": 7,
    "a.float": 0.5,
    "a.texts": ["x", "", "日本"],
    "a.numbers": [1, -2, 3],
}


def read_gguf_header(path: Path) -> GGUFHeader:
    with map_file(path) as data:
        return read_header(path, data)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A file with metadata of many kinds and two tensors."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in FIELDS.items():
        add_field(writer, key, value)
    writer.add_tensor("first", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("second", np.zeros((4, 64), dtype=np.float16))
    finish(writer)
    return path


def test_metadata_and_tensors_are_those_that_were_written(small: Path) -> None:
    header = read_gguf_header(small)
    assert {key: header.metadata[key] for key in FIELDS} == FIELDS
    assert header.architecture == "llama" and header.version == 3
    first, second = header.tensors["first"], header.tensors["second"]
    assert (first.ggml_type, first.shape, first.nbytes) == ("F32", (2, 3), 24)
    assert (second.ggml_type, second.shape, second.nbytes) == ("F16", (4, 64), 512)
    stored = small.read_bytes()[first.offset : first.offset + first.nbytes]
    assert np.frombuffer(stored, dtype=np.float32).tolist() == [0, 1, 2, 3, 4, 5]


def test_type_sizes_are_those_of_gguf() -> None:
    for kind, (name, block, nbytes) in GGML_TYPES.items():
        assert gguf.GGMLQuantizationType(kind).name == name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)] == (block, nbytes)


def test_every_truncation_is_named(small: Path) -> None:
    whole = small.read_bytes()
    for length in [*range(1, 600, 7), len(whole) - 1]:
        small.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"small\.gguf: not a usable GGUF file: ") as caught:
            read_gguf_header(small)
        assert "\n" not in str(caught.value)
        if length > 24:
            assert "truncated" in str(caught.value) or "more than" in str(caught.value)


def patched(at: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda whole: whole[:at] + value + whole[at + len(value) :]


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(whole: bytes) -> bytes:
        assert old in whole
        return whole.replace(old, new, 1)

    return change


def name_bytes(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


FIRST = name_bytes("first") + struct.pack("<I", 2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (patched(0, b"GGML"), r"starts with b'GGML', not b'GGUF'"),
        (patched(4, struct.pack("<I", 1)), "version 1; supported: 2 and 3"),
        (patched(4, struct.pack("<I", 99)), "version 99; supported: 2 and 3"),
        (patched(4, struct.pack(">I", 3)), "big-endian files are not supported"),
        (patched(8, struct.pack("<Q", 1 << 60)), "claims 1152921504606846976 tensors, more than"),
        (patched(16, struct.pack("<Q", 1 << 60)), "claims 1152921504606846976 metadata fields, more than"),
        (replaced(name_bytes("a.text"), struct.pack("<Q", 1 << 62) + b"a.text"), "truncated in metadata field"),
        (replaced(name_bytes("a.texts"), name_bytes("a.bools")), "ok"),
        (replaced(name_bytes("a.float"), name_bytes("a.bool") + b"x"), "unknown value type|is there twice|truncated"),
        (replaced(name_bytes("a.int"), name_bytes("a.bool")[:-1] + b"\xfe"), "not UTF-8|truncated|unknown"),
        (replaced(struct.pack("<IQ", 8, 3), struct.pack("<IQ", 8, 1 << 50)), "claims 1125899906842624 array items"),
        (replaced(struct.pack("<IQ", 8, 3), struct.pack("<IQ", 8, 400)), "string .* passes the end|claims|not UTF-8"),
        (replaced(name_bytes("second"), name_bytes("second")[:-6] + b"\xffecond"), "is not UTF-8"),
        (replaced(FIRST, FIRST[:-4] + struct.pack("<I", 9)), "'first' has 9 dimensions"),
        (replaced(FIRST + struct.pack("<Q", 3), FIRST + struct.pack("<Q", 0)), r"cannot have the shape \[2, 0\]"),
        (replaced(FIRST + struct.pack("<Q", 3), FIRST + struct.pack("<Q", 1 << 40)), "truncated: tensor 'first' ends"),
        (
            replaced(FIRST + struct.pack("<QQI", 3, 2, 0), FIRST + struct.pack("<QQI", 3, 2, 999)),
            "'first' has the unknown type 999",
        ),
        (
            replaced(FIRST + struct.pack("<QQI", 3, 2, 0), FIRST + struct.pack("<QQI", 3, 2, 3)),
            r"type Q4_1 cannot have the shape \[2, 3\]",
        ),
        (
            replaced(FIRST + struct.pack("<QQIQ", 3, 2, 0, 0), FIRST + struct.pack("<QQIQ", 3, 2, 0, 8)),
            "'first' starts at 8, not a multiple of 32",
        ),
    ],
)
def test_each_fault_is_named(small: Path, change: Callable[[bytes], bytes], says: str) -> None:
    small.write_bytes(change(small.read_bytes()))
    if says == "ok":
        assert read_gguf_header(small).metadata["a.bools"] == FIELDS["a.texts"]
        return
    with pytest.raises(ConfigError, match=says) as caught:
        read_gguf_header(small)
    assert str(small) in str(caught.value) and "\n" not in str(caught.value)


def test_duplicates_are_refused(small: Path) -> None:
    whole = small.read_bytes()
    small.write_bytes(replaced(b"a.texts", b"a.text\0")(whole))  # same length, another name: still fine
    read_gguf_header(small)
    small.write_bytes(replaced(name_bytes("a.float"), name_bytes("a.float"))(whole).replace(b"a.bool", b"a.text", 1))
    with pytest.raises(ConfigError, match="'a.text' is there twice"):
        read_gguf_header(small)


def test_empty_and_missing_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "none.gguf"
    with pytest.raises(ConfigError, match=r"none\.gguf: cannot be read: No such file"):
        read_gguf_header(path)
    path.touch()
    with pytest.raises(ConfigError, match=r"none\.gguf: the file is empty"):
        read_gguf_header(path)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_damage_gives_anything_but_a_header_or_one_line(tmp_path_factory: Any, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("damage") / "d.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in FIELDS.items():
        add_field(writer, key, value)
    writer.add_tensor("first", np.arange(6, dtype=np.float32).reshape(2, 3))
    finish(writer)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        header = read_gguf_header(path)
    except ConfigError as exc:
        assert "\n" not in str(exc)
    else:
        assert all(tensor.offset + tensor.nbytes <= len(raw) for tensor in header.tensors.values())
