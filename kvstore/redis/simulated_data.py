"""What a simulated Redis holds: databases with expiry and a memory limit, and the commands over them as reply bytes.

Single-threaded and deterministic by seed and clock. `tests/kvstore/test_redis_simulated.py` compares every reply with
those of a real Valkey, byte by byte. Knows no connections.
"""

from __future__ import annotations

import fnmatch
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

OVERHEAD_BYTES = 64  # of one key, about; a real server's depends on its allocator
EVICTION_SAMPLES = 5  # Redis' maxmemory-samples: the coldest of a few, so that parents may go before their children
NUM_DATABASES = 16

Command = Sequence[bytes]

OK = b"+OK\r\n"
NULL = b"$-1\r\n"
WRONGTYPE = b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"
OOM = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
NOT_AN_INTEGER = b"-ERR value is not an integer or out of range\r\n"
SYNTAX_ERROR = b"-ERR syntax error\r\n"


def bulk(value: bytes | None) -> bytes:
    return NULL if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


def integer(value: int) -> bytes:
    return b":%d\r\n" % value


def array(items: Iterable[bytes]) -> bytes:
    """Of encoded items."""
    encoded = list(items)
    return b"*%d\r\n%b" % (len(encoded), b"".join(encoded))


@dataclass(slots=True)
class _Entry:
    value: bytes | dict[bytes, bytes]
    birth: int  # where SCAN finds it
    expires_at_ms: int | None
    used: int  # recency

    def nbytes(self, key: bytes) -> int:
        value = self.value
        size = len(value) if isinstance(value, bytes) else sum(len(f) + len(v) for f, v in value.items())
        return OVERHEAD_BYTES + len(key) + size


class _Refused(Exception):
    """Ends a command with this error reply."""

    def __init__(self, reply: bytes) -> None:
        super().__init__(reply)
        self.reply = reply


