"""What the lower tiers hold of waiting requests' prefixes: asked ahead of their turn, and asked again when device
blocks in front of an answer have gone."""

from __future__ import annotations

from pagetier.engine.config import EngineConfig
from pagetier.engine.request import Request
from pagetier.engine.transfers import Transfers

LOOKAHEAD = 8  # waiting requests whose lower-tier lookup is under way before their turn
MAX_LOOKUPS = 2  # a second try when device blocks in front of the answer were evicted meanwhile


class Lookups:
    """Owner: core thread. Keeps nothing: tickets are the transfers', answers the request's."""

    def __init__(self, config: EngineConfig, transfers: Transfers) -> None:
        self._config, self._transfers = config, transfers

    @property
    def enabled(self) -> bool:
        return self._transfers.enabled and self._config.enable_prefix_caching

    def may_ask(self, request: Request) -> bool:
        """Whether the tiers may be asked about a waiting request, for the first or for another time."""
        if request.skips_tiers:
            return False
        return request.ticket is None and request.lookup_tries < MAX_LOOKUPS and not request.num_placeholders

    def ask(self, request: Request, num_device: int) -> bool:
        """Ask about what the device does not have of it, if it is a block at least, so that the answer is there when
        its turn comes; whether it is."""
        end = self._end(request)
        if end > num_device:
            self._transfers.look_up(request, num_device, end)
        return end > num_device

    def is_open(self, request: Request) -> bool:
        """Whether the lower tiers were asked and have not answered yet."""
        return request.ticket is not None and request.lookup_tiers is None

    def wants(self, request: Request, num_device: int) -> bool:
        """Whether the lower tiers must be asked (again) before the request can be admitted."""
        if not self._transfers.enabled or request.skips_tiers or self._end(request) <= num_device:
            return False
        if request.lookup_tries == 0:
            return True
        if num_device < request.lookup_first and request.lookup_tries < MAX_LOOKUPS:
            self._transfers.release(request)  # device blocks in front of the answer are gone: ask from further left
            return True
        return False

    def tier_end(self, request: Request, num_device: int) -> int:
        """End of the run of blocks, from `num_device` on, that the lower tiers hold."""
        if request.lookup_tiers is None or num_device < request.lookup_first:
            return num_device
        return min(request.lookup_first + len(request.lookup_tiers), self._end(request))

    def _end(self, request: Request) -> int:
        """Blocks that a lower tier may serve: keyed, full, and not the one with the last token."""
        return min(len(request.names), (request.num_tokens - 1) // self._config.block_size)
