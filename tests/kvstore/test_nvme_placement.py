"""Where the NVMe tier may be: what is wrong is refused in one line with the next step, what may heal is not."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.nvme.placement import Place, filesystem_of, judge, refuse_unfit, survey

FOLDER = stat.S_IFDIR | 0o755
DISK = Place(Path("/data/kv"), Path("/data/kv"), FOLDER, may_use=True, read_only=False, filesystem="ext4")
MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw
31 27 0:99 / /mnt/with\\040space rw shared:3 master:1 - xfs /dev/vdb rw
40 27 0:50 / /data rw - tmpfs tmpfs rw
41 27 0:51 / /data rw - btrfs /dev/vdc rw
garbage
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    file = tmp_path / "mountinfo"
    file.write_text(MOUNTS)
    return file


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/dev/shm/x", "tmpfs"),
        ("/dev/shmem", "ext4"),
        ("/mnt/with space/a", "xfs"),
        ("/data/a", "btrfs"),
    ],
)
def test_the_file_system_is_that_of_the_innermost_latest_mount(mounts: Path, path: str, kind: str) -> None:
    assert filesystem_of(Path(path), mounts) == kind
    assert filesystem_of(Path(path), mounts / "missing") == ""


def test_this_machines_own_mounts_are_understood() -> None:
    assert filesystem_of(Path("/proc")) == "proc"


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (replace(DISK, mode=stat.S_IFREG | 0o644), "/data/kv is not a folder; name another"),
        (replace(DISK, anchor=Path("/data"), mode=stat.S_IFREG | 0o644), "cannot be made: /data is not a folder"),
        (replace(DISK, may_use=False), "may not be written to by this user; change its mode or name"),
        (replace(DISK, anchor=Path("/data"), may_use=False), "cannot be made: /data may not be written to"),
        (replace(DISK, mode=FOLDER | 0o002), "everybody may write to /data/kv.*/data/kv/pagetier.*allow-unsafe"),
        (replace(DISK, mode=FOLDER | stat.S_ISVTX | 0o022), "everybody may write"),
        (replace(DISK, filesystem="tmpfs"), "lies on tmpfs, which is memory.*disk, or give --kv-nvme-allow-unsafe"),
        (replace(DISK, anchor=Path("/data"), filesystem="ramfs"), "lies on ramfs"),
    ],
)
def test_what_is_wrong_is_named_with_the_next_step(place: Place, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^--kv-nvme-path: .*{says}") as caught:
        judge(place)
    assert "\n" not in str(caught.value)


def test_what_is_a_place_is_taken() -> None:
    judge(DISK)
    judge(replace(DISK, anchor=Path("/"), mode=FOLDER | 0o777))  # only the folder itself is asked about
    judge(replace(DISK, mode=FOLDER | 0o770))
    for unsafe in (replace(DISK, mode=FOLDER | 0o007), replace(DISK, filesystem="tmpfs")):
        judge(unsafe, allow_unsafe=True)
    with pytest.raises(ConfigError):
        judge(replace(DISK, may_use=False), allow_unsafe=True)


def test_a_survey_tells_what_is_there(tmp_path: Path) -> None:
    place = survey(tmp_path / "a" / "b")
    assert place.anchor == tmp_path and not place.exists and place.may_use
    (tmp_path / "a").mkdir(mode=0o777)
    os.chmod(tmp_path / "a", 0o777)
    assert survey(tmp_path / "a").exists and survey(tmp_path / "a").mode & 0o002
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert survey(tmp_path / "link").mode & 0o002, "a link's target counts"


def test_only_what_cannot_heal_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="not a folder|Not a directory"):
            refuse_unfit(path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refuse_unfit(tmp_path / "loop")  # an OSError of another kind: the tier starts without its disk
