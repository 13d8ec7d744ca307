"""The fingerprint sees every byte, name, dtype and shape, and its cache never answers for another file."""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetier.engine.weights.fingerprint import RACY_NS, FingerprintCache, combine, stamp, tensor_digest
from pagetier.engine.weights.loader import load_checkpoint
from pagetier.engine.weights.stored import StoredInfo
from tests.engine.checkpoints import hf_model, write_gguf

INFOS = (StoredInfo("a", "F32", (2, 3)), StoredInfo("b", "Q4_1", (32,)))
DIGESTS = tuple((info, bytes([n]) * 16) for n, info in enumerate(INFOS))


def test_every_field_counts_and_order_does_not() -> None:
    base = combine(DIGESTS)
    assert combine(reversed(DIGESTS)) == base and len(base) == 64
    others = [
        StoredInfo("c", "F32", (2, 3)),
        StoredInfo("a", "F16", (2, 3)),
        StoredInfo("a", "F32", (3, 2)),
        StoredInfo("a", "F32", (2, 3, 1)),
        StoredInfo("aF", "32", (2, 3)),
    ]
    changed = [combine([(info, DIGESTS[0][1]), DIGESTS[1]]) for info in others]
    changed += [combine(DIGESTS[:1]), combine([DIGESTS[0], (INFOS[1], bytes(16))])]
    assert len({base, *changed}) == len(changed) + 1


@given(st.binary(min_size=1, max_size=200), st.data())
def test_any_changed_byte_changes_the_digest(raw: bytes, data: st.DataObject) -> None:
    values = np.frombuffer(raw, dtype=np.uint8).copy()
    before = tensor_digest(values)
    values[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    assert tensor_digest(values) != before


def test_it_does_not_change_between_versions() -> None:
    """Built by hand: a changed value would orphan every KV cache on disk."""
    first = b"\x01\0\0\0a" + b"\x03\0\0\0F32" + b"\x02\0\0\0" + struct.pack("<QQ", 2, 3) + bytes(16)
    second = b"\x01\0\0\0b" + b"\x04\0\0\0Q4_1" + b"\x01\0\0\0" + struct.pack("<Q", 32) + b"\x01" * 16
    assert combine(DIGESTS) == hashlib.sha256(b"pgt1-weights" + first + second).hexdigest()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"12345678")
    return path


def test_the_cache_answers_for_the_same_file_only(weights: Path, tmp_path: Path) -> None:
    before = stamp([weights])
    later = before[0].ctime_ns + RACY_NS + 1
    cache = FingerprintCache(tmp_path / "cache", clock_ns=lambda: later)
    assert cache.get(before) is None
    cache.put(before, "f" * 64)
    assert cache.get(before) == "f" * 64 and cache.get(stamp([weights])) == "f" * 64
    times = (before[0].mtime_ns, before[0].mtime_ns)
    weights.write_bytes(b"87654321")
    os.utime(weights, ns=times)  # same path, size, mtime and inode: ctime still tells
    assert cache.get(stamp([weights])) is None


def test_a_file_written_just_now_is_not_remembered(weights: Path, tmp_path: Path) -> None:
    stamps = stamp([weights])
    cache = FingerprintCache(tmp_path / "cache", clock_ns=lambda: stamps[0].ctime_ns + RACY_NS - 1)
    cache.put(stamps, "f" * 64)
    assert cache.get(stamps) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"fingerprint": 3}', '{"fingerprint": "00", "files": []}'])
def test_a_damaged_cache_entry_is_no_answer(content: str, weights: Path, tmp_path: Path) -> None:
    stamps = stamp([weights])
    cache = FingerprintCache(tmp_path / "cache", clock_ns=lambda: stamps[0].ctime_ns + 2 * RACY_NS)
    cache.put(stamps, "f" * 64)
    (entry,) = (tmp_path / "cache").iterdir()
    entry.write_text(content)
    assert cache.get(stamps) is None


def test_an_unwritable_cache_folder_only_costs_time(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    stamps = stamp([weights])
    cache = FingerprintCache(tmp_path / "cache", clock_ns=lambda: stamps[0].ctime_ns + 2 * RACY_NS)
    cache.put(stamps, "f" * 64)
    assert cache.get(stamps) is None


def test_one_changed_weight_changes_the_checkpoints_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached or not: the second load of either file answers as the first."""
    monkeypatch.setenv("PAGETIER_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "m.gguf"
    write_gguf(path, hf_model("LlamaForCausalLM"))
    first = load_checkpoint(path).fingerprint
    times = os.stat(path)
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        old = file.read(4)
        file.seek(-4, os.SEEK_END)
        file.write(struct.pack("<f", struct.unpack("<f", old)[0] + 1.0))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    second = load_checkpoint(path).fingerprint
    assert first != second and load_checkpoint(path).fingerprint == second
