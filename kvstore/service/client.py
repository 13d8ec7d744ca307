"""A store service as commands see it: the questions of `StoreAdmin` and some more, each call waiting for its answer.

Everything raises PagetierError, one line that names the next step. Any thread; for the engine's way there is
`remote_store`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Sequence
from types import TracebackType
from typing import Any, cast

import grpc

from pagetier.kvstore.admin import BlockInfo, PinInfo, PurgeResult
from pagetier.kvstore.block import BlockName
from pagetier.kvstore.errors import ConfigError, PagetierError, ProtocolError
from pagetier.kvstore.events import StoreEvent
from pagetier.kvstore.identity import domain_of
from pagetier.kvstore.measure import TierSpeed
from pagetier.kvstore.prefixes import Prefix
from pagetier.kvstore.service.address import StoreAddress
from pagetier.kvstore.service.messages import (
    from_event,
    from_pins,
    from_prefixes,
    from_stored_block,
    to_chain,
)
from pagetier.proto import kvstore_pb2 as pb
from pagetier.proto.kvstore_pb2_grpc import KVStoreStub

TIMEOUT_S = 20.0
PURGE_TIMEOUT_S = 60.0
USAGE = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED)


class StoreClient:
    """Implements `admin.Admin` over a service. domain: which of its caches is asked about; empty or the beginning of
    one: the only one that fits.
    """

    def __init__(self, address: StoreAddress, domain: bytes = b"") -> None:
        self.address, self.domain = address, domain
        self._channel = address.channel()
        self._stub = KVStoreStub(self._channel)

    @property
    def shown(self) -> str:
        """The address as it may be shown."""
        return self.address.shown

    def query(self, keys: Sequence[bytes]) -> list[BlockInfo]:
        with self._told():
            reply = self._ask(self._stub.Query, pb.QueryRequest(domain=self.domain, keys=keys))
            return [from_stored_block(block) for block in reply.blocks]

    def known(self) -> list[BlockInfo]:
        with self._told():
            replies = self._ask(self._stub.Known, pb.KnownRequest(domain=self.domain))
            return [from_stored_block(block) for reply in replies for block in reply.blocks]

    def top(self, limit: int = 20) -> list[Prefix]:
        """The hottest prefixes, as `StoreAdmin.top`."""
        with self._told():
            return from_prefixes(self._ask(self._stub.Top, pb.TopRequest(domain=self.domain, limit=limit)).prefixes)

    def pin(
        self, names: Sequence[BlockName], ttl_s: float | None = None, tiers: Collection[str] | None = None
    ) -> PinInfo:
        with self._told():
            request = pb.PinRequest(domain=self.domain, chain=to_chain(names), ttl_s=ttl_s or 0.0, tiers=tiers or ())
            (info,) = from_pins(self._ask(self._stub.Pin, request))
            return info

    def unpin(self, pin_ids: Sequence[str] | None = None) -> list[PinInfo]:
        if pin_ids is not None and not pin_ids:
            return []
        with self._told():
            request = pb.UnpinRequest(domain=self.domain, pins=pin_ids or (), all=pin_ids is None)
            return from_pins(self._ask(self._stub.Unpin, request))

    def pins(self) -> list[PinInfo]:
        with self._told():
            return from_pins(self._ask(self._stub.Unpin, pb.UnpinRequest(domain=self.domain)))

    def purge(
        self,
        *,
        keys: Collection[bytes] | None = None,
        root: bytes | None = None,
        tiers: Collection[str] | None = None,
    ) -> PurgeResult:
        if keys is not None and not keys:
            return PurgeResult()
        with self._told():
            is_all = keys is None and root is None
            request = pb.PurgeRequest(
                domain=self.domain, keys=keys or (), root=root or b"", tiers=tiers or (), all=is_all
            )
            reply = self._ask(self._stub.Purge, request, PURGE_TIMEOUT_S)
            return PurgeResult(dict(sorted(reply.removed.items())), dict(sorted(reply.errors.items())))

    def measure(self) -> dict[str, TierSpeed]:
        with self._told():
            reply = self._ask(self._stub.Measure, pb.MeasureRequest(domain=self.domain), PURGE_TIMEOUT_S)
            return {name: TierSpeed(**fields) for name, fields in json.loads(reply.speeds_json).items()}

    def stats(self) -> dict[str, Any]:
        """`GET /stats` of a store: `domains`, and `service`."""
        with self._told():
            fields = json.loads(self._ask(self._stub.Stats, pb.StatsRequest()).stats_json)
            return cast(dict[str, Any], fields)

    def identities(self) -> dict[bytes, bytes]:
        """Domain -> encoded identity of all that is stored."""
        with self._told():
            reply = self._ask(self._stub.Identities, pb.IdentitiesRequest())
            return {domain_of(encoded): encoded for encoded in reply.identities}

    def events(self, from_seq: int | None = None) -> Iterator[StoreEvent]:
        """What tiers take and lose, without end; from now on unless a number is given."""
        request = pb.EventsRequest(from_seq=from_seq or 0, from_now=from_seq is None)
        with self._told():
            for event in self._stub.Events(request, metadata=self.address.metadata):
                yield from_event(event)

    def close(self) -> None:
        """Idempotent."""
        self._channel.close()

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, method: Any, request: Any, timeout_s: float = TIMEOUT_S) -> Any:
        return method(request, timeout=timeout_s, metadata=self.address.metadata)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Turn every failure of a call into one line."""
        place = self.shown
        try:
            yield
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            details = (error.details() if isinstance(error, grpc.Call) else "") or str(code)
            if code in USAGE:
                raise ConfigError(f"the store at {place}: {details}") from None
            if code is grpc.StatusCode.UNAUTHENTICATED:
                refused = "asks for a token" if self.address.token is None else "refuses the token"
                raise PagetierError(
                    f"the store at {place} {refused}; name the file that its --token-file has: {place}?token_file=FILE"
                ) from None
            if code is grpc.StatusCode.UNAVAILABLE:
                reason, step = self.address.explain(details)
                raise PagetierError(f"no store answers at {place}: {reason}; {step}") from None
            raise PagetierError(f"the store at {place} failed: {details}") from None
        except (ProtocolError, ValueError, TypeError, AttributeError) as error:
            raise PagetierError(f"{place} is not a Pagetier store of this version ({error})") from None
