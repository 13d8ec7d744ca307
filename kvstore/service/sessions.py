"""Sessions: a client's tickets and leases, and their end. Loop thread only.

A session has two lives: that of its Attach stream, which tickets and pins belong to, and that of its lease socket,
which leases of slots belong to. Either may end first; the session is forgotten when both are over.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from pagetier.kvstore.block import BlockName
from pagetier.kvstore.errors import CapacityError
from pagetier.kvstore.service.leases import Holder
from pagetier.kvstore.service.tiers import Space

logger = logging.getLogger(__name__)

MAX_SESSIONS = 1024
MAX_TICKETS = 4096  # of one session


@dataclass(slots=True)
class Ticket:
    """A lookup's answer: the hit's names and the tier of each. num_loads: under way."""

    names: tuple[BlockName, ...]
    tiers: tuple[str, ...]
    num_loads: int = 0


class Session:
    """One client of one space."""

    def __init__(self, space: Space, holder: Holder, client: str) -> None:
        self.secret = secrets.token_bytes(16)
        self.space, self.holder, self.client = space, holder, client
        self.tickets: dict[int, Ticket] = {}
        self.has_socket = False  # a lease socket is open
        self.is_attached = True

    def enter(self, ticket: int, names: Sequence[BlockName], tiers: Sequence[str]) -> None:
        """Keep a ticket until `release`. Raises CapacityError, the ticket released, when there are too many."""
        if len(self.tickets) >= MAX_TICKETS or not self.is_attached:
            self.space.store.release(ticket)
            raise CapacityError(f"a session has at most {MAX_TICKETS} tickets; release some")
        self.tickets[ticket] = Ticket(tuple(names), tuple(tiers))

    def release(self, ticket: int) -> None:
        """Give up a ticket; nothing for one that there is not. Its loads run to their end."""
        if self.tickets.pop(ticket, None) is not None:
            self.space.store.release(ticket)

    def detach(self) -> None:
        """The Attach stream has ended: no ticket is used any more. Idempotent."""
        self.is_attached = False
        for ticket in list(self.tickets):
            self.release(ticket)

    @property
    def is_over(self) -> bool:
        return not self.is_attached and not self.has_socket


class Sessions:
    """All that live, by their secrets."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, Session] = {}
        self.num_lost_leases = 0  # returned by the end of a socket instead of the client

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_leases(self) -> int:
        return sum(session.holder.num_leases for session in self._sessions.values())

    @property
    def num_tickets(self) -> int:
        return sum(len(session.tickets) for session in self._sessions.values())

    def add(self, session: Session) -> None:
        """Raises CapacityError when there are too many."""
        if len(self._sessions) >= MAX_SESSIONS:
            raise CapacityError(f"this store has {MAX_SESSIONS} clients already")
        self._sessions[session.secret] = session

    def find(self, secret: bytes) -> Session | None:
        """The session, unless its stream has ended."""
        session = self._sessions.get(secret)
        known = session is not None and hmac.compare_digest(session.secret, secret)
        return session if known and session is not None and session.is_attached else None

    def detach(self, session: Session) -> None:
        """Its stream has ended."""
        session.detach()
        self._forget_if_over(session)

    def socket_closed(self, session: Session) -> None:
        """Its lease socket has closed: nobody there touches a slot any more."""
        session.has_socket = False
        num_leases = session.holder.end()
        self.num_lost_leases += num_leases
        if num_leases:
            logger.warning("client %s is gone; %d leases came back", session.client, num_leases)
        self._forget_if_over(session)

    def _forget_if_over(self, session: Session) -> None:
        if session.is_over:
            session.holder.end()
            self._sessions.pop(session.secret, None)
