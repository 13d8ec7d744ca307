"""A disk in memory that keeps, over a power cut, what a disk keeps: the medium and the kernel's cache above it.

Until something is synced a power cut may lose it: bytes sector by sector, each as it was after any of the writes to it;
sizes; and entries of folders, of whose changes since the last sync of the folder the first few survive. Deterministic
by seed. One thread only. Processes see it through crash_fs.py.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pagetier.kvstore.nvme.fault_fs import os_error

SECTOR_BYTES = 512  # written in whole or not at all
BLOCK_BYTES = 4096  # unit of allocation
TICK_NS = 4_000_000  # modification times are this coarse, as the kernel's are
START_NS = 1_800_000_000_000_000_000


Entry = tuple[str, "Inode | None", "Inode | None"]  # a name, what it led to and what it leads to now


@dataclass(eq=False, slots=True)
class Inode:
    """A file or folder. `base`: its durable bytes, while there are changes after the last sync; `writes`, `sizes`:
    those. `journal`: of a folder, its changes since its last sync, each of one or two names.
    """

    number: int
    mode: int
    mtime_ns: int
    data: bytearray = field(default_factory=bytearray)
    allocated: int = 0
    num_links: int = 0
    num_open: int = 0
    holder: OpenFile | None = None  # of the lock
    base: bytes | None = None
    writes: list[tuple[int, bytes]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    entries: dict[str, Inode] = field(default_factory=dict)
    journal: list[tuple[Entry, ...]] = field(default_factory=list)
    stat: os.stat_result | None = None  # None: to be made anew

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.mode)


@dataclass(eq=False, slots=True)
class OpenFile:
    inode: Inode
    flags: int


class View(Protocol):
    """A process that has the disk open."""

    def kill(self) -> None:
        """It ends: descriptors and locks go."""


class Disk:
    """The medium, its free room and its clock. `now_ns` moves only when someone sleeps or moves it.

    capacity_bytes: None for no end. used_bytes: blocks of all files and folders. reuses_numbers: the inode number of a
    removed file goes to the next one, as on most real disks.
    """

    def __init__(self, *, seed: int = 0, capacity_bytes: int | None = None, reuses_numbers: bool = True) -> None:
        self.capacity_bytes = capacity_bytes
        self.now_ns = START_NS
        self.used_bytes = 0
        self._rng = random.Random(seed)
        self._num_inodes = 0
        self._reuses_numbers = reuses_numbers
        self._free_numbers: list[int] = []
        self.root = self._new_inode(stat.S_IFDIR | 0o755)
        self.root.num_links = 1
        self.folders: dict[str, Inode] = {"/": self.root}
        self._views: list[View] = []

    def add_view(self, view: View) -> None:
        self._views.append(view)

    def forget_view(self, view: View) -> None:
        if view in self._views:
            self._views.remove(view)

    def power_cut(self) -> None:
        """End all processes, and lose what the disk may lose."""
        for view in list(self._views):
            view.kill()
        share = self._rng.choice((0.0, 0.5, 0.5, 1.0))  # of what was not synced, that survives
        self._settle_folder(self.root, share, set())
        self._find_folders()

    def orderly_shutdown(self) -> None:
        """End all processes and lose nothing."""
        for view in list(self._views):
            view.kill()
        for inode in self._reachable():
            self.sync(inode)

    def flip(self, path: Path, offset: int) -> None:
        """Bit rot: one byte of a file changes, silently and for good."""
        inode = self.at(str(path))
        if offset < len(inode.data):
            inode.data[offset] ^= 0x41
            if inode.base is not None and offset < len(inode.base):
                inode.base = inode.base[:offset] + inode.data[offset : offset + 1] + inode.base[offset + 1 :]

    def remove_tree(self, path: Path) -> None:
        """What `rm -rf` does: the folder and all below it are gone; open descriptors stay good."""
        folder, (parent, name) = self.at(str(path)), self.parent_of(str(path))
        for child in list(folder.entries):
            if folder.entries[child].is_folder:
                self.remove_tree(path / child)
            else:
                self.change(folder, [(child, None)])
        self.folders.pop(str(path), None)
        self.change(parent, [(name, None)])

    def paths_below(self, path: Path) -> list[Path]:
        """All files below a folder that exists, sorted."""
        found: list[Path] = []
        for name, inode in sorted(self.at(str(path)).entries.items()):
            found += self.paths_below(path / name) if inode.is_folder else [path / name]
        return found

    # -- for CrashFS ---------------------------------------------------------------------------------------------------

    def at(self, path: str) -> Inode:
        """What a path leads to. Raises OSError."""
        folder = self.folders.get(path)
        if folder is not None:
            return folder
        parent, name = self.parent_of(path)
        inode = parent.entries.get(name)
        if inode is None:
            raise os_error(errno.ENOENT)
        return inode

    def parent_of(self, path: str) -> tuple[Inode, str]:
        """The folder that a path lies in, and its name there. Raises OSError."""
        above, _, name = path.rpartition("/")
        folder = self.folders.get(above or "/")
        if folder is None:
            raise os_error(errno.ENOENT)
        return folder, name

    def make(self, path: str, mode: int) -> Inode:
        """A new file or folder at a path where there is none."""
        parent, name = self.parent_of(path)
        if stat.S_ISDIR(mode):
            self.take_room(BLOCK_BYTES)
        inode = self._new_inode(mode)
        self.change(parent, [(name, inode)])
        if inode.is_folder:
            self.folders[path] = inode
        return inode

    def change(self, folder: Inode, changes: Sequence[tuple[str, Inode | None]]) -> None:
        """Let names of a folder lead elsewhere, all at once."""
        done: list[Entry] = []
        for name, inode in changes:
            before = folder.entries.get(name)
            done.append((name, before, inode))
            if inode is not None:
                folder.entries[name] = inode
                inode.num_links += 1
            else:
                folder.entries.pop(name, None)
            if before is not None:
                before.num_links -= 1
                self.let_go(before)
        folder.journal.append(tuple(done))
        self.touch(folder)

    def let_go(self, inode: Inode) -> None:
        """Free the room of an inode that no name and no descriptor leads to; its bytes stay for a journal's sake."""
        if not inode.num_links and not inode.num_open:
            self.used_bytes -= inode.allocated
            inode.allocated = 0
            self._free_numbers.append(inode.number)

    def touch(self, inode: Inode) -> None:
        inode.mtime_ns = self.now_ns // TICK_NS * TICK_NS
        inode.stat = None

    def take_room(self, nbytes: int) -> None:
        """Raises OSError when the disk is full."""
        if self.capacity_bytes is not None and nbytes > 0 and self.used_bytes + nbytes > self.capacity_bytes:
            raise os_error(errno.ENOSPC)

    def allocate(self, inode: Inode, nbytes: int) -> None:
        """Let an inode have blocks for that many bytes. Raises OSError when there are none."""
        blocks = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        self.take_room(blocks - inode.allocated)
        self.used_bytes += blocks - inode.allocated
        inode.allocated = blocks

    def resize(self, inode: Inode, nbytes: int) -> None:
        self._keep_base(inode)
        data = inode.data
        if nbytes < len(data):
            del data[nbytes:]
        else:
            data.extend(bytes(nbytes - len(data)))
        inode.sizes.append(nbytes)
        self.touch(inode)

    def write(self, inode: Inode, data: bytes, offset: int) -> None:
        end = offset + len(data)
        if end > len(inode.data):
            if end > inode.allocated:
                self.allocate(inode, end)
            self.resize(inode, end)
        else:
            self._keep_base(inode)
        inode.data[offset:end] = data
        inode.writes.append((offset, data))
        self.touch(inode)

    def sync(self, inode: Inode) -> None:
        """What was done to it before outlives a power cut."""
        inode.base = None
        inode.writes.clear()
        inode.sizes.clear()
        inode.journal.clear()

    def _keep_base(self, inode: Inode) -> None:
        if inode.base is None:
            inode.base = bytes(inode.data)

    def _new_inode(self, mode: int) -> Inode:
        if self._free_numbers and self._reuses_numbers:
            number = self._free_numbers.pop()
        else:
            self._num_inodes = number = self._num_inodes + 1
        inode = Inode(number, mode, self.now_ns // TICK_NS * TICK_NS)
        if inode.is_folder:
            inode.allocated = BLOCK_BYTES
            self.used_bytes += BLOCK_BYTES
        return inode

    # -- the power cut -------------------------------------------------------------------------------------------------

    def _settle_folder(self, folder: Inode, share: float, settled: set[int]) -> None:
        num_kept = self._num_kept(len(folder.journal), share)
        for done in reversed(folder.journal[num_kept:]):
            for name, before, _ in reversed(done):
                if before is None:
                    folder.entries.pop(name, None)
                else:
                    folder.entries[name] = before
        folder.journal.clear()
        folder.stat = None
        for _, inode in sorted(folder.entries.items()):
            if id(inode) not in settled:
                settled.add(id(inode))
                if inode.is_folder:
                    self._settle_folder(inode, share, settled)
                else:
                    self._settle_file(inode, share)

    def _settle_file(self, inode: Inode, share: float) -> None:
        if inode.base is not None:
            sizes = [len(inode.base), *inode.sizes]
            size = sizes[self._num_kept(len(sizes) - 1, share)]
            image = bytearray(inode.base)
            image.extend(bytes(max(0, max(sizes) - len(image))))
            for sector, writes in _by_sector(inode.writes).items():
                start = sector * SECTOR_BYTES
                for offset, data in writes[: self._num_kept(len(writes), share)]:
                    first, end = max(offset, start), min(offset + len(data), start + SECTOR_BYTES)
                    image[first:end] = data[first - offset : end - offset]
            inode.data = image[:size]
        self.sync(inode)
        inode.stat = None

    def _num_kept(self, count: int, share: float) -> int:
        """How many of that many un-synced changes survive."""
        return round(count * share) if share in (0.0, 1.0) else self._rng.randint(0, count)

    def _reachable(self) -> list[Inode]:
        found, todo = [], [self.root]
        while todo:
            inode = todo.pop()
            found.append(inode)
            todo += inode.entries.values()
        return found

    def _find_folders(self) -> None:
        """Account anew for what is there."""
        self.folders = {"/": self.root}
        todo = [("", self.root)]
        while todo:
            above, folder = todo.pop()
            for name, inode in folder.entries.items():
                if inode.is_folder:
                    self.folders[f"{above}/{name}"] = inode
                    todo.append((f"{above}/{name}", inode))
        live = self._reachable()
        for inode in live:
            inode.num_links = 1
            inode.allocated = BLOCK_BYTES if inode.is_folder else -(-len(inode.data) // BLOCK_BYTES) * BLOCK_BYTES
            inode.stat = None
        self.used_bytes = sum(inode.allocated for inode in live)
        taken = set()
        for inode in live:  # one that came back may find its number given away
            if inode.number in taken:
                self._num_inodes += 1
                inode.number = self._num_inodes
            taken.add(inode.number)
        self._free_numbers = [number for number in self._free_numbers if number not in taken]


def _by_sector(writes: Sequence[tuple[int, bytes]]) -> dict[int, list[tuple[int, bytes]]]:
    """The writes that touch each sector, in order."""
    touched: dict[int, list[tuple[int, bytes]]] = {}
    for offset, data in writes:
        for sector in range(offset // SECTOR_BYTES, (offset + len(data) - 1) // SECTOR_BYTES + 1):
            touched.setdefault(sector, []).append((offset, data))
    return touched
