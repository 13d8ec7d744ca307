"""The folder of the NVMe tier: which NN this process writes, who else writes, how much disk it all takes, identities.

Knows names, locks and modes (proto/FORMAT.md, section "NVMe"); knows nothing of what is inside a segment.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from pagetier.kvstore.block import KEY_BYTES
from pagetier.kvstore.nvme.files import Files, close_quietly, read_bytes, sync_folder, write_full
from pagetier.kvstore.nvme.segment import SUFFIX

log = logging.getLogger(__name__)

NUM_WRITERS = 100
BLOCK_BYTES = 4096  # what a small file or a new folder takes of the disk
TEMPORARY = ".tmp"
QUARANTINE = "quarantine"
IDENTITIES = "identities"
REPLACED = "the folder was removed or replaced"
_LOCK_POLL_S = 0.002
_STAT_BYTES = 512  # unit of st_blocks


class Folder:
    """PATH and the NN below it. `attach`, `add_writer` and `detach` come from one thread at a time; the rest from any.

    Nothing here catches OSError unless it says so. What takes disk blocks says so; its caller holds `room_lock` and
    knows that the cap has room for them.
    """

    def __init__(self, files: Files, path: Path) -> None:
        self.path = path
        self.writer: Path | None = None  # the NN whose lock we hold
        self._files = files
        self._lock_fd = -1

    def attach(self) -> None:
        """Make PATH where it is missing and take the first NN there that nobody writes; `writer` stays None when all
        are taken. Takes no blocks of a PATH that is there.
        """
        self._make_path()
        for candidate in self.writers():
            if self._take(candidate):
                return

    def add_writer(self) -> None:
        """Make one more NN and take it. With 100 there already this process only reads. Takes a block."""
        there = set(self.writers())
        for number in range(NUM_WRITERS):
            candidate = self.path / f"{number:02d}"
            if candidate not in there:
                self._files.make_folder(candidate)
            if self._take(candidate):
                return
        log.warning("%s: all %d writers are taken; this process reads and does not store", self.path, NUM_WRITERS)

    def _take(self, candidate: Path) -> bool:
        fd = self.try_lock(candidate)
        if fd is None:
            return False
        self._lock_fd, self.writer = fd, candidate
        if stat.S_IMODE(self._files.stat(candidate).st_mode) != 0o700:
            self._files.chmod(candidate, 0o700)
        return True

    def _make_path(self) -> None:
        """PATH and what lies above it, on the disk for good: a power cut would take all below a lost entry."""
        new: list[Path] = []
        for folder in (self.path, *self.path.parents):
            try:
                self._files.stat(folder)
                break
            except FileNotFoundError:
                new.append(folder)
        self._files.make_folder(self.path)
        for folder in new:
            with contextlib.suppress(OSError):  # above it we may not be allowed to
                sync_folder(self._files, folder.parent)

    def detach(self) -> None:
        """Let go of our NN. Never raises."""
        if self._lock_fd >= 0:
            close_quietly(self._files, self._lock_fd)
        self._lock_fd, self.writer = -1, None

    def loss(self, writer: Path) -> str:
        """Why `writer`, our NN, is no longer the one whose lock we hold; empty while it is."""
        try:
            there, ours = self._files.stat(writer / "lock"), self._files.stat(self._lock_fd)
        except FileNotFoundError:
            return REPLACED
        except OSError as error:
            return str(error)
        return "" if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino) else REPLACED

    def try_lock(self, folder: Path) -> int | None:
        """Take the lock of PATH or of an NN: a descriptor to close, None when another process has it."""
        fd = self._files.open(folder / "lock", os.O_RDWR | os.O_CREAT)
        try:
            if self._files.lock(fd):
                return fd
        except OSError:
            self._files.close(fd)
            raise
        self._files.close(fd)
        return None

    @contextlib.contextmanager
    def room_lock(self, deadline_s: float) -> Iterator[bool]:
        """Hold PATH/lock, under which room is made and taken; False when the deadline passed first."""
        while (fd := self.try_lock(self.path)) is None and self._files.now_s() < deadline_s:
            self._files.sleep(_LOCK_POLL_S)
        try:
            yield fd is not None
        finally:
            if fd is not None:
                close_quietly(self._files, fd)

    def writers(self) -> list[Path]:
        """Every NN there is, ascending; empty when PATH is gone."""
        names = sorted(self._names(self.path))
        return [self.path / name for name in names if len(name) == 2 and name.isascii() and name.isdigit()]

    def segment_paths(self, writer: Path) -> list[Path]:
        """The segment files of an NN, oldest first; empty when it is gone."""
        names = sorted(self._names(writer))
        return [writer / name for name in names if _is_hex(name.removesuffix(SUFFIX), 16) and SUFFIX in name]

    def sweep(self) -> None:
        """Remove what crashed creations left. Only under `room_lock`, under which all temporary files are made."""
        for folder in (self.path / IDENTITIES, *self.writers()):
            for name in self._names(folder):
                if name.endswith(TEMPORARY):
                    with contextlib.suppress(OSError):
                        self._files.unlink(folder / name)

    def quarantine(self, writer: Path | None) -> Path:
        """Where damaged records of an NN are kept, whether or not it exists; None: of ours."""
        folder = writer or self.writer
        assert folder is not None, "no folder of our own"
        return folder / QUARANTINE

    def physical_bytes(self) -> int:
        """Disk blocks of everything that is ours below PATH, folders included."""
        return self.working_bytes() + self.quarantined_bytes()

    def working_bytes(self) -> int:
        """The same without what is kept of damaged records, whose room is set aside."""
        total = self._blocks(self.path) + self._blocks(self.path / "lock")
        for folder in (self.path / IDENTITIES, *self.writers()):
            total += self._blocks(folder) + self._blocks_below(folder, without=QUARANTINE)
        return total

    def quarantined_bytes(self) -> int:
        """Disk blocks of all kept damaged records, their folders included."""
        folders = [self.quarantine(writer) for writer in self.writers()]
        return sum(self._blocks(folder) + self._blocks_below(folder) for folder in folders)

    def _blocks_below(self, folder: Path, without: str = "") -> int:
        return sum(self._blocks(folder / name) for name in self._names(folder) if name != without)

    def _names(self, folder: Path) -> list[str]:
        try:
            return self._files.listdir(folder)
        except FileNotFoundError:
            return []

    def _blocks(self, path: Path) -> int:
        try:
            return self._files.stat(path).st_blocks * _STAT_BYTES
        except FileNotFoundError:
            return 0

    def try_write(self) -> None:
        """Write a page into our NN and remove it; takes a block for a moment. Raises OSError when that fails."""
        assert self.writer is not None, "no folder of our own"
        path = self.writer / f"try{TEMPORARY}"
        fd = self._files.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            self._files.allocate(fd, BLOCK_BYTES)
            write_full(self._files, fd, [bytes(BLOCK_BYTES)], 0)
            self._files.sync(fd)
        finally:
            self._files.close(fd)
            with contextlib.suppress(OSError):
                self._files.unlink(path)

    def put_identity(self, domain: bytes, encoded: bytes) -> None:
        """Keep an encoded identity. Takes its blocks, and one for the folder of identities."""
        folder = self.path / IDENTITIES
        self._files.make_folder(folder)
        final = folder / domain.hex()
        partial = final.with_name(f"{final.name}.{os.getpid()}{TEMPORARY}")
        fd = self._files.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_full(self._files, fd, [encoded], 0)
        finally:
            self._files.close(fd)
        self._files.rename(partial, final)

    def has_identity(self, domain: bytes, encoded: bytes) -> bool:
        """Whether this very identity is kept."""
        with contextlib.suppress(FileNotFoundError):
            return self._read_identity(self.path / IDENTITIES / domain.hex()) == encoded
        return False

    def identities(self) -> dict[bytes, bytes]:
        """Domain -> encoded identity of all that are stored."""
        found: dict[bytes, bytes] = {}
        for name in self._names(self.path / IDENTITIES):
            if _is_hex(name, 2 * KEY_BYTES):
                with contextlib.suppress(FileNotFoundError):
                    found[bytes.fromhex(name)] = self._read_identity(self.path / IDENTITIES / name)
        return found

    def _read_identity(self, path: Path) -> bytes:
        fd = self._files.open(path, os.O_RDONLY)
        try:
            return read_bytes(self._files, fd, self._files.stat(fd).st_size, 0)
        finally:
            self._files.close(fd)


def _is_hex(text: str, num_digits: int) -> bool:
    return len(text) == num_digits and set(text) <= set("0123456789abcdef")
