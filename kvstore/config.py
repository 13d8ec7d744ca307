"""The store's configuration: sizes as text, one frozen object, validated here.

The only file of the store that looks at the environment for more than places.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pagetier.kvstore.codec import parse_codecs
from pagetier.kvstore.copier import Copier
from pagetier.kvstore.errors import ConfigError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
UNITS = {"": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
SIZE_ALLOWED = "a number of bytes or one with KiB, MiB, GiB or TiB, such as 4GiB"
TIERS = ("host", "nvme", "redis")
NVME_IO = ("auto", "direct", "buffered")
WRITE_POLICIES = ("through", "second-touch")
NVME_FSYNC = ("none", "segment", "always")
URL_SCHEMES = (
    *("redis://", "rediss://", "unix://"),
    *("redis+sentinel://", "rediss+sentinel://", "redis+cluster://", "rediss+cluster://"),
)
EMBEDDED = "embedded"
MIN_NVME_BYTES = 256 << 10  # of a folder
CODEC_HELP = "Lossless codec of what is written to a tier, e.g. redis=planes-zstd; default: none."
WARMUP_HELP = "Bytes of the hottest blocks that go to the host tier after a start, when idle; 0: none."
LOCAL_STORE, STORE_SCHEMES = "local", ("unix:///", "grpc://", "grpcs://")
_LOGIN_OPTION = re.compile(r"([?&][^=&]*(?:user|pass)[^=&]*=)[^&]*", re.IGNORECASE)


def parse_size(text: str | int, flag: str = "size") -> int:
    """Bytes of "4GiB", "512 MiB", "1.5GiB" or "4096". ConfigError names `flag`, the value and what is allowed."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = next((u for u in UNITS if match and u.lower() == match[2].lower()), None)
    if match is None or unit is None:
        raise ConfigError.bad_value(flag, text, SIZE_ALLOWED)
    return int(float(match[1]) * UNITS[unit]) if "." in match[1] else int(match[1]) * UNITS[unit]