class SimulatedData:
    """All databases of one server.

    maxmemory 0: unbounded. policy: `noeviction` or `allkeys-lru`. clock: seconds, for expiry.
    """

    def __init__(self, clock: Callable[[], float], *, maxmemory: int = 0, policy: str = "noeviction", seed: int = 0):
        self.maxmemory, self.policy = maxmemory, policy
        self.evictions = 0
        self._clock, self._rng = clock, random.Random(seed)
        self._databases: list[dict[bytes, _Entry]] = [{} for _ in range(NUM_DATABASES)]
        self._nbytes = self._ticks = 0
        self._verbs: dict[bytes, tuple[int, Callable[[dict[bytes, _Entry], Command], bytes]]] = {
            b"DBSIZE": (1, lambda keys, command: integer(len(self._live(keys)))),
            b"DEL": (-2, self._del),
            b"EXISTS": (-2, self._exists),
            b"FLUSHALL": (-1, lambda keys, command: self._flush(self._databases)),
            b"FLUSHDB": (-1, lambda keys, command: self._flush([keys])),
            b"GET": (2, lambda keys, command: bulk(self._string(keys, command[1]))),
            b"GETRANGE": (4, self._getrange),
            b"HDEL": (-3, self._hdel),
            b"HGET": (3, lambda keys, command: bulk(self._hash(keys, command[1]).get(command[2]))),
            b"HGETALL": (2, self._hgetall),
            b"HLEN": (2, lambda keys, command: integer(len(self._hash(keys, command[1])))),
            b"HSET": (-4, self._hset),
            b"MGET": (-2, self._mget),
            b"PERSIST": (2, self._persist),
            b"PEXPIRE": (3, self._pexpire),
            b"PTTL": (2, lambda keys, command: integer(self._pttl(keys, command[1]))),
            b"SCAN": (-2, self._scan),
            b"SET": (-3, self._set),
            b"STRLEN": (2, lambda keys, command: integer(len(self._string(keys, command[1]) or b""))),
            b"TTL": (2, self._ttl),
            b"TYPE": (2, self._type),
            b"UNLINK": (-2, self._del),
        }

    # -- for the server ------------------------------------------------------------------------------------------------

    def execute(self, database: int, command: Command) -> bytes | None:
        """The reply to `command` in a database; None for a verb that is not about data."""
        verb = command[0].upper()
        known = self._verbs.get(verb)
        if known is None:
            return None
        arity, run = known
        if len(command) != arity if arity > 0 else len(command) < -arity:
            return wrong_arity(verb)
        try:
            if verb in (b"SET", b"HSET"):
                self._make_room(sum(map(len, command)))
            return run(self._databases[database], command)
        except _Refused as refused:
            return refused.reply

    def clear(self) -> None:
        """As after a restart without persistence."""
        self._flush(self._databases)
        self.evictions = 0

    def info(self) -> str:
        """The lines of INFO about memory, evictions and the keyspace."""
        lines = [
            f"used_memory:{self._nbytes}",
            f"used_memory_dataset:{self._nbytes}",
            f"maxmemory:{self.maxmemory}",
            f"maxmemory_policy:{self.policy}",
            f"evicted_keys:{self.evictions}",
        ]
        for number, keys in enumerate(self._databases):
            if live := self._live(keys):
                expires = sum(entry.expires_at_ms is not None for entry in live.values())
                lines.append(f"db{number}:keys={len(live)},expires={expires},avg_ttl=0")
        return "".join(f"{line}\r\n" for line in lines)

    # -- for tests -----------------------------------------------------------------------------------------------------

    def keys(self, database: int = 0) -> list[bytes]:
        return list(self._live(self._databases[database]))

    def evict(self, num_keys: int) -> int:
        """Evict as the memory limit would; how many went."""
        return sum(self._evict_one() for _ in range(num_keys))

    def corrupt(self, rng: random.Random, database: int = 0) -> bytes | None:
        """Change one byte of one string; its key, None when there is none."""
        keys = self._live(self._databases[database])
        strings = [key for key, entry in keys.items() if isinstance(entry.value, bytes) and entry.value]
        if not strings:
            return None
        key = rng.choice(strings)
        value = keys[key].value
        assert isinstance(value, bytes)
        changed, at = bytearray(value), rng.randrange(len(value))
        changed[at] ^= rng.randrange(1, 256)
        keys[key].value = bytes(changed)
        return key

    def check(self) -> None:
        """Raise AssertionError when the account of bytes is wrong or past the limit."""
        nbytes = sum(entry.nbytes(key) for keys in self._databases for key, entry in keys.items())
        assert nbytes == self._nbytes, f"{nbytes} bytes, counted {self._nbytes}"
        assert not self.maxmemory or nbytes <= self.maxmemory, f"{nbytes} bytes of {self.maxmemory}"

    # -- entries -------------------------------------------------------------------------------------------------------

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    def _live(self, keys: dict[bytes, _Entry]) -> dict[bytes, _Entry]:
        """The database without what has expired."""
        now_ms = self._now_ms()
        for key in [k for k, e in keys.items() if e.expires_at_ms is not None and e.expires_at_ms <= now_ms]:
            self._remove(keys, key)
        return keys

    def _find(self, keys: dict[bytes, _Entry], key: bytes, *, use: bool = True) -> _Entry | None:
        entry = keys.get(key)
        if entry is None:
            return None
        if entry.expires_at_ms is not None and entry.expires_at_ms <= self._now_ms():
            self._remove(keys, key)
            return None
        if use:
            self._ticks += 1
            entry.used = self._ticks
        return entry

    def _string(self, keys: dict[bytes, _Entry], key: bytes) -> bytes | None:
        entry = self._find(keys, key)
        if entry is not None and not isinstance(entry.value, bytes):
            raise _Refused(WRONGTYPE)
        return None if entry is None else entry.value  # type: ignore[return-value]

    def _hash(self, keys: dict[bytes, _Entry], key: bytes) -> dict[bytes, bytes]:
        entry = self._find(keys, key)
        if entry is not None and not isinstance(entry.value, dict):
            raise _Refused(WRONGTYPE)
        return {} if entry is None else entry.value  # type: ignore[return-value]

    def _store(
        self, keys: dict[bytes, _Entry], key: bytes, value: bytes | dict[bytes, bytes], expires_at_ms: int | None
    ) -> None:
        self._ticks += 1
        before = keys.get(key)
        if before is not None:
            self._nbytes -= before.nbytes(key)
        keys[key] = _Entry(value, before.birth if before else self._ticks, expires_at_ms, self._ticks)
        self._nbytes += keys[key].nbytes(key)

    def _remove(self, keys: dict[bytes, _Entry], key: bytes) -> bool:
        entry = keys.pop(key, None)
        if entry is None:
            return False
        self._nbytes -= entry.nbytes(key)
        return True

    def _make_room(self, nbytes: int) -> None:
        needed = nbytes + OVERHEAD_BYTES
        while self.maxmemory and self._nbytes + needed > self.maxmemory:
            if self.policy == "noeviction" or not self._evict_one():
                raise _Refused(OOM)

    def _evict_one(self) -> bool:
        candidates = [(keys, key) for keys in self._databases for key in keys]
        if not candidates:
            return False
        sample = self._rng.sample(candidates, min(EVICTION_SAMPLES, len(candidates)))
        keys, key = min(sample, key=lambda found: found[0][found[1]].used)
        self._remove(keys, key)
        self.evictions += 1
        return True

    def _flush(self, databases: Sequence[dict[bytes, _Entry]]) -> bytes:
        for keys in databases:
            for key in list(keys):
                self._remove(keys, key)
        return OK

    # -- commands ------------------------------------------------------------------------------------------------------

    def _del(self, keys: dict[bytes, _Entry], command: Command) -> bytes:
        return integer(sum(self._find(keys, key) is not None and self._remove(keys, key) for key in command[1:]))

    def _exists(self, keys: dict[bytes, _Entry], command: Command) -> bytes:
        return integer(sum(self._find(keys, key, use=False) is not None for key in command[1:]))

    def _getrange(self, keys: dict[bytes, _Entry], command: Command) -> bytes:
        first, last = _integer(command[2]), _integer(command[3])
        value = self._string(keys, command[1]) or b""
        if first < 0 and last < 0 and first > last:
            return bulk(b"")
        first = max(first + len(value), 0) if first < 0 else first
        last = max(last + len(value), 0) if last < 0 else last
        return bulk(value[first : last + 1])

    def _hdel(self, keys: dict[bytes, _Entry], command: Command) -> bytes:
        fields = dict(self._hash(keys, command[1]))
        removed = sum(fields.pop(field, None) is not None for field in command[2:])
        if not fields:
            self._remove(keys, command[1])
        elif removed:
            self._store(keys, command[1], fields, keys[command[1]].expires_at_ms)
        return integer(removed)

    def _hgetall(self, keys: dict[bytes, _Entry], command: Command) -> bytes:
        return array(bulk(word) for pair in self._hash(keys, command[1]).items() for word in pair)

    def _hset(self, keys: dict[bytes, _Entry], command: Command) -> bytes:
        if len(command) % 2:
            return wrong_arity(b"HSET")
        fields, entry = dict(self._hash(keys, command[1])), keys.get(command[1])
        num_before = len(fields)
        fields.update(zip(command[2::2], command[3::2], strict=True))
        self._store(keys, command[1], fields, entry.expires_at_ms if entry else None)
        return integer(len(fields) - num_before)

    def _mget(self, keys: dict[bytes, _Entry], command: Command) -> bytes:
        found = [self._find(keys, key) for key in command[1:]]
        return array(bulk(e.value if e is not None and isinstance(e.value, bytes) else None) for e in found)

    def _persist(self, keys: dict[bytes, _Entry], command: Command) -> bytes:
        entry = self._find(keys, command[1])
        if entry is None or entry.expires_at_ms is None:
            return integer(0)
        entry.expires_at_ms = None
        return integer(1)

    def _pexpire(self, keys: dict[bytes, _Entry], command: Command) -> bytes:
        ttl_ms = _integer(command[2])
        entry = self._find(keys, command[1])
        if entry is None:
            return integer(0)
        entry.expires_at_ms = self._now_ms() + ttl_ms
        if ttl_ms <= 0:
            self._remove(keys, command[1])
        return integer(1)

    def _pttl(self, keys: dict[bytes, _Entry], key: bytes) -> int:
        entry = self._find(keys, key, use=False)
        if entry is None:
            return -2
        return -1 if entry.expires_at_ms is None else entry.expires_at_ms - self._now_ms()

    def _ttl(self, keys: dict[bytes, _Entry], command: Command) -> bytes:
        ttl_ms = self._pttl(keys, command[1])
        return integer(ttl_ms if ttl_ms < 0 else (ttl_ms + 500) // 1000)

    def _type(self, keys: dict[bytes, _Entry], command: Command) -> bytes:
        entry = self._find(keys, command[1], use=False)
        return b"+none\r\n" if entry is None else b"+string\r\n" if isinstance(entry.value, bytes) else b"+hash\r\n"

    def _set(self, keys: dict[bytes, _Entry], command: Command) -> bytes:
        options = _set_options(command[3:])
        entry = self._find(keys, command[1])
        if (b"NX" in options and entry is not None) or (b"XX" in options and entry is None):
            return NULL
        expires_at_ms = entry.expires_at_ms if entry is not None and b"KEEPTTL" in options else None
        if (ttl_ms := options.get(b"PX")) is not None:
            expires_at_ms = self._now_ms() + ttl_ms
        self._store(keys, command[1], command[2], expires_at_ms)
        return OK

    def _scan(self, keys: dict[bytes, _Entry], command: Command) -> bytes:
        """In order of birth, so that whatever is there from the first call to the last is found once."""
        if not command[1].isdigit():
            return b"-ERR invalid cursor\r\n"
        pattern, count, words = b"*", 10, list(command[2:])
        while words:
            option = words.pop(0).upper()
            if option not in (b"MATCH", b"COUNT") or not words:
                return SYNTAX_ERROR
            if option == b"MATCH":
                pattern = words.pop(0)
            elif (count := _integer(words.pop(0))) < 1:
                return SYNTAX_ERROR
        left = sorted((e.birth, key) for key, e in self._live(keys).items() if e.birth > int(command[1]))
        page = left[:count]
        cursor = page[-1][0] if len(left) > count else 0
        found = [key for _, key in page if _pattern(pattern).fullmatch(key)]
        return array((bulk(b"%d" % cursor), array(map(bulk, found))))


def wrong_arity(verb: bytes) -> bytes:
    return b"-ERR wrong number of arguments for '%b' command\r\n" % verb.lower()


def _integer(digits: bytes) -> int:
    if not re.fullmatch(rb"-?(0|[1-9]\d{0,17})", digits):
        raise _Refused(NOT_AN_INTEGER)
    return int(digits)


_EXCLUDES = {
    b"PX": {b"EX", b"KEEPTTL"},
    b"EX": {b"PX", b"KEEPTTL"},
    b"KEEPTTL": {b"PX", b"EX"},
    b"NX": {b"XX"},
    b"XX": {b"NX"},
}


def _set_options(words: Sequence[bytes]) -> dict[bytes, int]:
    """Options of SET; EX becomes PX. One that comes twice counts once, its number is looked at last."""
    given: dict[bytes, bytes] = {}
    rest = list(words)
    while rest:
        option = rest.pop(0).upper()
        takes_number = option in (b"PX", b"EX")
        if option not in _EXCLUDES or _EXCLUDES[option] & set(given) or (takes_number and not rest):
            raise _Refused(SYNTAX_ERROR)
        given[option] = rest.pop(0) if takes_number else b"1"
    options = {option: _integer(number) for option, number in given.items()}
    for option, unit_ms in ((b"PX", 1), (b"EX", 1000)):
        if (ttl := options.pop(option, None)) is not None:
            if ttl <= 0:
                raise _Refused(b"-ERR invalid expire time in 'set' command\r\n")
            options[b"PX"] = ttl * unit_ms
    return options


@lru_cache(maxsize=64)
def _pattern(glob: bytes) -> re.Pattern[bytes]:
    """Redis' glob as far as `fnmatch` knows it: * ? [abc]."""
    return re.compile(fnmatch.translate(glob.decode("latin-1")).encode("latin-1"), re.DOTALL)
