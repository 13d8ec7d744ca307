"""One process's view of a disk in memory (disk.py): for tests and for the simulation. One thread only."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from pagetier.kvstore.nvme.disk import BLOCK_BYTES, START_NS, Disk, Inode, OpenFile
from pagetier.kvstore.nvme.fault_fs import os_error
from pagetier.kvstore.nvme.files import Buffer, Files

FIRST_FD = 3


class Killed(BaseException):
    """The process does not exist any more. No `except Exception` of the product catches it."""


class CrashFS(Files):
    """`Files` over a `Disk`, for one process. `on_operation` is called with its name before each operation: the place
    to let others run, or to `kill` the process and raise. dies_after: within a write: how much of it is still done,
    before the process is killed.
    """

    depth = 1

    def __init__(self, disk: Disk | None = None) -> None:
        self.disk = Disk() if disk is None else disk
        self.on_operation: Callable[[str], None] | None = None
        self.dies_after: int | None = None
        self.is_killed = False
        self._open: dict[int, OpenFile] = {}
        self._next_fd = FIRST_FD
        self.disk.add_view(self)

    @property
    def num_open(self) -> int:
        """Descriptors."""
        return len(self._open)

    def kill(self) -> None:
        """End the process: its descriptors and locks go, what it wrote stays, and every later operation raises
        `Killed`.
        """
        self.is_killed = True
        for fd in list(self._open):
            self._close(fd)
        self.disk.forget_view(self)

    def open(self, path: Path, flags: int) -> int:
        self._enter("open")
        try:
            inode = self.disk.at(str(path))
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            inode = self.disk.make(str(path), stat.S_IFREG | 0o600)
        else:
            if flags & os.O_CREAT and flags & os.O_EXCL:
                raise os_error(errno.EEXIST)
        writable = flags & (os.O_WRONLY | os.O_RDWR)
        if inode.is_folder and (writable or flags & os.O_CREAT):
            raise os_error(errno.EISDIR)
        if flags & os.O_TRUNC and writable:
            self._truncate(inode, 0)
        fd, self._next_fd = self._next_fd, self._next_fd + 1
        self._open[fd] = OpenFile(inode, flags)
        inode.num_open += 1
        return fd

    def close(self, fd: int) -> None:
        self._enter("close")
        self._at(fd)
        self._close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._enter("preadv")
        file = self._at(fd)
        if file.flags & os.O_WRONLY:
            raise os_error(errno.EBADF)
        data, at = file.inode.data, offset
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            piece = data[at : at + view.nbytes]
            view[: len(piece)] = piece
            at += len(piece)
            if len(piece) < view.nbytes:
                break
        return max(0, at - offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._enter("pwritev")
        file = self._at(fd)
        if not file.flags & (os.O_WRONLY | os.O_RDWR):
            raise os_error(errno.EBADF)
        data = b"".join(buffers)
        if self.dies_after is not None:
            self.disk.write(file.inode, data[: self.dies_after], offset)
            self.kill()
            raise Killed("pwritev")
        self.disk.write(file.inode, data, offset)
        return len(data)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._enter("allocate")
        inode = self._at(fd).inode
        if nbytes > inode.allocated:
            self.disk.allocate(inode, nbytes)
        if nbytes > len(inode.data):
            self.disk.resize(inode, nbytes)

    def truncate(self, target: int | Path, nbytes: int) -> None:
        self._enter("truncate")
        if isinstance(target, int) and not self._at(target).flags & (os.O_WRONLY | os.O_RDWR):
            raise os_error(errno.EINVAL)
        self._truncate(self._inode(target), nbytes)

    def sync(self, fd: int) -> None:
        self._enter("sync")
        self.disk.sync(self._at(fd).inode)

    def stat(self, target: int | Path) -> os.stat_result:
        self._enter("stat")
        inode = self._inode(target)
        if inode.stat is None:
            inode.stat = _stat_of(inode)
        return inode.stat

    def listdir(self, path: Path) -> list[str]:
        self._enter("listdir")
        inode = self._inode(path)
        if not inode.is_folder:
            raise os_error(errno.ENOTDIR)
        return list(inode.entries)

    def make_folder(self, path: Path) -> None:
        self._enter("make_folder")
        text = str(path)
        if text in self.disk.folders:
            return
        for above in reversed(path.parents):
            if str(above) not in self.disk.folders:
                self._make_one(str(above))
        self._make_one(text)

    def chmod(self, path: Path, mode: int) -> None:
        self._enter("chmod")
        inode = self._inode(path)
        inode.mode, inode.stat = stat.S_IFMT(inode.mode) | mode, None

    def rename(self, old: Path, new: Path) -> None:
        """Within one folder, which is all that the tier does."""
        self._enter("rename")
        inode = self._inode(old)
        assert old.parent == new.parent and not inode.is_folder, "files are renamed within their folder only"
        if old != new:
            self.disk.change(self.disk.parent_of(str(new))[0], [(new.name, inode), (old.name, None)])

    def unlink(self, path: Path) -> None:
        self._enter("unlink")
        if self._inode(path).is_folder:
            raise os_error(errno.EISDIR)
        folder, name = self.disk.parent_of(str(path))
        self.disk.change(folder, [(name, None)])

    def lock(self, fd: int) -> bool:
        self._enter("lock")
        file = self._at(fd)
        if file.inode.holder in (None, file):
            file.inode.holder = file
        return file.inode.holder is file

    def set_mtime(self, path: Path, time_ns: int) -> None:
        self._enter("set_mtime")
        inode = self._inode(path)
        inode.mtime_ns, inode.stat = time_ns, None

    def now_s(self) -> float:
        return (self.disk.now_ns - START_NS) / 1e9

    def time_ns(self) -> int:
        return self.disk.now_ns

    def sleep(self, seconds: float) -> None:
        self._enter("sleep")
        self.disk.now_ns += max(1, int(seconds * 1e9))

    def _enter(self, op: str) -> None:
        if self.is_killed:
            raise Killed(op)
        if self.on_operation is not None:
            self.on_operation(op)

    def _at(self, fd: int) -> OpenFile:
        file = self._open.get(fd)
        if file is None:
            raise os_error(errno.EBADF)
        return file

    def _inode(self, target: int | Path) -> Inode:
        return self._at(target).inode if isinstance(target, int) else self.disk.at(str(target))

    def _close(self, fd: int) -> None:
        file = self._open.pop(fd)
        if file.inode.holder is file:
            file.inode.holder = None
        file.inode.num_open -= 1
        self.disk.let_go(file.inode)

    def _truncate(self, inode: Inode, nbytes: int) -> None:
        if nbytes != len(inode.data):
            if nbytes < len(inode.data):
                self.disk.allocate(inode, nbytes)
            self.disk.resize(inode, nbytes)

    def _make_one(self, path: str) -> None:
        parent, name = self.disk.parent_of(path)
        if name in parent.entries:
            raise os_error(errno.EEXIST)
        self.disk.make(path, stat.S_IFDIR | 0o700)


def _stat_of(inode: Inode) -> os.stat_result:
    seconds = inode.mtime_ns // 1_000_000_000
    size = BLOCK_BYTES if inode.is_folder else len(inode.data)
    fields = (inode.mode, inode.number, 1, inode.num_links, 0, 0, size, seconds, seconds, seconds)
    more = {"st_mtime_ns": inode.mtime_ns, "st_blocks": inode.allocated // 512, "st_blksize": BLOCK_BYTES}
    return os.stat_result(fields, more)