def format_size(nbytes: int) -> str:
    """For people, in the largest unit that leaves at least 1, two decimals unless exact: "1.50GiB", "360KiB", "12B"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(nbytes) >= UNITS[unit]:
            value = nbytes / UNITS[unit]
            return f"{value:.0f}{unit}" if value == int(value) else f"{value:.2f}{unit}"
    return f"{nbytes}B"


def default_redis_url(environ: Mapping[str, str] = os.environ) -> str:
    """Of `--kv-redis-url`: `REDIS_URL`, else `embedded`."""
    return environ.get("REDIS_URL") or EMBEDDED


def without_login(url: str) -> str:
    """A URL fit for a message: without user and password, wherever the URL carries them."""
    before_path = r"//[^/?]*@" if url.startswith("unix:") else r"//[^?]*@"  # a password may have an unescaped slash
    return _LOGIN_OPTION.sub(r"\1…", re.sub(before_path, "//…@", url))


def parse_tiers(text: str, flag: str = "--kv-tier") -> tuple[str, ...]:
    """The names in "nvme,redis"; none for an empty text. Raises ConfigError for a comma with nothing beside it."""
    names = tuple(part.strip() for part in text.split(",")) if text.strip() else ()
    if not all(names):
        raise ConfigError.bad_value(flag, text, f"names separated by commas, of {', '.join(TIERS)}")
    return names


def parse_write_policy(text: str, flag: str = "--kv-write-policy") -> tuple[str, ...]:
    """The tiers that "nvme=through,redis=second-touch" gives blocks on their second use. Raises ConfigError."""
    policies: dict[str, str] = {}
    for part in text.split(",") if text.strip() else ():
        tier, _, policy = (word.strip() for word in part.partition("="))
        if tier not in TIERS or tier in policies:
            raise ConfigError.bad_value(flag, text, f"TIER=POLICY of {', '.join(TIERS)}, each once")
        if policy not in WRITE_POLICIES:
            raise ConfigError.unknown_name(f"{flag} {tier}", policy, WRITE_POLICIES)
        policies[tier] = policy
    return tuple(tier for tier, policy in policies.items() if policy == "second-touch")


def parse_paths(text: Path | str | None, flag: str = "--kv-nvme-path") -> tuple[Path, ...]:
    """The folders in "/a,/b", made absolute. Raises ConfigError for one that is named twice or not at all."""
    names = [] if text is None else [part.strip() for part in str(text).split(",")]
    paths = tuple(Path(name).expanduser().absolute() for name in names)
    if not all(names) or len(set(paths)) != len(paths):
        raise ConfigError.bad_value(flag, text, "a folder, or several separated by commas, each once")
    return paths


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds on what the store has under way. All have defaults that no flag sets yet.

    piece_bytes: read by one call of a tier, at least; 4 MiB is past the knee of NVMe, and small enough that a deadline
        keeps a useful front.
    large_piece_bytes: at most, in a load of many pieces: over one connection a server goes on sending while what
        came is verified (360 KiB values, two connections: 2.5 GB/s with 4 MiB, 3.3 with 16 MiB).
    put_piece_bytes: written by one call; 64 MiB, since tiers have several writes under way within a call, none between
        two.
    put_queue_bytes: waiting to be written, per tier; 256 MiB is some 700 blocks of a 135M model, a fraction of
        a second of NVMe.
    put_budget_s: for one piece to be written, beyond the time its bytes take at floor_bytes_per_s. Saves hold device
        blocks, so with a full pool the next request waits this long for a silent tier: as long as for a load, 1 s.
    floor_bytes_per_s: the slowest medium worth waiting for: a load's budget grows by its bytes over this. Infinite: the
        budget is the whole time, whatever the size.
    lookup_share: of the load budget, the most that a lookup may take.
    slow_s: a call that takes longer than this plus its bytes at the floor counts as slow for the breaker.
    close_s: how long `close` waits for threads that still move bytes.
    """

    piece_bytes: int = 4 * MIB
    large_piece_bytes: int = 16 * MIB
    put_piece_bytes: int = 64 * MIB
    put_queue_bytes: int = 256 * MIB
    put_budget_s: float = 1.0
    floor_bytes_per_s: float = 128 * MIB
    lookup_share: float = 0.25
    slow_s: float = 0.25
    close_s: float = 10.0


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """What to build a store of. Sizes in bytes; each is the `serve` flag of the same name, but for `copier`.

    tiers: lower tiers in hierarchy order, fastest first; default none. `host` may be left out: host_size adds it.
    host_size: host arena; 0, the default, leaves the tier out: NVMe and Redis read straight into a CPU's pool.
    nvme_path: None is `<cache>/nvme`; several, joined by commas, share the size evenly.
    nvme_size: 20 GiB holds some 900,000 tokens of a 135M model.
    nvme_io: auto uses O_DIRECT where the file system has it. nvme_fsync: segment, so a power cut loses one segment at
        most. nvme_allow_unsafe: take a path that everybody may write to, or that lies in memory. nvme_scrub: bytes a
        second that are re-read in the background; none, since every read is verified and a scrub only finds earlier.
    redis_url: as kvstore/redis/url.py reads it, or embedded. redis_size: the embedded server's maxmemory; 4 GiB.
    redis_ttl_s: a day, which outlives a working day's system prompts. redis_linger_s: the embedded server's life
        after its last user; 10 minutes bridge a restart.
    mac_key_file: --kv-mac-key; None: records carry a checksum, which accidents cannot pass but a forger can.
    load_budget_s: for one request's lookup and loads, beyond the time its bytes take at `limits.floor_bytes_per_s`; 1 s
        is less than the prefill that a useful hit saves.
    write_policy: "redis=second-touch" gives that tier a block when it is used for a second time; what is not named is
        written through, so that it is there after a restart.
    codec: "redis=planes-zstd" encodes what is written to that tier, without loss; read is what any codec made. None by
        default: it pays only where a link is slow or a tier too small (`pagetier bench codec`).
    warmup: bytes of the hottest blocks that are copied to the host tier after a start, while nobody needs the tiers; 0
        (the default): none.
    poison: overwrite host slots that are free; set by --paranoid.
    pins_path: the file that says what is pinned; None is `<cache>/pins/pins.msgpack`.
    store_url: a store service (`pagetier store`) to use instead of tiers of one's own; `local` is the default socket.
    copier: what moves bytes of the host tier or of a store service's memory; None: numpy.
    """

    tiers: tuple[str, ...] = ()
    host_size: int = 0
    nvme_path: Path | None = None
    nvme_size: int = 20 * GIB
    nvme_io: str = "auto"
    nvme_fsync: str = "segment"
    nvme_allow_unsafe: bool = False
    nvme_scrub: int = 0
    redis_url: str = EMBEDDED
    redis_size: int = 4 * GIB
    redis_ttl_s: int = 86_400
    redis_linger_s: float = 600.0
    mac_key_file: Path | None = None
    load_budget_s: float = 1.0
    write_policy: str = ""
    codec: str = ""
    warmup: int = 0
    poison: bool = False
    pins_path: Path | None = None
    store_url: str | None = None
    copier: Copier | None = None
    limits: StoreLimits = StoreLimits()

    @property
    def tier_names(self) -> tuple[str, ...]:
        """The lower tiers to build, in hierarchy order: `tiers`, and before them the host tier when it has a size."""
        return self.tiers if "host" in self.tiers or not self.host_size else ("host", *self.tiers)

    @property
    def second_touch(self) -> tuple[str, ...]:
        """The tiers that are given a block when it is used for a second time."""
        return parse_write_policy(self.write_policy)

    @property
    def nvme_paths(self) -> tuple[Path, ...]:
        """The folders of the NVMe tier; none: the one in the cache folder."""
        return parse_paths(self.nvme_path)

    @property
    def codecs(self) -> dict[str, int]:
        """The codecs of the tiers that have one."""
        return parse_codecs(self.codec, ("nvme", "redis"))

    def __post_init__(self) -> None:
        for tier in self.tiers:
            if tier not in TIERS:
                raise ConfigError.unknown_name("tier in --kv-tier", tier, TIERS)
        known_url = self.redis_url == EMBEDDED or self.redis_url.startswith(URL_SCHEMES)
        for flag, value, ok, allowed in (
            ("--kv-tier", ",".join(self.tiers), len(set(self.tiers)) == len(self.tiers), "each tier once"),
            ("--kv-host-size", self.host_size, self.host_size >= 0, "0 (no host tier) or more bytes"),
            ("--kv-nvme-size", self.nvme_size, self.nvme_size > 0, "more than 0 bytes"),
            ("--kv-nvme-scrub", self.nvme_scrub, self.nvme_scrub >= 0, "0 (none) or more bytes a second"),
            ("--kv-nvme-io", self.nvme_io, self.nvme_io in NVME_IO, ", ".join(NVME_IO)),
            ("--kv-nvme-fsync", self.nvme_fsync, self.nvme_fsync in NVME_FSYNC, ", ".join(NVME_FSYNC)),
            ("--kv-redis-url", without_login(self.redis_url), known_url, f"{', '.join(URL_SCHEMES)} or {EMBEDDED}"),
            ("--kv-warmup", self.warmup, self.warmup >= 0, "0 (none) or more bytes"),
            ("--kv-redis-size", self.redis_size, self.redis_size > 0, "more than 0 bytes"),
            ("--kv-redis-ttl", self.redis_ttl_s, self.redis_ttl_s >= 1, "at least 1 second"),
            ("--kv-redis-linger", self.redis_linger_s, self.redis_linger_s >= 0, "0 or more seconds"),
            (
                "--kv-load-budget-ms",
                self.load_budget_s * 1e3,
                0 < self.load_budget_s < math.inf,
                "more than 0 milliseconds",
            ),
        ):
            if not ok:
                raise ConfigError.bad_value(flag, value, allowed)
        for tier in self.second_touch:
            if tier not in self.tier_names:
                raise ConfigError.bad_value(
                    "--kv-write-policy", tier, f"tiers of --kv-tier: {', '.join(self.tier_names)}"
                )
        if missing := next((tier for tier in self.codecs if tier not in self.tiers), None):
            raise ConfigError.bad_value("--kv-codec", missing, f"tiers of --kv-tier: {', '.join(self.tiers)}")
        least = MIN_NVME_BYTES * max(1, len(self.nvme_paths))
        if self.nvme_size < least and len(self.nvme_paths) > 1:
            raise ConfigError.bad_value("--kv-nvme-size", self.nvme_size, f"at least {least} bytes for so many folders")
        if self.warmup and "host" not in self.tier_names:
            raise ConfigError("--kv-warmup fills the host tier: give --kv-host-size, such as --kv-host-size 4GiB")
        if self.store_url is not None:
            if not (self.store_url.partition("?")[0] == LOCAL_STORE or self.store_url.startswith(STORE_SCHEMES)):
                allowed = f"{LOCAL_STORE}, or an address that begins with {', '.join(STORE_SCHEMES)}"
                raise ConfigError.bad_value("--kv-store-url", self.store_url, allowed)
            if self.tiers or self.host_size:
                raise ConfigError("--kv-store-url goes without --kv-tier and --kv-host-size: the store has its own")
        if "host" in self.tiers and not self.host_size:
            raise ConfigError("--kv-tier host needs --kv-host-size, such as --kv-host-size 4GiB")
