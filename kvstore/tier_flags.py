"""The flags of the tiers below the device that `pagetier serve` and `pagetier store` have in common."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from pagetier.kvstore.config import CODEC_HELP, EMBEDDED, WARMUP_HELP, default_redis_url, parse_paths, parse_size

TIERS = "KV tiers below the device"

NVME_PATH_HELP = "Folder, or several disks' folders as /a,/b, which share the size; default: nvme in the cache folder."
NVME_FSYNC_HELP = (
    "What a power cut may cost. always: nothing that was stored; segment: the segment being written; none: what the "
    "kernel had not written yet. A killed process loses nothing with any of them."
)
REDIS_URL_HELP = (
    "redis://host:port/db, unix:///path, redis+sentinel://host:port,…/service, redis+cluster://host:port,…, rediss… "
    f"for TLS, or {EMBEDDED}; default: $REDIS_URL, else {EMBEDDED}."
)


def tier_option(*names: str, text: str, **more: Any) -> Any:
    """An option in the panel of the tiers."""
    return typer.Option(*names, rich_help_panel=TIERS, help=text, **more)


@dataclass(frozen=True, slots=True)
class TierFlags:
    """One field per flag; each is the field of `StoreConfig` of nearly the same name."""

    kv_nvme_path: Annotated[str | None, tier_option("--kv-nvme-path", text=NVME_PATH_HELP)] = None
    kv_nvme_size: Annotated[str, tier_option("--kv-nvme-size", text="Cap, e.g. 20GiB.")] = "20GiB"
    kv_nvme_io: Annotated[str, tier_option("--kv-nvme-io", text="auto, direct or buffered.")] = "auto"
    kv_nvme_fsync: Annotated[str, tier_option("--kv-nvme-fsync", text=NVME_FSYNC_HELP)] = "segment"
    kv_nvme_scrub: Annotated[
        str, tier_option("--kv-nvme-scrub", text="Bytes a second re-read to find damage, e.g. 4MiB; 0: none.")
    ] = "0"
    kv_nvme_allow_unsafe: Annotated[
        bool, tier_option("--kv-nvme-allow-unsafe", text="Take a path in memory, or one all may write to.")
    ] = False
    kv_redis_url: Annotated[str | None, tier_option("--kv-redis-url", text=REDIS_URL_HELP)] = None
    kv_redis_size: Annotated[str, tier_option("--kv-redis-size", text="Of the embedded server.")] = "4GiB"
    kv_redis_ttl: Annotated[int, tier_option("--kv-redis-ttl", text="Seconds a block lives unused.")] = 86_400
    kv_redis_linger: Annotated[
        float, tier_option("--kv-redis-linger", text="Seconds the embedded server outlives its last user.")
    ] = 600.0
    kv_codec: Annotated[str, tier_option("--kv-codec", text=CODEC_HELP)] = ""
    kv_warmup: Annotated[str, tier_option("--kv-warmup", text=WARMUP_HELP)] = "0"
    kv_load_budget_ms: Annotated[
        float, tier_option("--kv-load-budget-ms", text="A request's longest wait for tiers.")
    ] = 1000.0
    kv_mac_key: Annotated[
        Path | None,
        tier_option("--kv-mac-key", text="File with a secret that NVMe and Redis records are authenticated with."),
    ] = None

    def store_fields(self) -> dict[str, Any]:
        """The fields of `StoreConfig` that these are. Raises ConfigError."""
        return {
            "nvme_path": Path(",".join(map(str, parse_paths(self.kv_nvme_path)))) if self.kv_nvme_path else None,
            "nvme_size": parse_size(self.kv_nvme_size, "--kv-nvme-size"),
            "nvme_io": self.kv_nvme_io,
            "nvme_fsync": self.kv_nvme_fsync,
            "nvme_scrub": parse_size(self.kv_nvme_scrub, "--kv-nvme-scrub"),
            "nvme_allow_unsafe": self.kv_nvme_allow_unsafe,
            "redis_url": self.kv_redis_url or default_redis_url(),
            "redis_size": parse_size(self.kv_redis_size, "--kv-redis-size"),
            "redis_ttl_s": self.kv_redis_ttl,
            "redis_linger_s": self.kv_redis_linger,
            "codec": self.kv_codec,
            "warmup": parse_size(self.kv_warmup, "--kv-warmup"),
            "load_budget_s": self.kv_load_budget_ms / 1e3,
            "mac_key_file": None if self.kv_mac_key is None else self.kv_mac_key.expanduser().absolute(),
        }
