"""What the simulated processes share: disk, clock, Redis, scheduler; and what is known of damage done to them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from pagetier.kvstore.nvme.crash_fs import CrashFS, Killed
from pagetier.kvstore.nvme.disk import BLOCK_BYTES, SECTOR_BYTES, START_NS, Disk
from pagetier.kvstore.redis.simulated import SimulatedRedis
from pagetier.kvstore.sim.scenario import Settings
from pagetier.kvstore.sim.scheduler import Scheduler

REDIS_BYTES = 60_000  # some 30 records
TORN_SECTORS = (0, 1, 8, 8, 9, 10, 16, 24, 25)  # of a write that a kill cuts: headers take eight, payloads three
STEPS_NS = (0, 20_000, 200_000, 5_000_000)  # what one operation takes


class Violation(AssertionError):
    """The store broke a promise."""


class Owner(Protocol):
    """Who makes an operation: a process."""

    fs: CrashFS
    kill_in: int | None

    def kill(self) -> None:
        """It ends now."""


class Machine:
    """Owns no process. `capacity_bytes`: what the tier may take of the disk."""

    def __init__(self, settings: Settings, capacity_bytes: int) -> None:
        self.settings = settings
        self.scheduler = Scheduler()
        self.disk = Disk(seed=settings.seed, reuses_numbers=settings.reuses_inodes)
        self.redis: SimulatedRedis | None = None
        if settings.has_redis:
            self.redis = SimulatedRedis(self.now_s, maxmemory=REDIS_BYTES, policy="allkeys-lru", seed=settings.seed)
            self.redis.latency_s = 0.0005
        self.is_forged = self.is_flipped = self.is_cut = self.had_read_errors = self.had_garbage = False
        self.is_taken = False  # somebody purged blocks, or condemned them: they may be missing though pinned
        self.is_condemned = False  # the latter: NVMe counts them as corrupt
        self.num_operations = 0
        self.power_cut_in: int | None = None  # operations till the power goes
        self.cut_power: Callable[[], None]  # set by who knows the processes
        self.is_over_cap_allowed = False  # from a power cut, which may bring back what was removed, to the next start
        self.is_removed = False  # somebody removed files that are still open: their blocks are nobody's to free
        self.violations: list[str] = []
        self._capacity_bytes = capacity_bytes

    def now_s(self) -> float:
        return (self.disk.now_ns - START_NS) / 1e9

    def wait(self, seconds: float) -> None:
        self.disk.now_ns += int(seconds * 1e9)

    def draw(self) -> int:
        """A seed for something that is made now."""
        return self.scheduler.rng.getrandbits(32)

    @property
    def rng(self) -> random.Random:
        return self.scheduler.rng

    def may_be_corrupt(self, tier: str) -> bool:
        """Whether something happened that damages records, or makes them unreadable."""
        if self.is_forged:
            return True
        return self.had_garbage if tier == "redis" else self.is_flipped or self.is_cut or self.had_read_errors

    def on_operation(self, owner: Owner, op: str) -> None:
        """Before every operation of a process on the disk or while it waits for a socket."""
        self.num_operations += 1
        self.disk.now_ns += STEPS_NS[int(self.rng.random() * 3.1)]
        self.check_cap()
        if self.power_cut_in is not None:
            self.power_cut_in -= 1
            if self.power_cut_in <= 0:
                self.cut_power()
        elif owner.kill_in is not None:
            owner.kill_in -= 1
            if owner.kill_in <= 0 and op == "pwritev" and self.rng.random() < 0.7:
                owner.fs.dies_after = self.rng.choice(TORN_SECTORS) * SECTOR_BYTES
            elif owner.kill_in <= 0:
                owner.kill()
        self.scheduler.let_others_run()
        if owner.fs.is_killed:
            raise Killed(op)

    def check_cap(self) -> None:
        used = self.disk.used_bytes - BLOCK_BYTES  # less the disk's own root
        if used > self._capacity_bytes and not (self.is_over_cap_allowed or self.is_removed):
            self.violate(f"{used} bytes are taken of {self._capacity_bytes}")

    def violate(self, what: str) -> None:
        """Note a broken promise. Not raised here: the store would take it for a fault of its medium."""
        self.violations.append(what)
