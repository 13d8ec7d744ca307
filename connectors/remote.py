"""The connector for a store that is a service: engines of one or several models share it, and outlive it.

On the service's own host blocks are copied between the device pool and the service's memory; from elsewhere they travel
over gRPC. The service may come and go: until it is there, hits end at the device.
"""

from __future__ import annotations

from pagetier.connectors.local import BlockBytes, LocalConnector
from pagetier.kvstore.block import Part
from pagetier.kvstore.config import StoreConfig
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.identity import CacheIdentity
from pagetier.kvstore.service.address import parse_address
from pagetier.kvstore.service.remote_store import RemoteStore


def open_remote_store(config: StoreConfig, identity: CacheIdentity, part: Part, payload_bytes: int) -> RemoteStore:
    """The service that `config.store_url` names, reached or not. Raises ConfigError for an address that cannot be."""
    if config.store_url is None:
        raise ConfigError("--kv-store-url: no address is given")
    address = parse_address(config.store_url)
    return RemoteStore(
        address,
        identity,
        part,
        payload_bytes,
        load_budget_s=config.load_budget_s,
        limits=config.limits,
        copier=config.copier,
    )


class RemoteConnector(LocalConnector):
    """Implements `connectors.base.Connector` over a service, for blocks that the CPU can reach. Owns its connection."""

    def __init__(self, store: RemoteStore, blocks: BlockBytes) -> None:
        super().__init__(store, blocks)
