"""One simulated process: a store over real tiers on a simulated disk and Redis, and the books that its client keeps.

`Assembly` is how it is put together; a planted bug is an assembly with one piece replaced.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pagetier.kvstore.block import BlockName, BlockStatus
from pagetier.kvstore.config import StoreLimits
from pagetier.kvstore.host import HostTier
from pagetier.kvstore.job import Completion, LoadDone, LoadQuiesced, LookupDone, PutDone
from pagetier.kvstore.keeper import PinKeeper, PinShares
from pagetier.kvstore.nvme.crash_fs import CrashFS
from pagetier.kvstore.nvme.fault_fs import FaultFS
from pagetier.kvstore.nvme.files import Files
from pagetier.kvstore.nvme.striped import StripedTier
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.pins import Pin
from pagetier.kvstore.port import TierPort
from pagetier.kvstore.redis.faults import FaultSockets, SocketFaults
from pagetier.kvstore.redis.simulated import SimulatedSockets
from pagetier.kvstore.redis.sockets import Sockets
from pagetier.kvstore.redis.tier import RedisTier
from pagetier.kvstore.sim.evidence import promised, whole_records
from pagetier.kvstore.sim.ledger import PART, PAYLOAD_BYTES, SPOILT, Destinations, domain, domain_of, identity, payload
from pagetier.kvstore.sim.machine import Machine, Violation
from pagetier.kvstore.sim.scenario import Settings
from pagetier.kvstore.store import TieredStore
from pagetier.kvstore.tier import Tier

PATHS = (Path("/nvme"), Path("/nvme-b"))  # the second only where `num_folders` says so
CAPACITY_BYTES = 256 << 10
HOST_BLOCKS = 6
BUDGET_S = 1.0
WARMUP_BYTES = 4 * PAYLOAD_BYTES
MAX_QUIET = 8  # loads whose buffers are watched after they ended
LIMITS = StoreLimits(
    piece_bytes=2 * PAYLOAD_BYTES,
    large_piece_bytes=2 * PAYLOAD_BYTES,
    put_piece_bytes=2 * PAYLOAD_BYTES,
    put_queue_bytes=10 * PAYLOAD_BYTES,
    floor_bytes_per_s=float("inf"),
    close_s=0.0,
)
ENDED = {BlockStatus.OK, BlockStatus.MISS, BlockStatus.CORRUPT, BlockStatus.TIMEOUT, BlockStatus.ERROR}
STORED = {BlockStatus.OK, BlockStatus.EXISTS, BlockStatus.DROPPED, BlockStatus.TIMEOUT, BlockStatus.ERROR}


class SimulatedNvmeTier(NvmeTier):
    """The cap, which costs a walk over the folder, is not checked between events: the machine watches it at every
    operation.
    """

    def check(self) -> None:
        self._index.check()
        self._catalog.check()


class Assembly:
    """The store's own pieces, as `open_store` puts them together."""

    name = "sound"

    def host(self, machine: Machine) -> HostTier:
        return HostTier(HOST_BLOCKS * 4096, slab_bytes=HOST_BLOCKS * 4096, clock=machine.now_s)

    def nvme(self, files: Files, settings: Settings, version: int, folder: int = 0) -> NvmeTier:
        return SimulatedNvmeTier(
            PATHS[folder],
            CAPACITY_BYTES,
            domain(version),
            io="buffered",
            fsync=settings.fsync,
            segment_bytes=settings.segment_bytes,
            files=files,
            refresh_s=0,
            codec=settings.codec,
        )

    def redis(self, sockets: Sockets, settings: Settings, version: int) -> RedisTier:
        url = "redis://sim:6379"
        return RedisTier(url, domain(version), sockets=sockets, refresh_interval_s=3.0, codec=settings.codec)

    def store(self, process: Process, tiers: Sequence[Tier]) -> TieredStore:
        return TieredStore(
            tiers,
            part=PART,
            payload_bytes=PAYLOAD_BYTES,
            domain=domain(process.version),
            second_touch=process.machine.settings.second_touch,
            load_budget_s=BUDGET_S,
            limits=LIMITS,
            clock=process.machine.now_s,
            make_executor=lambda name, threads: process.machine.scheduler.make_executor(process, name, threads),
        )

    def keeper(self, ports: Sequence[TierPort], machine: Machine) -> PinKeeper:
        return PinKeeper(ports, PART, PAYLOAD_BYTES, PinShares(), machine.now_s)


