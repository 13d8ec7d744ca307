"""A whole Redis in memory behind the socket seam: byte-exact RESP2, no threads of its own, a clock of the caller's.

For deterministic simulation and tests; it ships, as the memory tier does. Everything happens inside the client's own
calls, from any thread: a command is carried out when its last byte is sent, its reply is there `latency_s` later. What
a real server does when it is stopped, killed, full or asked in a wrong moment it does, too; what a network does is
`faults.py`'s.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from pagetier.kvstore.redis.simulated_data import OK, SimulatedData, array, bulk, integer, wrong_arity
from pagetier.kvstore.redis.sockets import Endpoint, Sockets, Stream

NO_PASSWORD = (
    b"-ERR AUTH <password> called without any password configured for the default user."
    b" Are you sure your configuration is correct?\r\n"
)
# Every error reply that a tier has to live with, as Valkey 9.1 words it.
ERROR_REPLIES = {
    "ASK": b"-ASK 3999 127.0.0.1:6381\r\n",
    "BUSY": b"-BUSY Valkey is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.\r\n",
    "CLUSTERDOWN": b"-CLUSTERDOWN The cluster is down\r\n",
    "ERR": b"-ERR max number of clients reached\r\n",
    "LOADING": b"-LOADING Valkey is loading the dataset in memory\r\n",
    "MASTERDOWN": b"-MASTERDOWN Link with PRIMARY is down and replica-serve-stale-data is set to 'no'.\r\n",
    "MISCONF": b"-MISCONF Valkey is configured to save RDB snapshots, but is currently unable to persist to disk.\r\n",
    "MOVED": b"-MOVED 3999 127.0.0.1:6381\r\n",
    "NOAUTH": b"-NOAUTH Authentication required.\r\n",
    "NOPERM": b"-NOPERM User default has no permissions to run the command\r\n",
    "NOREPLICAS": b"-NOREPLICAS Not enough good replicas to write.\r\n",
    "OOM": b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
    "READONLY": b"-READONLY You can't write against a read only replica.\r\n",
    "TRYAGAIN": b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n",
    "WRONGPASS": b"-WRONGPASS invalid username-password pair or user is disabled.\r\n",
}

Refuse = Callable[[Sequence[bytes]], bytes | None]


class SimulatedRedis:
    """One server.

    clock: seconds. password: "" for none. refuse: the error reply to a command instead of its doing, or None; called
    for each. latency_s: until a reply is there, or is asked for it.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        maxmemory: int = 0,
        policy: str = "noeviction",
        password: str = "",
        seed: int = 0,
    ) -> None:
        self.data = SimulatedData(clock, maxmemory=maxmemory, policy=policy, seed=seed)
        self.password = password
        self.refuse: Refuse = lambda command: None
        self.latency_s = 0.0
        self.num_commands = 0
        self.is_running = True
        self._clock, self._rng = clock, random.Random(seed)
        self._run_id = self._rng.randbytes(20).hex()
        self._lock = threading.RLock()
        self._is_frozen = False  # guarded by self._lock, as all below
        self._connections: list[_Connection] = []
        self._num_clients = 0

    # -- what befalls a server -----------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """SIGSTOP: it accepts connections and bytes, and says nothing."""
        with self._lock:
            self._is_frozen = True

    def thaw(self) -> None:
        """SIGCONT: it does now what it was sent meanwhile, also on connections that were closed since."""
        with self._lock:
            self._is_frozen = False
            for connection in list(self._connections):
                self._work(connection)

    def kill(self) -> None:
        """kill -9: connections are reset, memory is gone."""
        with self._lock:
            self.is_running = self._is_frozen = False
            for connection in self._connections:
                connection.is_reset = True
            self._connections.clear()

    def start(self) -> None:
        """After `kill`: comes back empty, under another run id."""
        with self._lock:
            self.is_running = True
            self._run_id = self._rng.randbytes(20).hex()
            self.data.clear()

    # -- for SimulatedSockets ------------------------------------------------------------------------------------------

    def accept(self) -> _Connection:
        """Raises ConnectionRefusedError when it does not run."""
        with self._lock:
            if not self.is_running:
                raise ConnectionRefusedError("nobody listens")
            self._num_clients += 1
            connection = _Connection(self._num_clients, is_known=not self.password)
            self._connections.append(connection)
            return connection

    def feed(self, connection: _Connection, data: bytes | memoryview) -> None:
        """Bytes from a client."""
        with self._lock:
            connection.inbox += data
            self._work(connection)

    def hang_up(self, connection: _Connection) -> None:
        """The client closed its end. A server that is stopped will still do what it was sent."""
        with self._lock:
            connection.is_left = True
            self._work(connection)

    def _work(self, connection: _Connection) -> None:
        """Needs the lock."""
        if self._is_frozen or not self.is_running:
            return
        at = 0
        while not connection.has_ended:
            try:
                parsed = parse_command(connection.inbox, at)
            except ValueError as error:
                self._answer(connection, b"-ERR Protocol error: %b\r\n" % str(error).encode("latin-1"))
                connection.has_ended = True
                break
            if parsed is None:
                break
            command, at = parsed
            if command:
                self.num_commands += 1
                self._answer(connection, self.refuse(command) or self._do(connection, command))
        del connection.inbox[:at]
        if connection.is_left and connection in self._connections:
            self._connections.remove(connection)

    def _answer(self, connection: _Connection, reply: bytes) -> None:
        connection.outbox.append((self._clock() + self.latency_s, memoryview(reply)))

    # -- commands that are not about data ------------------------------------------------------------------------------

    def _do(self, connection: _Connection, command: list[bytes]) -> bytes:
        verb, *arguments = command
        if verb.upper() == b"AUTH":
            return self._auth(connection, arguments)
        if not connection.is_known:
            return ERROR_REPLIES["NOAUTH"]
        reply = self.data.execute(connection.database, command)
        return self._say(connection, verb, arguments) if reply is None else reply

    def _auth(self, connection: _Connection, arguments: list[bytes]) -> bytes:
        if len(arguments) not in (1, 2):
            return wrong_arity(b"AUTH") if not arguments else b"-ERR syntax error\r\n"
        if len(arguments) == 1 and not self.password:
            return NO_PASSWORD
        user, password = arguments if len(arguments) == 2 else (b"default", arguments[0])
        if user != b"default" or (self.password and password != self.password.encode()):
            return ERROR_REPLIES["WRONGPASS"]
        connection.is_known = True
        return OK

    def _say(self, connection: _Connection, word: bytes, arguments: list[bytes]) -> bytes:
        verb = word.upper()
        if verb == b"PING" and len(arguments) < 2:
            return bulk(arguments[0]) if arguments else b"+PONG\r\n"
        if verb == b"ECHO" and len(arguments) == 1:
            return bulk(arguments[0])
        if verb == b"SELECT" and len(arguments) == 1:
            return self._select(connection, arguments[0])
        if verb == b"INFO":
            return bulk(f"run_id:{self._run_id}\r\n{self.data.info()}".encode())
        if verb == b"ROLE" and not arguments:
            return array((bulk(b"master"), integer(0), array(())))
        if verb == b"CLIENT" and arguments and arguments[0].upper() in (b"SETNAME", b"SETINFO"):
            return OK
        if verb == b"CLIENT" and [word.upper() for word in arguments] == [b"ID"]:
            return integer(connection.number)
        if verb in (b"CLUSTER", b"ASKING"):
            return b"-ERR This instance has cluster support disabled\r\n"
        if verb in (b"PING", b"ECHO", b"SELECT", b"ROLE", b"CLIENT"):
            return wrong_arity(verb)
        shown = b"".join(b"'%b' " % argument for argument in arguments)
        return b"-ERR unknown command '%b', with args beginning with: %b\r\n" % (word, shown)

    def _select(self, connection: _Connection, digits: bytes) -> bytes:
        if not digits.isdigit():
            return b"-ERR value is not an integer or out of range\r\n"
        if int(digits) >= 16:
            return b"-ERR DB index is out of range\r\n"
        connection.database = int(digits)
        return OK


