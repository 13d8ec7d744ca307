"""Names of records in Redis and the small commands about them (proto/FORMAT.md, "Redis"). Pure; thread-safe."""

from __future__ import annotations

from collections.abc import Sequence

from pagetier.kvstore.block import Address, AddressRun, Part
from pagetier.kvstore.record import part_text, redis_namespace
from pagetier.kvstore.redis.resp import Reply, encode_command


class RecordNames:
    """Names and commands of one domain's records: `record.redis_name`, some times faster, for lookups of thousands."""

    def __init__(self, domain: bytes) -> None:
        self.domain = domain
        self._namespace = redis_namespace(domain)
        self._suffixes: dict[Part, str] = {}  # a cache; two threads may fill it with the same

    def name(self, address: Address) -> bytes:
        return f"{self._namespace}{{{address.key.hex()}{self._suffix(address.part)}".encode()

    def command(self, verb: bytes, address: Address, *more: bytes) -> bytes:
        """`verb name more...`."""
        return encode_command(verb, self.name(address), *more)

    def commands(self, verb: str, addresses: Sequence[Address]) -> bytes:
        """`verb name` for each address, in order. One join when all are of one part, as they are in a lookup."""
        if not addresses:
            return b""
        if isinstance(addresses, AddressRun):
            part, keys = addresses.part, addresses.keys
        else:
            part, keys = addresses[0].part, [address.key for address in addresses]
            if any(address.part is not part and address.part != part for address in addresses):
                return b"".join(self.command(verb.encode(), address) for address in addresses)
        suffix = self._suffix(part)
        length = len(self.name(addresses[0]))
        before = f"*2\r\n${len(verb)}\r\n{verb}\r\n${length}\r\n{self._namespace}{{"
        after = f"{suffix}\r\n"
        return (before + (after + before).join([key.hex() for key in keys]) + after).encode()

    def _suffix(self, part: Part) -> str:
        suffix = self._suffixes.get(part)
        if suffix is None:
            suffix = self._suffixes[part] = f"}}:{part_text(part)}"
        return suffix


def parse_identities(reply: Reply) -> dict[bytes, bytes]:
    """Domain -> encoded identity from HGETALL of `record.REDIS_IDENTITIES`; somebody else's fields are left out."""
    found: dict[bytes, bytes] = {}
    for field, value in zip(reply[::2], reply[1::2], strict=False) if isinstance(reply, list) else ():
        if isinstance(field, bytes) and isinstance(value, bytes) and len(field) == 64:
            try:
                found[bytes.fromhex(field.decode("ascii"))] = value
            except ValueError:
                continue
    return found
