"""What became of reading a stored record for its own sake: `pagetier verify` over any medium."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pagetier.kvstore.record import CHECK_MAC, Header, RecordStatus


class Verdict(StrEnum):
    OK = "ok"
    DAMAGED = "damaged"  # not what it says it is; nobody will ever use it
    UNCHECKED = "unchecked"  # made with a MAC key and none was given, or the other way round: says nothing of it


@dataclass(frozen=True, slots=True)
class Checked:
    """A record, or a file that should hold some, as found. where: in words. key, domain: None when it does not tell."""

    verdict: Verdict
    where: str
    nbytes: int
    key: bytes | None = None
    domain: bytes | None = None
    reason: str = ""


def judge(status: RecordStatus, header: Header | None, has_key: bool) -> tuple[Verdict, str]:
    """What a status means to somebody who asks with or without a MAC key, and why, in words."""
    if header is not None and (header.check == CHECK_MAC) is not has_key and status is not RecordStatus.GARBAGE:
        return Verdict.UNCHECKED, "made with a MAC key; give --kv-mac-key" if not has_key else "made without a MAC key"
    if status is RecordStatus.OK:
        return Verdict.OK, ""
    return Verdict.DAMAGED, {
        RecordStatus.GARBAGE: "is no record",
        RecordStatus.MISMATCH: "is another record than the one that should be there",
        RecordStatus.CHECKSUM: "the checksum is wrong" if not has_key else "the checksum or the MAC key is wrong",
        RecordStatus.UNDECODABLE: "is not what its codec makes of a block",
    }[status]