@dataclass(frozen=True, slots=True)
class Asked:
    """A lookup: what for, under which weights; once answered, what was found and in which tier."""

    names: tuple[BlockName, ...]
    domain: bytes
    tiers: Mapping[BlockName, str] = field(default_factory=dict)


class Process:
    """A process that lives from its making to `kill` or `close`. Implements `scheduler.Host`.

    The client that drives it keeps what was asked and what must come of it; `note` holds every answer against that.
    """

    def __init__(self, machine: Machine, assembly: Assembly, number: int, version: int) -> None:
        self.machine, self.number, self.version = machine, number, version
        self.is_dead = False
        self.num_running = 0
        self.kill_in: int | None = None  # operations till it is killed
        self.fs = CrashFS(machine.disk)
        self.fs.on_operation = self._on_operation
        self.files = FaultFS(self.fs, seed=machine.draw())
        self.faults = SocketFaults(rng=random.Random(machine.draw()))
        settings = machine.settings
        self.host = assembly.host(machine) if settings.has_host else None
        self.folders = [assembly.nvme(self.files, settings, version)]
        if settings.num_folders == 1:
            self.nvme: NvmeTier | StripedTier = self.folders[0]
        else:
            self.folders.append(assembly.nvme(self.files, settings, version, folder=1))
            self.nvme = StripedTier(self.folders, machine.now_s, in_turn=True)
        self.redis: RedisTier | None = None
        if machine.redis is not None:
            sockets = SimulatedSockets({"sim:6379": machine.redis}, machine.now_s, self._sleep)
            self.redis = assembly.redis(FaultSockets(sockets, self.faults), settings, version)
        below: list[Tier | None] = [self.redis, self.nvme] if settings.is_redis_first else [self.nvme, self.redis]
        tiers = [self.host, *below]
        self.store = assembly.store(self, [tier for tier in tiers if tier is not None])
        self.store.warm_up(WARMUP_BYTES)
        machine.scheduler.add(self, self.turn)
        self._is_refreshing = self._is_renewing = False
        self.pins: list[Pin] = []
        self.keeper = assembly.keeper(self.store._ports, machine)
        self.asked: dict[int, Asked] = {}
        self.hits: dict[int, Asked] = {}
        self.loads: dict[int, tuple[int, Destinations]] = {}
        self.late: dict[int, Destinations] = {}
        self.puts: dict[int, list[bytearray]] = {}
        self.quiet: list[Destinations] = []
        self.crashes: list[BaseException] = []

    # -- for the scheduler ---------------------------------------------------------------------------------------------

    def may_run(self, *, writes: bool) -> bool:
        for nvme in self.folders:
            catalog_lock, handles_lock = nvme._catalog.lock, nvme._handles._lock
            if catalog_lock._is_owned() or handles_lock.locked():  # type: ignore[attr-defined]
                return False
        return not (writes and self.is_writing)

    @property
    def is_writing(self) -> bool:
        """Whether somebody writes to NVMe."""
        return any(nvme._write_lock.locked() for nvme in self.folders)

    # -- what it has on the disk ---------------------------------------------------------------------------------------

    def holds(self, address: bytes) -> bool:
        return any(nvme._index.contains(address) for nvme in self.folders)

    def held(self) -> list[bytes]:
        """Addresses of all that it offers."""
        return sorted({address for nvme in self.folders for address, _ in nvme._index.places()})

    def promised(self, *, only_synced: bool = False) -> set[bytes]:
        """As in `evidence`, of all folders; nothing while it is being made."""
        disk, folders = self.machine.disk, getattr(self, "folders", ())
        return {one for nvme in folders for one in promised(nvme, disk, only_synced=only_synced)}

    def note_crash(self, error: BaseException) -> None:
        self.crashes.append(error)

    def _on_operation(self, op: str) -> None:
        self.machine.on_operation(self, op)

    def _sleep(self, seconds: float) -> None:
        self.fs.sleep(seconds)

    # -- what its client does ------------------------------------------------------------------------------------------

    def put(self, names: Sequence[BlockName], payloads: Sequence[bytes] | None = None) -> None:
        if payloads is None:
            payloads = [payload(name.key) for name in names]
        sources = [bytearray(data) for data in payloads]
        self.puts[self.store.submit_put(names, [memoryview(source) for source in sources])] = sources

    def lookup(self, names: Sequence[BlockName]) -> None:
        self.asked[self.store.submit_lookup(names)] = Asked(tuple(names), domain(self.version))

    def load(self, ticket: int, first: int, end: int) -> None:
        names = self.hits[ticket].names[first:end]
        destinations = Destinations(names)
        self.loads[self.store.submit_load(ticket, names, destinations.views())] = ticket, destinations

    def release(self, ticket: int) -> None:
        self.store.release(ticket)
        self.asked.pop(ticket, None)
        self.hits.pop(ticket, None)

    def update_weights(self, version: int) -> None:
        self.version = version
        self.store.set_identity(identity(version))

    def kill(self) -> None:
        """kill -9: what it offered from segments of its own is on the disk, or it had no right to."""
        lost = self.promised() - on_disk(self.machine)
        if lost and not self.machine.may_be_corrupt("nvme"):
            self.machine.violate(f"{len(lost)} records were offered by a process and are not on the disk at its death")
        self.fs.kill()

    def give_back_memory(self) -> None:
        """The host tier's memory is real: the death of a simulated process does not free it."""
        if self.host is not None:
            with suppress(BufferError):  # a task that never ends holds a view
                self.host.close()

    def poll(self) -> None:
        for completion in self.store.poll():
            self._note(completion)

    def turn(self) -> None:
        """What its other threads do besides tasks."""
        if self.pins and self.machine.rng.random() < 0.2:
            self.renew_pins()
            return
        which = self.machine.rng.random()
        if which < 0.2 and self.host is not None:
            self.warm_up()
        elif which < 0.8:
            self.poll()
        else:
            self.refresh()

    def warm_up(self) -> None:
        """A step of what the store's own thread does after a start."""
        if self.store.warmup is not None:
            self._alone(self.store.warmup.step)

    def refresh(self) -> None:
        """What the tier's own thread does now and then."""
        if not self.is_writing:
            self._alone(self.nvme.refresh)

    def _alone(self, turn: Callable[[], object]) -> None:
        """A turn of a thread of its own; only one is under way at a time."""
        if self._is_refreshing:
            return
        self._is_refreshing = True
        self.num_running += 1
        try:
            turn()
        finally:
            self.num_running -= 1
            self._is_refreshing = False

    # -- what people do ------------------------------------------------------------------------------------------------

    def pin(self, names: Sequence[BlockName]) -> None:
        self.pins.append(Pin(domain(self.version), tuple(names)))
        self.renew_pins()

    def unpin(self, rank: int | None = None) -> None:
        """One pin, or all."""
        self.pins = [] if rank is None else [*self.pins[:rank], *self.pins[rank + 1 :]]
        self.renew_pins()

    def renew_pins(self) -> None:
        """What a thread of the store's does every few seconds."""
        if self._is_renewing or self.is_writing:
            return
        self._is_renewing = True
        self.num_running += 1
        try:
            own = domain(self.version)
            self.keeper.renew([pin for pin in self.pins if pin.domain == own])
        finally:
            self.num_running -= 1
            self._is_renewing = False

    def purge(self, names: Sequence[BlockName] | None) -> None:
        """These blocks of the present weights, or all."""
        self.machine.is_taken = True
        self.num_running += 1
        try:
            self.store.admin.purge(keys=None if names is None else {name.key for name in names})
        finally:
            self.num_running -= 1

    # -- what is checked -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The store's invariants and the client's, between two events."""
        for error in self.crashes:
            raise Violation(f"a task raised {error!r}") from error
        self.store.check()
        for destinations in self.quiet:
            if not destinations.is_spoilt:
                raise Violation("a destination was written after its load quiesced")
        if self.pins and not (self.machine.is_forged or self.machine.is_taken):
            self._check_pins()
        for tier in (self.host, self.nvme, self.redis):
            may_be = tier is not None and self.machine.may_be_corrupt(tier.name)
            may_be |= tier is self.nvme and self.machine.is_condemned
            if tier is not None and tier.counters().corrupt and not may_be:
                raise Violation(f"{tier.name} found a corrupt record, and nothing had damaged any")

    def _check_pins(self) -> None:
        for held in self.keeper._held.values():
            if held.lease is not None and self.host is not None:
                addresses = [address for address, _ in held.lease.held]
                if self.host.lookup(addresses, 0.0) != len(addresses):
                    raise Violation("a block that somebody pinned left the host tier")

    def check_idle(self) -> None:
        """When nothing is under way and all tickets are released, nothing is held."""
        if self.loads or self.late or self.puts or self.asked:
            raise Violation("answers are missing: " + str([*self.asked, *self.loads, *self.late, *self.puts]))
        if self.pins:
            self.unpin()
        if self.host is not None and self.host.num_pinned:
            raise Violation(f"{self.host.num_pinned} pins are left in the host tier")
        counters = self.store.counters()
        if counters["tickets"] or counters["loads"] or counters["queued_put_bytes"]:
            raise Violation(f"the store still holds {counters}")

    def _note(self, completion: Completion) -> None:
        if isinstance(completion, LookupDone):
            asked = self.asked.pop(completion.ticket)  # KeyError: released, or answered twice
            found = dict(zip(asked.names, completion.tiers, strict=False))
            self.hits[completion.ticket] = Asked(tuple(found), asked.domain, found)
        elif isinstance(completion, LoadDone):
            self._note_load(completion)
        elif isinstance(completion, LoadQuiesced):
            self._spoil(self.late.pop(completion.job))
        elif isinstance(completion, PutDone):
            sources = self.puts.pop(completion.job)
            if len(completion.statuses) != len(sources) or not STORED.issuperset(completion.statuses):
                raise Violation(f"a put of {len(sources)} blocks ended with {completion.statuses}")
            for source in sources:
                source[:] = SPOILT

    def _note_load(self, done: LoadDone) -> None:
        ticket, destinations = self.loads.pop(done.job)
        names = destinations.names
        if len(done.statuses) != len(names) or not ENDED.issuperset(done.statuses):
            raise Violation(f"a load of {len(names)} blocks ended with {done.statuses}")
        held = self.hits.get(ticket)  # None once it is released
        for name, buffer, status, tier in zip(names, destinations.buffers, done.statuses, done.tiers, strict=True):
            if status is BlockStatus.OK and buffer != payload(name.key):
                raise Violation(f"wrong bytes for block {name.position // 4} of a chain, from {done.tiers}")
            if held is None:
                continue
            # the host tier goes by names alone: the root in a name is its domain's
            if tier not in (None, "host") and domain_of(name) != held.domain:
                raise Violation("a block of former weights was loaded")
            pinned = held.tiers.get(name) == "host" and not (self.machine.is_forged or self.machine.is_taken)
            if pinned and status is BlockStatus.MISS:
                raise Violation("a block that a lookup pinned was gone when it was loaded")
        if done.quiesced:
            self._spoil(destinations)
        else:
            self.late[done.job] = destinations

    def _spoil(self, destinations: Destinations) -> None:
        destinations.spoil()
        self.quiet = [*self.quiet[-MAX_QUIET:], destinations]


def on_disk(machine: Machine) -> set[bytes]:
    """Addresses of all records that are whole in the tier's folders."""
    return {one for path in PATHS for one in whole_records(machine.disk, str(path))}
