"""KV events: what the cache does is told in order and in vLLM's schema, to HTTP followers and ZMQ subscribers, and what
a stranger sends harms nobody.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
import zmq

from pagetier.engine.server.event_publisher import END_SEQ, EventPublisher, KvEventsConfig, parse_events_config
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.event_forms import KvEvent, forms_of
from pagetier.kvstore.events import EventKind, EventLog
from tests.engine.server.cached_engine import FACTORY
from tests.engine.server.stack import Stack, running_stack
from tests.kvstore.tier_contract import DOMAIN, chain

A = "abcdefghijklmnopq"


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    paths: dict[str, Any] = {"nvme_path": str(tmp_path / "nvme"), "pins_path": str(tmp_path / "pins")}
    with running_stack(factory=FACTORY, **paths) as running:
        yield running


def publisher(stack: Stack, **fields: Any) -> EventPublisher:
    """One over the stack's hub, on its event loop."""

    async def make() -> EventPublisher:
        config = KvEventsConfig(enable_kv_cache_events=True, **{"endpoint": "tcp://127.0.0.1:*", **fields})
        return EventPublisher(config, stack.service.hub, block_size=4)

    return asyncio.run_coroutine_threadsafe(make(), stack.loop).result(10)


def close(stack: Stack, publishing: EventPublisher) -> None:
    asyncio.run_coroutine_threadsafe(publishing.close(), stack.loop).result(10)


def complete(stack: Stack, prompt: str) -> None:
    stack.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})


def keys_of(stack: Stack, prompt: str) -> list[bytes]:
    return [bytes.fromhex(block["key"]) for block in stack.post("/query", {"prompt": prompt})["blocks"]]


