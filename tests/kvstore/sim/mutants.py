"""Planted bugs: each is the store with one piece replaced at a seam. The simulation has to find every one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pagetier.kvstore.block import Address, BlockStatus
from pagetier.kvstore.host import HostTier
from pagetier.kvstore.identity import CacheIdentity
from pagetier.kvstore.job import Completion, LoadDone, LoadQuiesced
from pagetier.kvstore.keeper import PinKeeper
from pagetier.kvstore.nvme.catalog import Catalog
from pagetier.kvstore.nvme.fault_fs import FaultFS
from pagetier.kvstore.nvme.files import Files, write_full
from pagetier.kvstore.nvme.folder import Folder
from pagetier.kvstore.nvme.handles import Segment
from pagetier.kvstore.nvme.index import Place
from pagetier.kvstore.nvme.log import Pending, SegmentLog
from pagetier.kvstore.nvme.overlap import Piece
from pagetier.kvstore.nvme.reader import Reader, Wanted
from pagetier.kvstore.nvme.segment import COMMIT_AT, Commit, LoadedSegment, data_start, walk_headers
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.port import TierPort
from pagetier.kvstore.puts import PutQueue, QueuedPut
from pagetier.kvstore.record import PAGE_BYTES, RecordStatus, mismatched_fields, parse_header, verify
from pagetier.kvstore.redis.sockets import Endpoint, Sockets, Stream
from pagetier.kvstore.redis.tier import RedisTier
from pagetier.kvstore.residents import Lease
from pagetier.kvstore.sim.machine import Machine
from pagetier.kvstore.sim.process import HOST_BLOCKS, Assembly, Process
from pagetier.kvstore.sim.scenario import Settings
from pagetier.kvstore.store import TieredStore
from pagetier.kvstore.tier import Tier


class LogMutant(Assembly):
    """Another writing end."""

    log: type[SegmentLog]

    def nvme(self, files: Files, settings: Settings, version: int, folder: int = 0) -> NvmeTier:
        tier = super().nvme(files, settings, version, folder)
        tier._log.__class__ = self.log
        return tier


class ReaderMutant(Assembly):
    """Another reading end."""

    reader: type[Reader]

    def nvme(self, files: Files, settings: Settings, version: int, folder: int = 0) -> NvmeTier:
        tier = super().nvme(files, settings, version, folder)
        tier._reader.__class__ = self.reader
        return tier


class FilesMutant(Assembly):
    """Another way to use files."""

    def wrapped(self, files: Files) -> Files:
        raise NotImplementedError

    def nvme(self, files: Files, settings: Settings, version: int, folder: int = 0) -> NvmeTier:
        return super().nvme(self.wrapped(files), settings, version, folder)


class PublishBeforeWrite(LogMutant):
    name = "publish before write"

    class log(SegmentLog):  # noqa: N801
        def append(self, records: Sequence[Pending]) -> None:
            segment = self._open
            assert segment is not None
            at = segment.end
            for record in records:
                place = Place(segment.ident, at // PAGE_BYTES, record.payload.nbytes)
                self._index.add(record.address, record.parent, place)
                at += record.nbytes
            super().append(records)


class CommitBeforeWrite(LogMutant):
    name = "commit block before the bytes"

    class log(SegmentLog):  # noqa: N801
        def _write(self, segment: Segment, fd: int, pieces: Iterator[Piece], direct: bool) -> None:
            made = list(pieces)
            buffers, offset = made[-1]
            end = offset + sum(len(memoryview(buffer).cast("B")) for buffer in buffers)
            write_full(self._files, fd, [Commit(False, len(self._entries) + 1, end).pack()], COMMIT_AT)
            super()._write(segment, fd, iter(made), direct)


class ForgetToEvict(Assembly):
    name = "forget to evict before write"

    class folder(Folder):  # noqa: N801
        def working_bytes(self) -> int:
            return 0

    def nvme(self, files: Files, settings: Settings, version: int, folder: int = 0) -> NvmeTier:
        tier = super().nvme(files, settings, version, folder)
        tier._folder.__class__ = self.folder
        return tier


class SkipTokens(ReaderMutant):
    name = "skip the token comparison"

    class reader(Reader):  # noqa: N801
        def _judge(self, segment: Segment, record: Wanted, page: memoryview) -> BlockStatus:
            header = parse_header(page)
            if header is not None and header.name.key == record.read.name.key:
                whole = verify(page, record.read.destination, header.domain, header.name, header.part)
                if whole is RecordStatus.OK and header.domain == record.domain:
                    return BlockStatus.OK
            return super()._judge(segment, record, page)


class SkipDomain(ReaderMutant):
    name = "skip the domain comparison"

    class reader(Reader):  # noqa: N801
        def _judge(self, segment: Segment, record: Wanted, page: memoryview) -> BlockStatus:
            header = parse_header(page)
            domain = record.domain if header is None else header.domain
            return super()._judge(segment, replace(record, domain=domain), page)


class SkipChecksum(ReaderMutant):
    name = "skip the checksum"

    class reader(Reader):  # noqa: N801
        def _judge(self, segment: Segment, record: Wanted, page: memoryview) -> BlockStatus:
            header, read = parse_header(page), record.read
            size = read.destination.nbytes
            if header is not None and not mismatched_fields(header, record.domain, read.name, read.part, size):
                return BlockStatus.OK
            return super()._judge(segment, record, page)


class TrustTornHeaders(Assembly):
    name = "recovery trusts headers behind the commit mark"

    class catalog(Catalog):  # noqa: N801
        def _take(self, path: Path, loaded: LoadedSegment) -> tuple[Segment, LoadedSegment] | None:
            if loaded.commit is not None and not loaded.commit.closed:
                fd = self._files.open(path, 0)
                try:
                    start = data_start(loaded.size)
                    loaded.entries, loaded.end = walk_headers(self._files, fd, start, loaded.stat.st_size)
                finally:
                    self._files.close(fd)
            return super()._take(path, loaded)

    def nvme(self, files: Files, settings: Settings, version: int, folder: int = 0) -> NvmeTier:
        catalog = self.catalog

        class MutantTier(NvmeTier):
            def _attach(self) -> bool:
                self._catalog.__class__ = catalog
                return super()._attach()

        tier = super().nvme(files, settings, version, folder)
        tier._catalog.__class__ = catalog
        tier._catalog.clear()
        tier.refresh()
        return tier


class IgnoreShortReads(FilesMutant):
    name = "ignore a short read"

    class files(FaultFS):  # noqa: N801
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            super().preadv(fd, buffers, offset)
            return sum(buffer.nbytes for buffer in buffers)

    def wrapped(self, files: Files) -> Files:
        return self.files(files)


class SkipSync(FilesMutant):
    name = "answer before the sync"

    class files(FaultFS):  # noqa: N801
        def sync(self, fd: int) -> None:
            pass

    def wrapped(self, files: Files) -> Files:
        return self.files(files)


class IgnoreLock(FilesMutant):
    name = "two writers of one folder"

    class files(FaultFS):  # noqa: N801
        def lock(self, fd: int) -> bool:
            super().lock(fd)
            return True

    def wrapped(self, files: Files) -> Files:
        return self.files(files)


class FreeDuringPut(Assembly):
    name = "free during put"

    class queue(PutQueue):  # noqa: N801
        def offer(self, puts: Sequence[QueuedPut]) -> None:
            super().offer([replace(put, job=None) for put in puts])
            for put in puts:
                put.settle(BlockStatus.OK)

    def store(self, process: Process, tiers: Sequence[Tier]) -> TieredStore:
        store = super().store(process, tiers)
        for queue in store._queues:
            queue.__class__ = self.queue
        return store


class QuiesceEarly(Assembly):
    name = "a load that ran out of time counts as quiesced"

    class made(TieredStore):  # noqa: N801
        def poll(self) -> list[Completion]:
            return [
                replace(done, quiesced=True) if isinstance(done, LoadDone) else done
                for done in super().poll()
                if not isinstance(done, LoadQuiesced)
            ]

    def store(self, process: Process, tiers: Sequence[Tier]) -> TieredStore:
        store = super().store(process, tiers)
        store.__class__ = self.made
        return store


class KeepDomain(Assembly):
    name = "new weights, old domain"

    class made(TieredStore):  # noqa: N801
        def set_identity(self, identity: CacheIdentity) -> None:
            self.put_identity(identity.domain(), identity.encode())

    def store(self, process: Process, tiers: Sequence[Tier]) -> TieredStore:
        store = super().store(process, tiers)
        store.__class__ = self.made
        return store


class LeakPins(Assembly):
    name = "pin not released"

    class tier(HostTier):  # noqa: N801
        def unpin(self, lease: Lease) -> None:
            super().unpin(Lease(lease.held[1:]))

    def host(self, machine: Machine) -> HostTier:
        return self.tier(HOST_BLOCKS * 4096, slab_bytes=HOST_BLOCKS * 4096, clock=machine.now_s)


class PinNothing(Assembly):
    name = "a pin holds nothing"

    class tier(HostTier):  # noqa: N801
        def pin(self, addresses: Sequence[Address]) -> Lease:
            lease = super().pin(addresses)
            held = list(lease.held)
            self.unpin(lease)
            return Lease(held)

    def host(self, machine: Machine) -> HostTier:
        return self.tier(HOST_BLOCKS * 4096, slab_bytes=HOST_BLOCKS * 4096, clock=machine.now_s)


class KeepUnpinned(Assembly):
    name = "what a user unpins stays held"

    class made(PinKeeper):  # noqa: N801
        def _let_go(self, which: tuple[str, str]) -> None:
            del self._held[which]

    def keeper(self, ports: Sequence[TierPort], machine: Machine) -> PinKeeper:
        keeper = super().keeper(ports, machine)
        keeper.__class__ = self.made
        return keeper


class ReuseConnections(Assembly):
    name = "reuse a timed-out connection"

    def redis(self, sockets: Sockets, settings: Settings, version: int) -> RedisTier:
        return super().redis(ReusingSockets(sockets), settings, version)


class ReusingSockets(Sockets):
    def __init__(self, inner: Sockets) -> None:
        self._inner = inner
        self.left: list[Stream] = []

    def connect(self, endpoint: Endpoint, deadline_s: float) -> Stream:
        if self.left:
            return KeptStream(self.left.pop(), self)
        return KeptStream(self._inner.connect(endpoint, deadline_s), self)

    def now_s(self) -> float:
        return self._inner.now_s()

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


class KeptStream:
    """Implements `Stream`; one that is closed is kept for the next connection, unless the peer is gone."""

    def __init__(self, inner: Stream, sockets: ReusingSockets) -> None:
        self._inner, self._sockets = inner, sockets
        self._is_lost = self._is_closed = False

    def send(self, buffers: Sequence[memoryview], deadline_s: float) -> None:
        try:
            self._inner.send(buffers, deadline_s)
        except ConnectionError:
            self._is_lost = True
            raise

    def receive(self, destination: memoryview, deadline_s: float, *, whole: bool) -> int:
        try:
            return self._inner.receive(destination, deadline_s, whole=whole)
        except ConnectionError:
            self._is_lost = True
            raise

    def is_quiet(self) -> bool:
        return True

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._is_lost:
                self._inner.close()
            else:
                self._sockets.left.append(self._inner)


MUTANTS: tuple[Assembly, ...] = (
    PublishBeforeWrite(),
    CommitBeforeWrite(),
    ForgetToEvict(),
    SkipTokens(),
    SkipDomain(),
    SkipChecksum(),
    TrustTornHeaders(),
    IgnoreShortReads(),
    SkipSync(),
    IgnoreLock(),
    FreeDuringPut(),
    QuiesceEarly(),
    KeepDomain(),
    LeakPins(),
    PinNothing(),
    KeepUnpinned(),
    ReuseConnections(),
)
