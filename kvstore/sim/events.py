"""What can happen: a method per kind of event, over the processes that live now."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from pagetier.kvstore.block import BlockName, BlockStatus
from pagetier.kvstore.nvme.crash_fs import Killed
from pagetier.kvstore.nvme.fault_fs import FileFault
from pagetier.kvstore.redis.simulated import seeded_refusals
from pagetier.kvstore.sim.ledger import (
    NUM_CHAINS,
    NUM_VERSIONS,
    PART,
    PAYLOAD_BYTES,
    SPOILT,
    blocks_by_address,
    chains,
    forged,
    payload,
)
from pagetier.kvstore.sim.machine import Machine, Violation
from pagetier.kvstore.sim.process import CAPACITY_BYTES, PATHS, Assembly, Process, on_disk
from pagetier.kvstore.sim.scenario import Settings
from pagetier.kvstore.tier import BlockRead

MAX_DRAIN_STEPS = 4000
MAX_TICKETS = 4
HARMLESS = (FileFault.SHORT, FileFault.DELAY, FileFault.ENOSPC)
MIN_FREE_BYTES = 16 << 10


class Events:
    """The processes and what befalls them. Each event uses `machine.rng`, which the caller seeds for it."""

    def __init__(self, settings: Settings, assembly: Assembly) -> None:
        self.machine = Machine(settings, CAPACITY_BYTES * settings.num_folders)
        self.machine.cut_power = self._cut_power
        self.assembly = assembly
        self.processes: list[Process] = []
        self._number = self._version = 0
        self._ever_faulty: set[int] = set()  # numbers of processes that met file faults

    def do(self, kind: str) -> None:
        """One event, then all checks."""
        verb: Callable[[], None] = getattr(self, kind)
        try:
            if not self.processes and kind not in ("start", "power_cut"):
                self.start()
            verb()
        except Killed:
            pass  # whoever was killed is found below
        self._bury()
        self.machine.check_cap()
        for what in self.machine.violations:
            raise Violation(what)
        for process in self.processes:
            process.check()

    @property
    def rng(self) -> random.Random:
        return self.machine.rng

    # -- clients -------------------------------------------------------------------------------------------------------

    def put(self) -> None:
        process = self._one()
        names = self._chain(process.version)
        first = self.rng.randrange(3) if self.rng.random() < 0.3 else 0
        process.put(names[first : first + self.rng.randint(1, len(names))])
        self._work(self.rng.randrange(6))

    def lookup(self) -> None:
        process = self._one()
        if len(process.asked) + len(process.hits) < MAX_TICKETS:
            process.lookup(self._chain(process.version))
        self._work(self.rng.randrange(3))

    def load_stale(self) -> None:
        """Somebody asks for blocks of the former weights: nothing may come of it."""
        process = self._one()
        self.machine.is_forged = True  # a block of another domain counts as damage
        if process.version and len(process.asked) + len(process.hits) < MAX_TICKETS:
            process.lookup(self._chain(process.version - 1))
            self._settle(process)
            self._load_last(process)

    def request(self) -> None:
        """What most requests do: without it few runs would get as far as a load."""
        process = self._one()
        names = self._chain(process.version)
        if self.rng.random() < 0.6:
            process.put(names)
            self._settle(process)
        if not process.is_dead and len(process.asked) + len(process.hits) < MAX_TICKETS:
            process.lookup(names)
            self._settle(process)
            self._load_last(process)

    def load(self) -> None:
        process = self._one()
        if process.hits:
            ticket = self.rng.choice(sorted(process.hits))
            num_blocks = len(process.hits[ticket].names)
            first = self.rng.randrange(num_blocks) if num_blocks and self.rng.random() < 0.3 else 0
            process.load(ticket, first, num_blocks)
            self._work(self.rng.randrange(5))

    def twins(self) -> None:
        """Two load the same blocks at the same time."""
        process = self._one()
        if process.hits:
            ticket = self.rng.choice(sorted(process.hits))
            num_blocks = len(process.hits[ticket].names)
            process.load(ticket, 0, num_blocks)
            self._work(self.rng.randrange(2))
            if not process.fs.is_killed:
                process.load(ticket, 0, num_blocks)
            self._work(self.rng.randrange(5))

    def release(self) -> None:
        process = self._one()
        tickets = sorted([*process.asked, *process.hits])
        if tickets:
            process.release(self.rng.choice(tickets))

    def touch(self) -> None:
        process = self._one()
        process.store.touch(self._chain(process.version))

    def poll(self) -> None:
        self._one().poll()

    def work(self) -> None:
        self._work(self.rng.randrange(1, 16))

    def wait(self) -> None:
        self.machine.wait(self.rng.choice((0.01, 0.3, 1.5, 40.0)))
        self._one().poll()

    def update_weights(self) -> None:
        """In place, in one process: the others follow later or never."""
        process = self._one()
        self._version = min(self._version + 1, NUM_VERSIONS - 1)
        process.update_weights(self._version)

    # -- people --------------------------------------------------------------------------------------------------------

    def pin(self) -> None:
        process = self._one()
        names = self._chain(process.version)
        process.pin(names[: self.rng.randint(1, len(names))])

    def unpin(self) -> None:
        process = self._one()
        if process.pins:
            process.unpin(self.rng.randrange(len(process.pins)))

    def purge(self) -> None:
        process = self._one()
        process.purge(self._chain(process.version)[self.rng.randrange(3) :] if self.rng.random() < 0.7 else None)
        self._work(self.rng.randrange(6))

    def quarantine(self) -> None:
        """The engine found that these are not what it computes."""
        process = self._one()
        self.machine.is_taken = self.machine.is_condemned = True
        names = self._chain(process.version)
        process.store.quarantine(names[: self.rng.randint(1, len(names))])
        self._work(self.rng.randrange(6))

    # -- processes -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Another process on the same path, at times while others work, at times without."""
        self._bury()
        if len(self.processes) >= self.machine.settings.max_processes:
            return
        scheduler = self.machine.scheduler
        scheduler.is_off = is_alone = self.rng.random() < 0.5
        there = on_disk(self.machine) if is_alone else set()
        try:
            process = self._start()
        finally:
            scheduler.is_off = False
        missing = [address for address in there if not process.holds(address)]
        is_free = self.machine.disk.capacity_bytes is None and not process.nvme.counters().evictions
        if missing and is_free:
            raise Violation(f"a start left out {len(missing)} of {len(there)} whole records")

    def restart(self) -> None:
        """One process ends in order and comes back: everything it offered is there."""
        process = self._one()
        self._recover_all()
        self._drain(process)
        scheduler, machine = self.machine.scheduler, self.machine
        scheduler.is_off = True
        try:
            process.refresh()
            kept = self._outliving(process)
            version, num_condemned = process.version, process.nvme.counters().corrupt
            self._close(process)
            # The last copies to another tier read records: those that are not what they claim to be are condemned.
            num_condemned = process.nvme.counters().corrupt - num_condemned
            gone = kept - on_disk(machine)
            if len(gone) > num_condemned:
                raise Violation(f"{len(gone)} records went with the end of a process, {num_condemned} were condemned")
            kept -= gone
            again = self._start(version)
            missing = [address for address in kept if not again.holds(address)]
            if missing:
                raise Violation(f"{len(missing)} of {len(kept)} records were lost by a restart in order")
            if not machine.is_forged:  # a start may list the torn one of two copies that a power cut left
                self._read_back(again, sorted(kept), strict=not (machine.is_flipped or machine.is_cut))
        finally:
            scheduler.is_off = False

    def kill(self) -> None:
        """kill -9, now or in the middle of something."""
        process = self._one()
        process.kill_in = int(self.rng.random() ** 2 * 60)
        if not process.kill_in:
            process.kill()
        self._work(self.rng.randrange(8))

    def power_cut(self) -> None:
        self.machine.power_cut_in = int(self.rng.random() ** 2 * 60)
        if not self.machine.power_cut_in:
            self._cut_power()
        self._work(self.rng.randrange(8))

    # -- faults --------------------------------------------------------------------------------------------------------

    def file_faults(self) -> None:
        process = self._one()
        files = process.files
        files.rate, files.delay_s = self.rng.choice((0.02, 0.1, 0.4)), self.rng.choice((0.01, 0.4, 2.0))
        files.kinds = HARMLESS if self.rng.random() < 0.5 else tuple(FileFault)
        self.machine.had_read_errors |= FileFault.EIO in files.kinds
        self._ever_faulty.add(process.number)

    def disk_full(self) -> None:
        """Others filled the disk."""
        disk = self.machine.disk
        disk.capacity_bytes = disk.used_bytes + self.rng.randrange(2) * MIN_FREE_BYTES
        self._ever_faulty.update(process.number for process in self.processes)

    def vanish(self) -> None:
        process = self._one()
        process.files.vanish()
        self.machine.had_read_errors = True
        self._ever_faulty.add(process.number)

    def well(self) -> None:
        self._recover_all()

    def remove_tree(self) -> None:
        """Somebody cleans up below the tier's feet."""
        path = PATHS[0]
        if str(path) in self.machine.disk.folders:
            self.machine.is_removed = True
            folders = [folder for folder in self.machine.disk.folders if folder.startswith(str(path))]
            self.machine.disk.remove_tree(path.joinpath(self.rng.choice(sorted(folders))))

    def flip(self) -> None:
        """Bit rot."""
        disk = self.machine.disk
        if str(PATHS[0]) in disk.folders and (paths := disk.paths_below(PATHS[0])):
            path = self.rng.choice(paths)
            for _ in range(self.rng.randint(1, 8)):
                disk.flip(path, self.rng.randrange(65536))
            self.machine.is_flipped = True

    def forge(self) -> None:
        """Somebody stores other tokens under a right key."""
        process = self._one()
        self.machine.is_forged = True
        names = [forged(name) for name in self._chain(process.version)[:2]]
        process.put(names, [SPOILT] * len(names))
        self._work(self.rng.randrange(6))

    def redis_faults(self) -> None:
        faults = self._one().faults
        faults.rate, faults.delay_s = self.rng.choice((0.02, 0.1, 0.4)), self.rng.choice((0.0, 0.0, 0.1, 2.0))
        self.machine.had_garbage |= self._one().redis is not None

    def redis_stops(self) -> None:
        if self.machine.redis is not None:
            if self.rng.random() < 0.5:
                self.machine.redis.freeze()
            else:
                self.machine.redis.kill()

    def redis_restarts(self) -> None:
        if self.machine.redis is not None:
            self.machine.redis.kill()
            self.machine.redis.start()

    def redis_refuses(self) -> None:
        if self.machine.redis is not None:
            self.machine.redis.refuse = seeded_refusals(
                random.Random(self.machine.draw()), self.rng.choice((0.05, 0.3, 1.0))
            )

    def redis_stalls(self) -> None:
        """It says nothing for longer than anybody waits, and then all of it."""
        process, redis = self._one(), self.machine.redis
        if redis is None or not redis.is_running or len(process.asked) + len(process.hits) >= MAX_TICKETS - 1:
            return
        redis.freeze()
        process.lookup(self._chain(process.version))
        for ticket in sorted(process.hits)[:1]:
            process.load(ticket, 0, len(process.hits[ticket].names))
        self._work(self.rng.randrange(4))
        self.machine.wait(1.5)
        self._work(self.rng.randrange(4))
        redis.thaw()
        if not process.fs.is_killed:
            process.poll()
            process.lookup(self._chain(process.version))
            self._settle(process)
            self._load_last(process)

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """All faults end; every answer comes, nothing is held, and whatever is found is right."""
        self._recover_all()
        for process in list(self.processes):
            self._drain(process)
        self._bury()
        for process in list(self.processes):
            if self.rng.random() < 0.5 and not self.machine.is_forged:
                self._read_back(process, process.held(), strict=False)
        if self.processes:
            self.restart()
        self.machine.scheduler.is_off = True
        for process in list(self.processes):
            self._drain(process)
            self._close(process)

    def close(self) -> None:
        """Give back the real memory of whoever is left after a finding."""
        for process in self.processes:
            process.give_back_memory()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _one(self) -> Process:
        self._bury()
        if not self.processes:
            return self._start()
        return self.processes[self.rng.randrange(len(self.processes))]

    def _chain(self, version: int) -> Sequence[BlockName]:
        return chains(version)[self.rng.randrange(NUM_CHAINS)]

    def _start(self, version: int | None = None) -> Process:
        self._number += 1
        process = Process(self.machine, self.assembly, self._number, self._version if version is None else version)
        self.processes.append(process)
        self.machine.is_over_cap_allowed &= not all(nvme._attached for nvme in process.folders)
        return process

    def _close(self, process: Process) -> None:
        process.store.close()
        process.poll()
        if process.fs.num_open:
            raise Violation(f"{process.fs.num_open} descriptors are left after close")
        process.fs.kill()
        process.is_dead = True
        self.machine.scheduler.forget(process)
        self.processes.remove(process)

    def _work(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if not self.machine.scheduler.step():
                break

    def _settle(self, process: Process) -> None:
        """Let things happen, and the process hear of it."""
        for _ in range(self.rng.randint(2, 14)):
            if not self.machine.scheduler.step():
                break
        if not process.fs.is_killed:
            process.poll()

    def _load_last(self, process: Process) -> None:
        if process.fs.is_killed or not process.hits:
            return
        ticket = max(process.hits)
        process.load(ticket, 0, len(process.hits[ticket].names))
        self._work(self.rng.randrange(12))
        if not process.fs.is_killed and self.rng.random() < 0.7:
            process.poll()
            process.release(ticket)

    def _drain(self, process: Process) -> None:
        """Everything it was asked is answered, and its tickets are given back."""
        for _ in range(MAX_DRAIN_STEPS):
            if process.fs.is_killed:
                return
            process.poll()
            if not process.store.has_work:
                break
            if not self.machine.scheduler.step():
                self.machine.wait(0.05)
        for ticket in sorted([*process.asked, *process.hits]):
            process.release(ticket)
        process.poll()
        process.check_idle()

    def _recover_all(self) -> None:
        """Every fault ends, and those to come."""
        machine = self.machine
        machine.disk.capacity_bytes = machine.power_cut_in = None
        for process in self.processes:
            process.files.well()
            process.faults.rate = process.faults.delay_s = 0.0
            process.kill_in = process.fs.dies_after = None
        if machine.redis is not None:
            machine.redis.refuse = lambda command: None
            machine.redis.thaw()
            if not machine.redis.is_running:
                machine.redis.start()

    def _cut_power(self) -> None:
        """All processes end, and the disk keeps what it must: what was synced."""
        machine, disk = self.machine, self.machine.disk
        machine.power_cut_in = None
        kept: set[bytes] = set()
        for process in self.processes:
            is_between = not process.num_running or machine.settings.fsync == "always"
            if machine.settings.fsync != "none" and process.number not in self._ever_faulty and is_between:
                kept |= process.promised(only_synced=True)
        for process in self.processes:
            process.fs.kill()
        disk.power_cut()
        machine.is_cut = machine.is_over_cap_allowed = True
        lost = kept - on_disk(machine)
        if lost and not machine.is_flipped:
            machine.violate(f"{len(lost)} of {len(kept)} synced records were lost by a power cut")

    def _bury(self) -> None:
        """Processes that were killed leave; what they offered is still on the disk."""
        for process in [process for process in self.processes if process.fs.is_killed]:
            process.is_dead = True
            process.give_back_memory()
            self.machine.scheduler.forget(process)
            self.processes.remove(process)

    def _outliving(self, process: Process) -> set[bytes]:
        """What the process offers, all of it whole on the disk."""
        offered, whole = process.promised(), on_disk(self.machine)
        lost = offered - whole
        if lost and not self.machine.may_be_corrupt("nvme"):
            raise Violation(f"{len(lost)} of {len(offered)} records that the tier offers are not on the disk")
        return offered & whole

    def _read_back(self, process: Process, found: Sequence[bytes], *, strict: bool) -> None:
        """Read records past the store. strict: all are there."""
        for address in found:
            name, domain = blocks_by_address()[address]
            buffer = bytearray(PAYLOAD_BYTES)
            read = BlockRead(name, PART, memoryview(buffer), domain)
            (status,) = process.nvme.get([read], self.machine.now_s() + 60)
            if status is BlockStatus.OK and buffer != payload(name.key):
                raise Violation("wrong bytes were stored")
            if strict and status is not BlockStatus.OK:
                raise Violation(f"a record that was there before a restart in order is now {status}")
