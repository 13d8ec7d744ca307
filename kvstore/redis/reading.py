"""What a Redis holds, seen from outside: identities, blocks by key, all blocks of a domain."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from pagetier.kvstore.admin import BlockInfo, PurgeResult, refuse_other_tiers
from pagetier.kvstore.block import KEY_BYTES, Address, BlockName
from pagetier.kvstore.config import without_login
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.redis.tier import RedisTier

TIER = "redis"
ANSWER_S = 120.0  # for a walk over all names; a silent server is told by its own time-outs
DESCRIBE_KEYS = 4096  # asked about at once


class RedisReading:
    """The servers at one URL. Methods raise TierUnavailable when they do not answer."""

    counts_hits = False

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.shown = without_login(url)
        self._tier, self._clock = RedisTier(url, bytes(KEY_BYTES)), clock
        self._listed: dict[bytes, list[Address]] | None = None  # of the domain last asked about
        self._domain = b""

    def identities(self) -> dict[bytes, bytes]:
        """Domain -> encoded CacheIdentity."""
        found = self._tier.identities()
        if not found and self._tier.counters().errors:
            raise ConfigError(f"{self.shown} does not answer; start it, or check the address")
        return found

    def blocks(self, domain: bytes, keys: Sequence[bytes]) -> list[BlockInfo]:
        """What is known of each block. All names are looked through for that, since nobody knows its parts."""
        names, nbytes = self._described(domain, keys)
        return [
            BlockInfo(key, (TIER,), nbytes[key], names.get(key)) if key in nbytes else BlockInfo(key) for key in keys
        ]

    def known(self, domain: bytes) -> list[BlockInfo]:
        """Every block of a domain."""
        return [info for info in self.blocks(domain, list(self._addresses(domain))) if info.tiers]

    def purge(
        self, domain: bytes, keys: Collection[bytes] | None, root: bytes | None, tiers: Collection[str] = ()
    ) -> PurgeResult:
        """Remove a domain's records. Raises ConfigError for other tiers than this."""
        refuse_other_tiers(TIER, tiers)
        deadline_s = self._clock() + ANSWER_S
        done = self._tier.namespaces().purge(domain, deadline_s, keys=keys, root=root)
        return PurgeResult({TIER: done.num_removed})

    def close(self) -> None:
        """Let go of the connections. Idempotent."""
        self._tier.close()

    def _addresses(self, domain: bytes) -> dict[bytes, list[Address]]:
        if self._listed is None or self._domain != domain:
            self._listed, self._domain = {}, domain
            for record in self._tier.namespaces().records(domain, self._clock() + ANSWER_S):
                listed = self._listed.setdefault(record.address.key, [])
                if record.address not in listed:
                    listed.append(record.address)
        return self._listed

    def _described(self, domain: bytes, keys: Sequence[bytes]) -> tuple[dict[bytes, BlockName], dict[bytes, int]]:
        """Names and payload bytes by key, over all parts."""
        names: dict[bytes, BlockName] = {}
        nbytes: dict[bytes, int] = {}
        addresses = [address for key in keys for address in self._addresses(domain).get(key, [])]
        for first in range(0, len(addresses), DESCRIBE_KEYS):
            asked = addresses[first : first + DESCRIBE_KEYS]
            found = self._tier.namespaces().describe(domain, asked, self._clock() + ANSWER_S)
            for address, one in zip(asked, found, strict=True):
                if one is not None:
                    nbytes[address.key] = nbytes.get(address.key, 0) + one[0]
                    if one[1] is not None:
                        names[address.key] = one[1]
        return names, nbytes
