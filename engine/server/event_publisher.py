"""KV events over ZMQ in vLLM's schema, so that routers which follow vLLM follow this server, too.

A message is topic, sequence number (8 bytes, big-endian), payload: msgpack of [time, [event, ...], rank]. An event is

    ["BlockStored", hashes, parent hash, token ids, block size, LoRA id, medium, LoRA name]
    ["BlockRemoved", hashes, medium]
    ["AllBlocksCleared"]

or a map of the same fields, as in vLLM's later versions (vllm/distributed/kv_events.py). Who missed messages asks the
replay socket for all from a number on. What a subscriber sends is never parsed beyond that.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from pagetier.engine.server.event_hub import EventHub
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.event_forms import KvEvent
from pagetier.kvstore.keys import unpack_tokens

logger = logging.getLogger(__name__)

END_SEQ = (-1).to_bytes(8, "big", signed=True)
MAX_REQUEST_BYTES = 1024  # of a subscriber's message: a number has 8
MEDIA = {"device": "GPU", "host": "CPU", "nvme": "DISK", "redis": "REMOTE"}  # the words that routers know
FORMATS = ("array", "map")
HASHES = ("int", "bytes")


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """vLLM's `KVEventsConfig`, and two fields of our own.

    endpoint: bound when it has a *, ::, ipc:// or a loopback address, else connected to. replay_endpoint: always bound.
    buffer_steps: messages kept for replay. hwm: messages that wait for a slow subscriber. max_queue_size: is vLLM's and
    bounds nothing here, where publishing does not wait. format: `array` or `map`, an event's form. block_hashes: `int`
    (the first 8 bytes of a key) or `bytes` (all 32).
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    format: str = "array"
    block_hashes: str = "int"

    @property
    def is_on(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher in (None, "zmq")


def parse_events_config(text: str | None) -> KvEventsConfig:
    """The JSON of `--kv-events-config`. Raises ConfigError that names the field."""
    if not text:
        return KvEventsConfig()
    flag = "--kv-events-config"
    try:
        given: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f'{flag}: is not JSON ({error}); allowed: an object, such as {{"enable_kv_cache_events": true}}'
        ) from None
    if not isinstance(given, Mapping):
        raise ConfigError(f'{flag}: got {text!r}; allowed: an object, such as {{"enable_kv_cache_events": true}}')
    known = {field.name: field.default for field in fields(KvEventsConfig)}
    for name, value in given.items():
        if name not in known:
            raise ConfigError.unknown_name(f"field in {flag}", name, known)
        kind: Any = (str, type(None)) if name in ("publisher", "replay_endpoint") else type(known[name])
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise ConfigError.bad_value(f"{flag} {name}", value, f"a value like {json.dumps(known[name])}")
    config = KvEventsConfig(**given)
    for name, allowed in (("publisher", (None, "zmq", "null")), ("format", FORMATS), ("block_hashes", HASHES)):
        if getattr(config, name) not in allowed:
            raise ConfigError.bad_value(f"{flag} {name}", getattr(config, name), ", ".join(map(str, allowed)))
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        if not 0 <= getattr(config, name) <= 1 << 24:
            raise ConfigError.bad_value(f"{flag} {name}", getattr(config, name), f"0 to {1 << 24}")
    return config


