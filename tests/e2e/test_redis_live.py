"""A `pagetier serve` process over a Valkey that everything happens to (tests/e2e/live.py says what must hold).

Slow: some minutes. The quick part, on an engine in the test's own process, is in test_faults.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.live import FLAGS, ask_all, assert_unharmed, clients, comes_back
from tests.engine.server.real_server import real_server
from tests.kvstore.valkey import Valkey, own_valkey, short_dir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PASSWORD = "first"


@pytest.fixture
def cache() -> Iterator[Path]:
    folder = short_dir()
    yield folder
    shutil.rmtree(folder)


def freeze(valkey: Valkey) -> Callable[[], object]:
    valkey.freeze()
    return valkey.thaw


def kill(valkey: Valkey) -> Callable[[], object]:
    valkey.kill()
    return valkey.start


def restart(valkey: Valkey) -> Callable[[], object]:
    valkey.kill()
    valkey.start()
    return lambda: None


def fill(valkey: Valkey) -> Callable[[], object]:
    """No room for anything new, and nothing is evicted for it."""
    client = valkey.client(password=PASSWORD)
    client.flushall()
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", 1 << 20)
    return lambda: client.config_set("maxmemory", 0)


def change_password(valkey: Valkey) -> Callable[[], object]:
    """Those who are in are thrown out, and come in no more."""
    client = valkey.client(password=PASSWORD)
    client.config_set("requirepass", "second")
    client.client_kill_filter(_type="normal", skipme=True)
    return lambda: client.config_set("requirepass", PASSWORD)


def test_whatever_befalls_valkey_every_request_is_answered(cache: Path) -> None:
    with clients() as client_of, own_valkey(requirepass=PASSWORD) as valkey:
        with real_server(cache, *FLAGS, "--no-enable-prefix-caching") as server:
            reference = ask_all(client_of(server))
            assert not reference.failed
            assert server.stop() == 0
        url = f"unix://:{PASSWORD}@{valkey.socket_path}"
        with real_server(cache, *FLAGS, "--kv-tier", "redis", "--kv-redis-url", url) as server:
            client = client_of(server)
            comes_back(client, "redis")
            for strike in (freeze, kill, restart, fill, change_password):
                mend = strike(valkey)
                replies = ask_all(client)
                mend()
                assert_unharmed(replies, reference, strike.__name__)
                comes_back(client, "redis")
            assert server.stop() == 0
