"""Reading records for their own sake: is each still what it says it is, and whole? Asks for no name, changes nothing.

For the scrubber, for records that move to another segment, and for whoever looks at a folder from outside.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagetier.kvstore.block import Address
from pagetier.kvstore.nvme.files import Files, read_full
from pagetier.kvstore.nvme.index import Place
from pagetier.kvstore.record import PAGE_BYTES, Header, RecordStatus, address_bytes, parse_header, verify


@dataclass(frozen=True, slots=True)
class Audited:
    """A record as found. `page`: its header's page; `payload`: without padding; views of the buffer it was read into.
    `header`: None when there is none.
    """

    status: RecordStatus
    header: Header | None
    page: memoryview
    payload: memoryview


def read_record(
    files: Files, fd: int, address: bytes, place: Place, *, mac_key: bytes | None, buffer: memoryview | None = None
) -> Audited:
    """Read the record of whatever domain that lies at `place`, and check it against itself and its address.

    `buffer`: at least the record's pages, for direct I/O aligned to them; left out, one is made. Raises OSError.
    """
    nbytes = place.end - place.offset
    buffer = memoryview(bytearray(nbytes)) if buffer is None else buffer[:nbytes]
    got = read_full(files, fd, [buffer], place.offset)
    page, payload = buffer[:PAGE_BYTES], buffer[PAGE_BYTES : PAGE_BYTES + place.payload_bytes]
    header = parse_header(page) if got >= PAGE_BYTES + place.payload_bytes else None
    status = RecordStatus.GARBAGE
    if header is not None:
        status = RecordStatus.MISMATCH
        own = address_bytes(Address(header.name.key, header.part))
        if own == address and header.payload_bytes == place.payload_bytes:
            status = verify(page, payload, header.domain, header.name, header.part, header.coding, mac_key=mac_key)
    return Audited(status, header, page, payload)
