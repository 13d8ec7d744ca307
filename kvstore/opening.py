"""Builds the tiers that a configuration names."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from pathlib import Path

from pagetier.kvstore import places
from pagetier.kvstore.codec import NONE
from pagetier.kvstore.config import EMBEDDED, StoreConfig
from pagetier.kvstore.errors import TierError
from pagetier.kvstore.mac import load_mac_key, warn_if_shared
from pagetier.kvstore.tier import Tier

logger = logging.getLogger(__name__)


def open_tiers(config: StoreConfig, domain: bytes, resources: ExitStack) -> tuple[list[Tier], list[str]]:
    """The tiers that `config` names, for records of `domain`, and the names of those whose medium would not have it.

    Raises ConfigError for what can never work, and leaves no tier open then. resources: closed after the tiers."""
    mac_key = None
    if config.mac_key_file is not None:
        mac_key = load_mac_key(Path(config.mac_key_file))
        warn_if_shared(Path(config.mac_key_file))
    tiers: list[Tier] = []
    left_out: list[str] = []
    with ExitStack() as tidy:
        for name in config.tier_names:
            try:
                tiers.append(_open_tier(name, config, domain, mac_key, resources))
                tidy.callback(tiers[-1].close)
            except (TierError, OSError) as error:
                logger.warning("KV tier %s is left out, its blocks are recomputed: %s", name, error)
                left_out.append(name)
        tidy.pop_all()
    return tiers, left_out


def _open_tier(name: str, config: StoreConfig, domain: bytes, mac_key: bytes | None, resources: ExitStack) -> Tier:
    """One tier. Imported here, so that a store loads only what its tiers need."""
    if name == "host":
        from pagetier.kvstore.host import HostTier

        return HostTier(config.host_size, poison=config.poison, copier=config.copier)
    if name == "nvme":
        return _open_nvme(config, domain, mac_key)
    from pagetier.kvstore.redis.embedded import join_embedded
    from pagetier.kvstore.redis.tier import RedisTier

    url = config.redis_url
    if url == EMBEDDED:
        url = resources.enter_context(join_embedded(places.redis_dir(), config.redis_size, config.redis_linger_s)).url
    return RedisTier(url, domain, ttl_s=config.redis_ttl_s, mac_key=mac_key, codec=config.codecs.get(name, NONE))


def _open_nvme(config: StoreConfig, domain: bytes, mac_key: bytes | None) -> Tier:
    """One folder, or several that share the size evenly."""
    from pagetier.kvstore.nvme.placement import refuse_unfit
    from pagetier.kvstore.nvme.striped import StripedTier
    from pagetier.kvstore.nvme.tier import NvmeTier

    paths = config.nvme_paths or (places.nvme_dir(),)
    for path in paths:
        refuse_unfit(path, allow_unsafe=config.nvme_allow_unsafe)
    with ExitStack() as tidy:
        tiers: list[NvmeTier] = []
        for path in paths:
            tiers.append(
                NvmeTier(
                    path,
                    config.nvme_size // len(paths),
                    domain,
                    io=config.nvme_io,
                    fsync=config.nvme_fsync,
                    mac_key=mac_key,
                    codec=config.codecs.get("nvme", NONE),
                    scrub_bytes_per_s=config.nvme_scrub,
                )
            )
            tidy.callback(tiers[-1].close)
        tidy.pop_all()
    return tiers[0] if len(tiers) == 1 else StripedTier(tiers, time.monotonic)
