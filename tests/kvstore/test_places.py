"""Where files go."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.places import cache_dir, check_socket_path, kernels_dir, models_dir, nvme_dir, redis_dir


def test_the_variables_are_asked_in_order(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path / "home")}
    assert cache_dir(environ) == tmp_path / "home/.cache/pagetier"
    environ["XDG_CACHE_HOME"] = str(tmp_path / "xdg")
    assert cache_dir(environ) == tmp_path / "xdg/pagetier"
    environ["PAGETIER_CACHE_DIR"] = str(tmp_path / "ours")
    assert cache_dir(environ) == tmp_path / "ours"


def test_empty_and_relative_variables_count_as_unset(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "XDG_CACHE_HOME": "relative", "PAGETIER_CACHE_DIR": ""}
    assert cache_dir(environ) == tmp_path / ".cache/pagetier"


def test_the_home_sign_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir({"PAGETIER_CACHE_DIR": "~/kv"}) == tmp_path / "kv"


def test_folders_are_private_and_made_once(tmp_path: Path) -> None:
    environ = {"PAGETIER_CACHE_DIR": str(tmp_path / "a/b")}
    for place, name in ((models_dir, "models"), (nvme_dir, "nvme"), (redis_dir, "redis"), (kernels_dir, "kernels")):
        assert place(environ) == place(environ) == tmp_path / "a/b" / name
        assert stat.S_IMODE(place(environ).stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a/b").stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_made_names_its_variable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for spot in ("file", "file/below"):
        with pytest.raises(ConfigError, match="PAGETIER_CACHE_DIR.*file"):
            cache_dir({"PAGETIER_CACHE_DIR": str(tmp_path / spot)})


def test_the_limit_of_socket_paths_is_the_kernels(tmp_path: Path) -> None:
    fits = Path("/" + "x" * 106)
    assert check_socket_path(fits) == fits
    with pytest.raises(ConfigError, match="108 bytes"):
        check_socket_path(Path("/" + "x" * 107))
    with pytest.raises(ConfigError, match="109 bytes"):
        check_socket_path(Path("/" + "ü" * 54))
