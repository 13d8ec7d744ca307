"""Whether a folder is a place for the NVMe tier: looked at once, before the tier is built.

Owns the difference between what can never work or would be a mistake (refused, by name) and what may heal (left to the
tier, which starts without its disk and finds it later).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pagetier.kvstore.errors import ConfigError

FLAG, OVERRIDE = "--kv-nvme-path", "--kv-nvme-allow-unsafe"
MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Place:
    """What is known of a path. `anchor` is the path itself, or the nearest thing above it that exists; the other fields
    are the anchor's. may_use: we may list it and make files in it. read_only: its file system is.
    """

    path: Path
    anchor: Path
    mode: int
    may_use: bool
    read_only: bool
    filesystem: str

    @property
    def exists(self) -> bool:
        return self.path == self.anchor


def survey(path: Path, mounts: Path = MOUNTS) -> Place:
    """Look at a path. Raises OSError."""
    path = Path(os.path.abspath(path))
    anchor = next(candidate for candidate in (path, *path.parents) if os.path.lexists(candidate))
    found = os.stat(anchor)
    read_only = bool(os.statvfs(anchor).f_flag & os.ST_RDONLY)
    may_use = os.access(anchor, os.R_OK | os.W_OK | os.X_OK) or read_only
    return Place(path, anchor, found.st_mode, may_use, read_only, filesystem_of(anchor, mounts))


def filesystem_of(path: Path, mounts: Path = MOUNTS) -> str:
    """The type of the file system that an existing path lies on; empty where the kernel does not tell."""
    real = Path(os.path.realpath(path))
    best, kind = -1, ""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for point, name in _mount_points(lines):
        if len(point.parts) >= best and real.is_relative_to(point):  # of two on one point, the later hides the other
            best, kind = len(point.parts), name
    return kind


def _mount_points(lines: Iterable[str]) -> Iterable[tuple[Path, str]]:
    """As in proc(5): the fifth field is the mount point, the first one behind the lone hyphen is the type."""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) > 4 and after:
            yield Path(fields[4].encode().decode("unicode_escape")), after.split()[0]


def judge(place: Place, *, allow_unsafe: bool = False) -> None:
    """Raise ConfigError, with cause and next step, unless the tier may be built there."""
    path, anchor = place.path, place.anchor
    if not stat.S_ISDIR(place.mode):
        what = "is not a folder" if place.exists else f"cannot be made: {anchor} is not a folder"
        raise ConfigError(f"{FLAG}: {path} {what}; name another place")
    if not place.may_use:
        what = "may not be written to" if place.exists else f"cannot be made: {anchor} may not be written to"
        raise ConfigError(f"{FLAG}: {path} {what} by this user; change its mode or name another place")
    if allow_unsafe:
        return
    if place.exists and place.mode & stat.S_IWOTH:
        raise ConfigError(
            f"{FLAG}: everybody may write to {path}, so anybody could put KV there; "
            f"name a folder of your own, such as {path / 'pagetier'}, or give {OVERRIDE}"
        )
    if place.filesystem in MEMORY:
        raise ConfigError(
            f"{FLAG}: {path} lies on {place.filesystem}, which is memory and forgets at a restart of the machine; "
            f"name a folder on a disk, or give {OVERRIDE}"
        )


def refuse_unfit(path: Path, *, allow_unsafe: bool = False) -> None:
    """Raise ConfigError where the tier must not or cannot ever be. What cannot be looked at now may heal."""
    try:
        place = survey(path)
    except (NotADirectoryError, PermissionError) as error:
        raise ConfigError(f"{FLAG}: {path} cannot be reached ({error.strerror}); name another place") from None
    except OSError:
        return
    judge(place, allow_unsafe=allow_unsafe)