class EventPublisher:
    """Publishes one engine's events. owner: event loop thread."""

    def __init__(self, config: KvEventsConfig, hub: EventHub, block_size: int) -> None:
        """Binds the sockets. Raises ConfigError for an endpoint that cannot be had."""
        self._config, self._block_size = config, block_size
        self._topic, self._next_seq, self._num_lost = config.topic.encode(), 0, 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.asyncio.Context(io_threads=1)
        self._replaying: asyncio.Task[None] | None = None
        self._replay: zmq.asyncio.Socket | None = None
        self._socket = zmq.Socket(self._context, zmq.PUB)
        try:
            self._open()
        except zmq.ZMQError as error:
            self._close_sockets()
            raise ConfigError(f"--kv-events-config: {error}; give endpoints of this machine that are free") from None
        self._remove = hub.add_sink(self.publish)

    def _open(self) -> None:
        config, socket = self._config, self._socket
        socket.setsockopt(zmq.SNDHWM, config.hwm)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        if _is_own(config.endpoint):
            _bind(socket, config.endpoint)
        else:
            socket.connect(config.endpoint)
        if config.replay_endpoint is not None:
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
            self._replay.setsockopt(zmq.LINGER, 0)
            self._replay.setsockopt(zmq.SNDHWM, config.hwm)
            _bind(self._replay, config.replay_endpoint)
            self._replaying = asyncio.get_running_loop().create_task(self._serve_replay(self._replay))

    @property
    def endpoints(self) -> tuple[str, str | None]:
        """Where it publishes and where it replays; ports that the system chose filled in."""
        last = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return last, None if self._replay is None else self._replay.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, events: Sequence[KvEvent], num_lost: int) -> None:
        """Send events as one message. Lost ones leave a gap in the numbers, which subscribers watch for."""
        if num_lost:
            self._num_lost += num_lost
            self._next_seq += 1
            logger.warning("%d KV events were lost: too many at once; subscribers see a gap", num_lost)
        if not events:
            return
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        payload: bytes = msgpack.packb([events[-1].time_s, [self._form(event) for event in events], 0])
        self._kept.append((seq, payload))
        try:
            self._socket.send_multipart([self._topic, seq.to_bytes(8, "big"), payload], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # a PUB socket drops for slow ones by itself; this is a broken one
            logger.warning("KV events could not be published: %s", error)

    async def close(self) -> None:
        """Stop following and let go of the sockets."""
        self._remove()
        if self._replaying is not None:
            self._replaying.cancel()
            await asyncio.gather(self._replaying, return_exceptions=True)
        self._close_sockets()

    def _close_sockets(self) -> None:
        for socket in (self._socket, self._replay):
            if socket is not None:
                socket.close(linger=0)
        self._context.term()

    def _form(self, event: KvEvent) -> Any:
        hashes, medium = [self._hash(key) for key in event.key_list], MEDIA.get(event.medium, event.medium)
        if event.kind == "stored":
            named: dict[str, Any] = {
                "block_hashes": hashes,
                "parent_block_hash": self._hash(event.parent) if event.parent else None,
                "token_ids": unpack_tokens(event.tokens).tolist(),
                "block_size": event.block_tokens or self._block_size,
                "lora_id": None,
                "medium": medium,
                "lora_name": None,
            }
            return self._shaped("BlockStored", named)
        if event.kind == "removed":
            return self._shaped("BlockRemoved", {"block_hashes": hashes, "medium": medium})
        return self._shaped("AllBlocksCleared", {})

    def _shaped(self, kind: str, named: dict[str, Any]) -> Any:
        return {"type": kind, **named} if self._config.format == "map" else [kind, *named.values()]

    def _hash(self, key: bytes) -> int | bytes:
        return key if self._config.block_hashes == "bytes" else int.from_bytes(key[:8], "big")

    async def _serve_replay(self, socket: zmq.asyncio.Socket) -> None:
        """Answer each request with the messages that are kept, from the asked number on, and an end mark."""
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                logger.info("ignored a request for a replay: it is not an empty frame and 8 bytes")
                continue
            first = int.from_bytes(frames[2], "big")
            for number, (seq, payload) in enumerate(list(self._kept)):
                if number % 64 == 0:
                    await asyncio.sleep(0)  # requests come first
                if seq >= first:
                    await socket.send_multipart([frames[0], b"", seq.to_bytes(8, "big"), payload])
            await socket.send_multipart([frames[0], b"", END_SEQ, b""])


def _bind(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Bind; what is bound in the file system is the owner's alone."""
    before = os.umask(0o177)
    try:
        socket.bind(endpoint)
    finally:
        os.umask(before)


def _is_own(endpoint: str) -> bool:
    """Whether an endpoint is to be bound. vLLM's rule, and loopback: nobody publishes to a subscriber there."""
    return endpoint.startswith(("ipc://", "inproc://")) or any(
        mark in endpoint for mark in ("*", "::", "127.0.0.1", "localhost")
    )