class Subscriber:
    """What a router does: a SUB socket, and a DEALER for replays."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.socket.connect(endpoint)

    def take(self) -> tuple[bytes, int, Any]:
        """Topic, number and batch of the next message."""
        assert self.socket.poll(10_000), "no event came"
        topic, seq, payload = self.socket.recv_multipart()
        return topic, int.from_bytes(seq, "big"), msgpack.unpackb(payload)

    def take_until(self, wanted: Callable[[list[Any]], bool]) -> tuple[bytes, int, Any]:
        """The message that carries a wanted event, wherever in it that stands: what is told at once goes together."""
        seen = []
        while self.socket.poll(10_000):
            topic, seq, batch = self.take()
            if any(wanted(event) for event in batch[1]):
                return topic, seq, batch
            seen += batch[1]
        raise AssertionError(f"no such event among {seen}")

    def replay(self, endpoint: str, *frames: bytes) -> list[tuple[int, Any]]:
        socket = self.context.socket(zmq.DEALER)
        socket.connect(endpoint)
        socket.send_multipart(frames)
        found = []
        while socket.poll(5000):
            empty, seq, payload = socket.recv_multipart()
            assert empty == b""
            if seq == END_SEQ:
                break
            found.append((int.from_bytes(seq, "big"), msgpack.unpackb(payload)))
        socket.close(linger=0)
        return found

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


def test_zmq_messages_are_vllms(stack: Stack) -> None:
    publishing = publisher(stack, replay_endpoint="tcp://127.0.0.1:*", topic="kv@one")
    live, replay = publishing.endpoints
    assert replay is not None
    subscriber = Subscriber(live, "kv@")
    complete(stack, A)  # until a subscription has arrived nothing is sent: so ask for a replay
    events: list[Any] = []
    while len(events) < 2:
        events = [event for _, batch in subscriber.replay(replay, b"", bytes(8)) for event in batch[1]]
    keys = [int.from_bytes(key[:8], "big") for key in keys_of(stack, A)]
    tokens = stack.service.tokenizer.encode(A[:16], add_special_tokens=False)
    assert events[:2] == [["BlockStored", keys, None, tokens, 4, None, medium, None] for medium in ("GPU", "DISK")]
    complete(stack, A[:8] + "ABCDEFGHI")
    topic, seq, batch = subscriber.take_until(lambda event: event[2] == keys[1])  # a chain goes on from its parent
    assert (topic, batch[2]) == (b"kv@one", 0) and seq >= 1 and isinstance(batch[0], float)
    stack.post("/purge", {"prompt": A, "tiers": ["nvme"]})
    _, _, batch = subscriber.take_until(lambda event: event[0] == "BlockRemoved")
    assert ["BlockRemoved", keys, "DISK"] in batch[1]
    later = subscriber.replay(replay, b"", seq.to_bytes(8, "big"))
    assert [number for number, _ in later] == list(range(seq, later[-1][0] + 1))
    subscriber.close()
    close(stack, publishing)


def test_the_map_form_and_whole_keys_are_there_for_who_wants_them(stack: Stack) -> None:
    publishing = publisher(stack, replay_endpoint="tcp://127.0.0.1:*", format="map", block_hashes="bytes")
    subscriber = Subscriber(publishing.endpoints[0])
    complete(stack, A)
    replay = publishing.endpoints[1]
    assert replay is not None
    events: list[Any] = []
    while not events:
        events = [event for _, batch in subscriber.replay(replay, b"", bytes(8)) for event in batch[1]]
    first = events[0]
    assert (first["type"], first["medium"], first["block_hashes"]) == ("BlockStored", "GPU", keys_of(stack, A))
    subscriber.close()
    close(stack, publishing)


def test_what_strangers_send_harms_nobody(stack: Stack) -> None:
    publishing = publisher(stack, replay_endpoint="tcp://127.0.0.1:*")
    live, replay = publishing.endpoints
    assert replay is not None
    subscriber = Subscriber(live)
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(replay)
    for frames in ([b""], [b"x"] * 5, [b"", b"1234567"], [b"x", bytes(8)], [b"", b"\x80" * 9]):
        stranger.send_multipart(frames)
    stranger.send_multipart([b"", bytes(100_000)])  # beyond the limit: the connection is closed
    complete(stack, A)
    events: list[Any] = []
    while not events:
        events = subscriber.replay(replay, b"", bytes(8))
    assert subscriber.replay(replay, b"", b"\xff" * 8) == [], "nothing is that new"
    stranger.close(linger=0)
    context.term()
    subscriber.close()
    close(stack, publishing)


def test_a_socket_in_the_file_system_is_the_owners_alone(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "events.sock"
    publishing = publisher(stack, endpoint=f"ipc://{path}")
    assert stat.S_IMODE(os.stat(path).st_mode) & 0o077 == 0
    close(stack, publishing)


def test_an_endpoint_that_is_taken_is_told_in_one_line(stack: Stack) -> None:
    publishing = publisher(stack)
    with pytest.raises(ConfigError, match="--kv-events-config: .*; give endpoints of this machine that are free"):
        publisher(stack, endpoint=publishing.endpoints[0])
    close(stack, publishing)


def test_followers_over_http_hear_what_happens_from_now_on(stack: Stack) -> None:
    complete(stack, "zzzzyyyyx")
    told: list[dict[str, Any]] = []
    is_open = threading.Event()

    def follow() -> None:
        with httpx.stream("GET", f"{stack.url}/events", timeout=20) as answer:
            is_open.set()
            for line in answer.iter_lines():
                told.append(json.loads(line))
                if told[-1]["kind"] == "removed":
                    return

    thread = threading.Thread(target=follow)
    thread.start()
    assert is_open.wait(10)
    while not stack.service.hub._sinks:
        time.sleep(0.01)
    complete(stack, A)

    def of_a() -> list[dict[str, Any]]:  # a save of the request before may be told now, too
        return [event for event in told if event["kind"] == "stored" and event["num_blocks"] == 4]

    while {event["tier"] for event in of_a()} != {"device", "nvme"}:
        assert thread.is_alive()
        time.sleep(0.01)
    stack.post("/purge", {"all": True, "tiers": ["device"]})
    thread.join(20)
    assert [event["tier"] for event in of_a()] == ["device", "nvme"]
    assert all(event["tokens"] == [0, 15] and event["parent"] is None for event in of_a())
    assert (told[-1]["kind"], told[-1]["tier"]) == ("removed", "device") and told[-1]["num_blocks"] >= 4


def test_who_is_slow_is_told_how_much_was_lost(stack: Stack) -> None:
    from pagetier.engine.server.event_hub import MAX_WAITING

    hub = stack.service.hub

    async def follow() -> list[dict[str, Any]]:
        event = KvEvent(1.0, "removed", "nvme", bytes(32))
        with hub.followed() as queue:
            for sink in hub._sinks:
                sink([event] * (MAX_WAITING + 10), 0)
            seen = [queue.get_nowait() for _ in range(MAX_WAITING)]
            for sink in hub._sinks:
                sink([event], 5)
            return [*seen[-1:], queue.get_nowait(), queue.get_nowait()]

    last, lost, again = asyncio.run_coroutine_threadsafe(follow(), stack.loop).result(10)
    assert lost == {"kind": "lost", "events": 15} and last == again


def test_a_stored_event_is_cut_where_the_chain_breaks() -> None:
    names = chain(6)
    log = EventLog()
    log.stored("nvme", [*names[:3], *names[4:]], DOMAIN)
    log.append(EventKind.CLEARED, "redis", (), (), DOMAIN)
    first, second, cleared = (form for event in log.since(0).events for form in forms_of(event))
    assert (first.key_list, first.parent, first.position) == ([name.key for name in names[:3]], b"", 0)
    assert (second.parent, second.position, second.block_tokens) == (names[3].key, 16, 4)
    assert (cleared.kind, cleared.medium, cleared.keys) == ("cleared", "redis", b"")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "allowed: an object"),
        ('{"enable_kv_events": true}', "did you mean 'enable_kv_cache_events'?"),
        ('{"hwm": "many"}', "--kv-events-config hwm: got 'many'"),
        ('{"hwm": true}', "--kv-events-config hwm: got True"),
        ('{"buffer_steps": -1}', "--kv-events-config buffer_steps: got -1"),
        ('{"publisher": "kafka"}', "allowed: None, zmq, null"),
        ('{"format": "xml"}', "allowed: array, map"),
    ],
)
def test_a_wrong_configuration_names_the_field(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as told:
        parse_events_config(text)
    assert words in str(told.value)


def test_the_configuration_is_vllms() -> None:
    given = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv", "hwm": 7}
    config = parse_events_config(json.dumps(given))
    assert config.is_on and (config.endpoint, config.topic, config.hwm) == ("tcp://*:5557", "kv", 7)
    assert not parse_events_config(None).is_on
    assert not parse_events_config('{"enable_kv_cache_events": true, "publisher": "null"}').is_on
