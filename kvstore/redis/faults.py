"""What a network does to connections, put in at the socket seam over real or simulated sockets.

Deterministic: a fault comes by its ordinal or from a seeded generator. Knows bytes, not RESP: error replies are the
server's (`simulated.ERROR_REPLIES`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pagetier.kvstore.redis.sockets import Endpoint, Sockets, Stream


class SocketFault(StrEnum):
    """What befalls one connect, send or receive."""

    REFUSE = "refuse"  # connect: nobody listens
    STALL = "stall"  # nothing more comes on this connection, whatever is waited
    LATE = "late"  # nothing comes until the deadline; it comes then: whoever reads on takes it for the next answer
    CUT = "cut"  # some of the bytes pass, then the connection is reset
    GARBAGE = "garbage"  # receive: one byte of what arrives is another


OF_CONNECT = (SocketFault.REFUSE, SocketFault.LATE)
OF_SEND = (SocketFault.STALL, SocketFault.CUT)
OF_RECEIVE = (SocketFault.STALL, SocketFault.LATE, SocketFault.CUT, SocketFault.GARBAGE)


@dataclass(slots=True)
class SocketFaults:
    """What goes wrong, changed at will by the test that owns it.

    connects, sends, receives: fault by ordinal since the sockets were made, from 0. rate, rng: each of them fails with
    this probability, by a kind that `rng` draws. down: nobody listens and open connections are reset. silent: every
    receive stalls until it is false again. delay_s: every receive takes that long before it begins.
    """

    connects: dict[int, SocketFault] = field(default_factory=dict)
    sends: dict[int, SocketFault] = field(default_factory=dict)
    receives: dict[int, SocketFault] = field(default_factory=dict)
    rate: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    down: bool = False
    silent: bool = False
    delay_s: float = 0.0
    num_connects: int = 0
    num_sends: int = 0
    num_receives: int = 0

    def of_connect(self) -> SocketFault | None:
        self.num_connects += 1
        return SocketFault.REFUSE if self.down else self._draw(self.connects, self.num_connects - 1, OF_CONNECT)

    def of_send(self) -> SocketFault | None:
        self.num_sends += 1
        return self._draw(self.sends, self.num_sends - 1, OF_SEND)

    def of_receive(self) -> SocketFault | None:
        self.num_receives += 1
        return self._draw(self.receives, self.num_receives - 1, OF_RECEIVE)

    def _draw(self, planned: dict[int, SocketFault], ordinal: int, kinds: Sequence[SocketFault]) -> SocketFault | None:
        fault = planned.get(ordinal)
        if fault is None and self.rate and self.rng.random() < self.rate:
            fault = self.rng.choice(kinds)
        return fault


class FaultSockets(Sockets):
    """`inner`, with faults and its clock."""

    def __init__(self, inner: Sockets, faults: SocketFaults) -> None:
        self._inner, self.faults = inner, faults

    def connect(self, endpoint: Endpoint, deadline_s: float) -> Stream:
        fault = self.faults.of_connect()
        if fault is SocketFault.REFUSE:
            raise ConnectionRefusedError(f"nobody listens at {endpoint}")
        if fault is not None:
            self.sleep(max(deadline_s - self.now_s(), 0.0))
            raise TimeoutError("no connection in time")
        return FaultStream(self._inner.connect(endpoint, deadline_s), self.faults, self)

    def now_s(self) -> float:
        return self._inner.now_s()

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


class FaultStream:
    """One connection with faults. Implements `Stream`."""

    def __init__(self, inner: Stream, faults: SocketFaults, sockets: Sockets) -> None:
        """`sockets`: for their clock."""
        self._inner, self._faults, self._sockets = inner, faults, sockets
        self._is_silent = False
        self._is_reset = False

    def send(self, buffers: Sequence[memoryview], deadline_s: float) -> None:
        self._check()
        fault = self._faults.of_send()
        if fault is SocketFault.CUT:
            data = b"".join(buffers)
            self._inner.send([memoryview(data)[: self._faults.rng.randrange(len(data) + 1)]], deadline_s)
            self._reset()
        if fault is not None:
            self._is_silent = True  # the peer does not read: nothing of this arrives
            return
        self._inner.send(buffers, deadline_s)

    def receive(self, destination: memoryview, deadline_s: float, *, whole: bool) -> int:
        self._check()
        faults = self._faults
        if faults.delay_s:
            self._wait(min(deadline_s, self._sockets.now_s() + faults.delay_s))
        fault = faults.of_receive()
        self._is_silent |= fault is SocketFault.STALL
        if self._is_silent or faults.silent or fault is SocketFault.LATE:
            self._wait(deadline_s)
            raise TimeoutError("no answer in time")
        if fault is SocketFault.CUT and not faults.rng.randrange(4):
            self._reset()
        num_bytes = self._inner.receive(destination, deadline_s, whole=whole)
        if fault is SocketFault.CUT:
            self._is_reset = True
            return faults.rng.randrange(num_bytes) + 1 if num_bytes else 0
        if fault is SocketFault.GARBAGE and num_bytes:
            destination[faults.rng.randrange(num_bytes)] ^= faults.rng.randrange(1, 256)
        return num_bytes

    def is_quiet(self) -> bool:
        return not self._is_reset and not self._faults.down and self._inner.is_quiet()

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()

    def _wait(self, until_s: float) -> None:
        self._sockets.sleep(max(until_s - self._sockets.now_s(), 0.0))

    def _check(self) -> None:
        if self._is_reset or self._faults.down:
            self._reset()

    def _reset(self) -> None:
        self._is_reset = True
        raise ConnectionResetError("the connection was reset")