class SimulatedSockets(Sockets):
    """A network of simulated servers by `str(endpoint)`; whatever else is asked for refuses connections.

    clock and sleep: seconds; `sleep` must let at least that much pass on the clock, and may let a server change.
    """

    def __init__(
        self,
        servers: Mapping[str, SimulatedRedis],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._servers, self._clock, self._sleep = dict(servers), clock, sleep

    def connect(self, endpoint: Endpoint, deadline_s: float) -> Stream:
        server = self._servers.get(str(endpoint))
        if self._clock() >= deadline_s:
            raise TimeoutError("the deadline has passed")
        if server is None:
            raise ConnectionRefusedError(f"nobody listens at {endpoint}")
        return SimulatedStream(server, self)

    def now_s(self) -> float:
        return self._clock()

    def sleep(self, seconds: float) -> None:
        self._sleep(seconds)


class SimulatedStream:
    """A client's end of a connection to a simulated server. Implements `Stream`."""

    def __init__(self, server: SimulatedRedis, sockets: Sockets) -> None:
        """`sockets`: for their clock. Raises ConnectionRefusedError."""
        self._server, self._sockets = server, sockets
        self._connection = server.accept()
        self._is_closed = False

    def send(self, buffers: Sequence[memoryview], deadline_s: float) -> None:
        self._check(deadline_s)
        for buffer in buffers:
            self._server.feed(self._connection, buffer)

    def receive(self, destination: memoryview, deadline_s: float, *, whole: bool) -> int:
        while True:
            self._check(deadline_s)
            outbox = self._connection.outbox
            if outbox and outbox[0][0] <= self._sockets.now_s():
                return self._take(destination)
            if not outbox and self._connection.has_ended:
                return 0
            until_s = min(outbox[0][0], deadline_s) if outbox else deadline_s
            self._sockets.sleep(until_s - self._sockets.now_s())

    def _take(self, destination: memoryview) -> int:
        num_bytes, outbox = 0, self._connection.outbox
        while outbox and outbox[0][0] <= self._sockets.now_s() and num_bytes < destination.nbytes:
            ready_s, piece = outbox.popleft()
            step = min(piece.nbytes, destination.nbytes - num_bytes)
            destination[num_bytes : num_bytes + step] = piece[:step]
            num_bytes += step
            if step < piece.nbytes:
                outbox.appendleft((ready_s, piece[step:]))
        return num_bytes

    def is_quiet(self) -> bool:
        connection = self._connection
        return not (self._is_closed or connection.is_reset or connection.has_ended or connection.outbox)

    def abort(self) -> None:
        self._connection.is_reset = True

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._server.hang_up(self._connection)

    def _check(self, deadline_s: float) -> None:
        if self._is_closed or self._connection.is_reset:
            raise ConnectionResetError("the connection was reset")
        if self._sockets.now_s() >= deadline_s:
            raise TimeoutError("no answer in time")


class _Connection:
    """What a server knows of a client."""

    def __init__(self, number: int, is_known: bool) -> None:
        self.number, self.is_known = number, is_known
        self.database = 0
        self.inbox = bytearray()
        self.outbox: deque[tuple[float, memoryview]] = deque()  # when it is there, and what
        self.has_ended = False  # by the server, behind what is in the outbox
        self.is_reset = False
        self.is_left = False  # by the client


def seeded_refusals(rng: random.Random, rate: float) -> Refuse:
    """Error replies out of nowhere, with this probability each."""
    replies = list(ERROR_REPLIES.values())
    return lambda command: rng.choice(replies) if rng.random() < rate else None


def parse_command(data: bytearray, at: int) -> tuple[list[bytes], int] | None:
    """The command that starts at `at` and where it ends; None when it is not whole. Raises ValueError as Valkey words
    it."""
    head = _line(data, at)
    if head is None:
        return None
    line, at = head
    if line[:1] != b"*":
        return line.split(), at  # inline, without quotes
    try:
        num_words = int(line[1:])
    except ValueError:
        raise ValueError("invalid multibulk length") from None
    words: list[bytes] = []
    for _ in range(num_words):
        head = _line(data, at)
        if head is None:
            return None
        line, at = head
        if line[:1] != b"$":
            raise ValueError(f"expected '$', got '{line[:1].decode('latin-1')}'")
        if not line[1:].isdigit():
            raise ValueError("invalid bulk length")
        end = at + int(line[1:])
        if len(data) < end + 2:
            return None
        words.append(bytes(memoryview(data)[at:end]))
        at = end + 2
    return words, at


def _line(data: bytearray, at: int) -> tuple[bytes, int] | None:
    end = data.find(b"\r\n", at)
    return None if end < 0 else (bytes(memoryview(data)[at:end]), end + 2)
