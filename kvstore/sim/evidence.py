"""What must outlive a process, and what is there: the disk read by the format alone, past any tier."""

from __future__ import annotations

from pathlib import Path

from pagetier.kvstore.nvme.crash_fs import CrashFS
from pagetier.kvstore.nvme.disk import Disk
from pagetier.kvstore.nvme.segment import LIVE, SUFFIX, erased_at, load_segment
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.record import PAGE_BYTES, RecordStatus, parse_header, unpack
from pagetier.kvstore.sim.ledger import PAYLOAD_BYTES


def whole_records(disk: Disk, tier_path: str) -> set[bytes]:
    """Addresses of all records that a recovery would find and a read would verify now."""
    files = CrashFS(disk)
    try:
        found: set[bytes] = set()
        root = disk.folders.get(tier_path)
        for name in sorted(root.entries if root is not None else ()):
            folder = disk.folders.get(f"{tier_path}/{name}")
            if folder is not None and name.isdigit():
                for child in list(folder.entries):
                    if child.endswith(SUFFIX):
                        found |= _records_of(files, f"{tier_path}/{name}/{child}")
        return found
    finally:
        files.kill()


def _records_of(files: CrashFS, text: str) -> set[bytes]:
    loaded = load_segment(files, Path(text))
    found: set[bytes] = set()
    if loaded is None:
        return found
    data = files.disk.at(text).data
    addresses = loaded.entries.address_list()
    for address, page, size in zip(addresses, loaded.entries.pages, loaded.entries.payload_bytes, strict=True):
        if loaded.erased[erased_at(page) - PAGE_BYTES] == LIVE and _is_whole(data, page * PAGE_BYTES, size):
            found.add(address)
    return found


def _is_whole(data: bytearray, offset: int, payload_bytes: int) -> bool:
    head = bytes(data[offset : offset + PAGE_BYTES])
    body = bytes(data[offset + PAGE_BYTES : offset + PAGE_BYTES + payload_bytes])
    header = parse_header(head) if len(head) == PAGE_BYTES else None
    if header is None or len(body) != payload_bytes or payload_bytes > PAYLOAD_BYTES:
        return False
    block = bytearray(PAYLOAD_BYTES)
    block[:payload_bytes] = body
    view = memoryview(block)
    return unpack(head, view[:payload_bytes], view, header.domain, header.name, header.part) is RecordStatus.OK


def promised(nvme: NvmeTier, disk: Disk, *, only_synced: bool = False) -> set[bytes]:
    """Addresses of the records that a tier offers from segments of its own, as far as nobody took these away.

    only_synced: those alone that `fsync` says a power cut leaves, and that an earlier one has not torn.
    """
    log, found = nvme._log, set[bytes]()
    for address, place in nvme._index.places():
        segment = nvme._catalog.get(place.segment)
        if segment is None or not segment.own:
            continue
        if only_synced and log._settings.fsync != "always" and (not segment.closed or segment in log._unsynced):
            continue
        try:
            inode = disk.at(str(segment.path))
        except FileNotFoundError:
            continue
        is_there = inode.number == segment.inode and len(inode.data) >= place.end
        is_there = is_there and inode.data[erased_at(place.page)] == LIVE  # another process may have condemned it
        if is_there and (not only_synced or _is_whole(inode.data, place.offset, place.payload_bytes)):
            found.add(address)
    return found
