"""Several Valkeys that belong together, on loopback: a Cluster, and a master with a replica under a Sentinel."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import redis

from pagetier.kvstore.redis.embedded import find_server
from tests.kvstore.valkey import Valkey, own_valkey, short_dir

NUM_SLOTS = 16384
PATIENCE_S = 30.0
QUICK = {"repl_diskless_sync_delay": "0"}  # a replica is sent its data at once


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for(what: str, holds: Callable[[], object]) -> None:
    """Until it does."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_s, f"{what}: not within {PATIENCE_S} s"
        time.sleep(0.02)


class ClusterNode:
    """One server of a Cluster."""

    def __init__(self, server: Valkey) -> None:
        self.server = server
        self.port = int(server.options["port"])
        self.client = server.client()
        self.node_id = self.call("CLUSTER MYID").decode()

    def call(self, command: str) -> bytes:
        """As the server says it."""
        answer = self.client.execute_command(*command.split())  # type: ignore[no-untyped-call]
        assert isinstance(answer, bytes)
        return answer

    def num_known(self) -> int:
        """Nodes it is connected to, itself among them."""
        return self.call("CLUSTER NODES").count(b" connected")

    def is_well(self) -> bool:
        return b"cluster_state:ok" in self.call("CLUSTER INFO")

    def is_in_step(self) -> bool:
        """Of a replica."""
        return is_in_step(self.client)


@contextmanager
def own_cluster(
    num_replicas: int = 0, announced_ports: Sequence[int] = (), **options: str
) -> Iterator[list[ClusterNode]]:
    """Three masters with a third of the slots each, then replicas of the first. `announced_ports`: where clients are
    told that they are, instead of their own."""
    options = {"cluster_node_timeout": "500", "cluster_require_full_coverage": "no", **QUICK, **options}
    with ExitStack() as stack:
        nodes: list[ClusterNode] = []
        for _ in range(3 + num_replicas):
            port, bus = str(free_port()), str(free_port())
            told = {"cluster_announce_port": str(announced_ports[len(nodes)])} if announced_ports else {}
            one = own_valkey(port=port, cluster_port=bus, bind="127.0.0.1", cluster_enabled="yes", **told, **options)
            nodes.append(ClusterNode(stack.enter_context(one)))
        for i, node in enumerate(nodes):
            if i < 3:
                node.call(f"CLUSTER ADDSLOTSRANGE {NUM_SLOTS * i // 3} {NUM_SLOTS * (i + 1) // 3 - 1}")
            node.call(f"CLUSTER SET-CONFIG-EPOCH {i + 1}")
            if i:
                bus = nodes[0].server.options["cluster-port"]
                node.call(f"CLUSTER MEET 127.0.0.1 {nodes[0].port} {bus}")
        wait_for("the nodes know each other", lambda: all(node.num_known() == len(nodes) for node in nodes))
        for replica in nodes[3:]:
            replica.call(f"CLUSTER REPLICATE {nodes[0].node_id}")
        wait_for("the Cluster is up", lambda: all(node.is_well() for node in nodes))
        for replica in nodes[3:]:
            wait_for("the replica is in step", replica.is_in_step)
        yield nodes


@contextmanager
def own_sentinel(service: str, master: Valkey) -> Iterator[int]:
    """A Sentinel that watches `master` alone and fails over within a second or two; its port."""
    directory, port = short_dir(), free_port()
    config = directory / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {directory}\nlogfile {directory}/log\n"
        f"sentinel monitor {service} 127.0.0.1 {master.options['port']} 1\n"
        f"sentinel down-after-milliseconds {service} 300\nsentinel failover-timeout {service} 2000\n"
    )
    process = subprocess.Popen(
        [find_server(), os.fspath(config), "--sentinel"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    client = redis.Redis(port=port, socket_timeout=5.0)
    try:
        wait_for("the Sentinel answers", lambda: _answers(client))
        wait_for("it knows the replica", lambda: client.sentinel_slaves(service))
        yield port
    finally:
        client.close()
        process.kill()
        process.wait()
        shutil.rmtree(directory)


@contextmanager
def own_replica_of(master: Valkey) -> Iterator[Valkey]:
    """A replica that is in step."""
    port = str(free_port())
    with own_valkey(port=port, bind="127.0.0.1", replicaof=f"127.0.0.1 {master.options['port']}") as replica:
        client = replica.client()
        wait_for("the replica is in step", lambda: is_in_step(client))
        yield replica


def is_in_step(replica: redis.Redis) -> bool:
    return bool(replica.info("replication").get("master_link_status") == "up")


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False
