"""A key comes from a file that holds a secret, and never into a message."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import pytest

from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.mac import MAX_SECRET_BYTES, load_mac_key, warn_if_shared

SECRET = b"0123456789abcdef"


def written(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_the_key_is_the_files_content_without_its_last_line_ends(tmp_path: Path) -> None:
    expected = hashlib.blake2b(SECRET, person=b"pgt1-mac-key").digest()
    for i, end in enumerate((b"", b"\n", b"\r\n")):
        assert load_mac_key(written(tmp_path / str(i), SECRET + end)) == expected
    assert load_mac_key(written(tmp_path / "other", SECRET + b"x")) != expected
    assert load_mac_key(written(tmp_path / "inner", b"\n" + SECRET)) != expected
    assert len(expected) == 64


@pytest.mark.parametrize("content", [b"", b"\n" * 40, b"too short\n", b"x" * (MAX_SECRET_BYTES + 1)])
def test_what_is_no_secret_is_refused_and_not_shown(tmp_path: Path, content: bytes) -> None:
    path = written(tmp_path / "key", content)
    with pytest.raises(ConfigError, match="--kv-mac-key") as refused:
        load_mac_key(path)
    assert str(path) in str(refused.value) and "PosixPath" not in str(refused.value)
    assert "too short" not in str(refused.value)


def test_what_cannot_be_read_twice_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="--kv-mac-key"):
            load_mac_key(path)


def test_a_key_that_others_can_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_if_shared(written(tmp_path / "mine", SECRET))
        assert not caplog.records
        warn_if_shared(written(tmp_path / "ours", SECRET, 0o644))
    assert "chmod 600" in caplog.text and SECRET.decode() not in caplog.text
