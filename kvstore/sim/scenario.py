"""What happens in a run: settings and a list of events, all drawn from one seed. Data only.

Every event carries a seed of its own for what it draws, so that leaving out some changes the others little: that is
what makes a failing run shrink.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from pagetier.kvstore.codec import NONE, PLANES_ZSTD

MIN_EVENTS, MAX_EVENTS = 32, 46
FSYNC = ("none", "segment", "segment", "always")
SEGMENT_BYTES = (40 << 10, 64 << 10, 64 << 10)  # three and six records

# What clients do, in every run.
CLIENT = {
    "put": 24,
    "request": 20,
    "lookup": 6,
    "load": 8,
    "twins": 4,
    "release": 6,
    "touch": 4,
    "work": 22,
    "poll": 4,
    "wait": 3,
    "start": 2,
    "restart": 2,
    "update_weights": 2,
}
KILLS = {"kill": 10, "start": 4}
CRASHES = {"kill": 5, "power_cut": 6, "start": 4}
FILE_FAULTS = {"file_faults": 6, "disk_full": 2, "vanish": 1, "well": 4, "wait": 4}
REDIS_STOPS = {"redis_stops": 6, "redis_restarts": 2, "redis_refuses": 2, "well": 6, "wait": 4}
REDIS_FAULTS = REDIS_STOPS | {"redis_faults": 4}
# Beside all that, in some runs: what people and the engine's own checks ask for, and a server that answers too late.
EXTRA = {"pin": 4, "unpin": 2, "purge": 1, "quarantine": 2, "redis_stalls": 2}
EXTRA_SHARE, MAX_EXTRA_EVENTS = 0.3, 8
MALICE = {"load_stale": 3, "forge": 3, "flip": 3, "remove_tree": 1}
PROFILES: tuple[dict[str, int], ...] = (
    {},
    KILLS,
    CRASHES,
    FILE_FAULTS,
    REDIS_STOPS,
    REDIS_FAULTS,
    CRASHES | FILE_FAULTS,
    CRASHES | MALICE,
    CRASHES | FILE_FAULTS | REDIS_FAULTS | MALICE,
)


@dataclass(frozen=True, slots=True)
class Settings:
    """seed: of the disk and the server. is_redis_first: Redis stands above NVMe in the hierarchy. reuses_inodes: a
    removed file's number goes to the next one. codec: of what processes write to their tiers. num_folders: of the NVMe
    tier. second_touch: tiers that are given blocks on their second use.
    """

    seed: int
    fsync: str
    segment_bytes: int
    has_host: bool
    has_redis: bool
    is_redis_first: bool
    max_processes: int
    reuses_inodes: bool
    codec: int
    num_folders: int
    second_touch: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """kind: names a method of `events.Events`."""

    kind: str
    seed: int


@dataclass(frozen=True, slots=True)
class Scenario:
    settings: Settings
    events: tuple[Event, ...]


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    profile = PROFILES[rng.randrange(len(PROFILES))]
    settings = Settings(
        seed=seed,
        fsync=rng.choice(FSYNC),
        segment_bytes=rng.choice(SEGMENT_BYTES),
        has_host=rng.random() < 0.3,
        has_redis=rng.random() < 0.4 or "redis_stops" in profile,
        is_redis_first=rng.random() < 0.4,
        max_processes=rng.choice((1, 2, 2)),
        reuses_inodes=rng.random() < 0.5,
        codec=PLANES_ZSTD if seed % 4 == 3 else NONE,
        num_folders=2 if seed % 8 in (3, 4) else 1,
    )
    weights = {kind: CLIENT.get(kind, 0) + profile.get(kind, 0) for kind in CLIENT | profile}
    kinds = rng.choices(list(weights), list(weights.values()), k=rng.randint(MIN_EVENTS, MAX_EVENTS))
    return _with_extra(Scenario(settings, tuple(Event(kind, rng.getrandbits(48)) for kind in kinds)))


def _with_extra(scenario: Scenario) -> Scenario:
    """Some runs get more events in between, drawn apart: all others are what they were without."""
    rng = random.Random(f"between {scenario.settings.seed}")
    if rng.random() >= EXTRA_SHARE:
        return scenario
    events = list(scenario.events)
    for kind in rng.choices(list(EXTRA), list(EXTRA.values()), k=rng.randint(2, MAX_EXTRA_EVENTS)):
        events.insert(rng.randint(4, len(events)), Event(kind, rng.getrandbits(48)))
    second_touch = rng.choice(((), (), ("nvme",), ("redis",)))
    return Scenario(replace(scenario.settings, second_touch=second_touch), tuple(events))
